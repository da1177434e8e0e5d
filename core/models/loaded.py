"""What a source opens to, and what that loads to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.interfaces.attention import AttentionStructure
from core.interfaces.fusing import DecoderPieces, Fusable
from core.interfaces.model import ModelConfig
from core.interfaces.quantizer import WeightQuantizer
from core.types import Attend, Batch, KVGroup, LayerSpec, PartwiseError

GIVES = frozenset({"hidden_states"})
"""What parts may ask of any model here."""


class Runnable(Fusable, Protocol):
    """What turns tokens into hidden states, and those into logits."""

    def forward(self, batch: Batch, attend: Attend) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Description(ModelConfig, Protocol):
    """What loading reads of a model's description, beside what structures read."""

    @property
    def max_positions(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `vocab_size`: rows of the head; `tokenizer_vocab`: how many of them are tokens, where
    known; `max_positions`: the longest sequence it may serve, in tokens; `weight_bytes`: what its weights hold in this
    process.

    `forward(batch, attend)` gives the final hidden states [T, hidden]; `logits(hidden [R, hidden])` are float32 [R, V].
    """

    config: Description
    groups: tuple[KVGroup, ...]
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    tokenizer_vocab: int | None
    weight_bytes: int
    dtype: torch.dtype
    runnable: Runnable

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        return self.runnable.forward(batch, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.runnable.logits(hidden)

    def pieces(self) -> DecoderPieces | None:
        return self.runnable.pieces()


@dataclass(frozen=True)
class Build:
    """How a model is to be loaded. `served`: the longest sequence, in tokens. `check`: called with the groups of its KV
    before any weight is loaded; may raise."""

    structure: AttentionStructure
    weights: WeightQuantizer
    dtype: torch.dtype
    device: str
    served: int
    check: Callable[[Sequence[KVGroup]], None]


@dataclass(frozen=True)
class OpenedModel:
    """A model of which only the description has been read. `needs`: what it asks of an attention kernel; `gives`: what
    parts may ask of it."""

    config: Description
    needs: frozenset[str]
    gives: frozenset[str]
    load: Callable[[Build], LoadedModel]

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size


@dataclass(frozen=True, slots=True)
class Scores:
    """What a layer does to its attention scores: see core.types.LayerSpec."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None


def layer_specs(config: ModelConfig, groups: Sequence[KVGroup], scores: Sequence[Scores]) -> tuple[LayerSpec, ...]:
    """Each layer as a kernel sees it. PartwiseError: the structure left a layer out of all groups."""
    group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    left_out = [number for number in range(len(config.layers)) if number not in group_of]
    if left_out:
        raise PartwiseError(f"the attention structure puts layers {left_out} in no KV group")
    return tuple(
        LayerSpec(
            index=number,
            group=group_of[number],
            q_heads=shape.q_heads,
            kv_heads=shape.kv_heads,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            scale=score.scale,
            window=shape.window,
            softcap=score.softcap,
            value_in_key=shape.value_in_key,
            sinks=score.sinks,
        )
        for number, (shape, score) in enumerate(zip(config.layers, scores, strict=True))
    )


def kernel_needs(config: ModelConfig, *, softcap: bool, sinks: bool) -> frozenset[str]:
    """The capabilities that a kernel must have for a model."""
    asked = {
        "window": any(shape.window for shape in config.layers),
        "latent": any(shape.value_in_key for shape in config.layers),
        "softcap": softcap,
        "sinks": sinks,
    }
    return frozenset(name for name, needed in asked.items() if needed)

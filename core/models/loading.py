"""A model source to a model that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from core.interfaces.attention import AttentionStructure
from core.interfaces.model import Weights
from core.interfaces.quantizer import WeightQuantizer
from core.models.checkpoint import open_folder, open_gguf
from core.models.config import ModelConfig
from core.models.decoder import Decoder
from core.models.describe import describe, describe_gguf, read_folder
from core.models.families import FAMILIES
from core.models.gguf_file import GGUFFile
from core.models.layers import Attend, Parts
from core.models.source import ModelSource, ModelSpec, read_spec, resolve
from core.types import Batch, KVGroup, LayerSpec, PartwiseError


class Runnable(Protocol):
    """What turns tokens into hidden states, and those into logits."""

    def forward(self, batch: Batch, attend: Attend) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `vocab_size`: rows of the head; `max_positions`: the longest sequence it may serve, in
    tokens; `weight_bytes`: what its weights hold in this process.

    `forward(batch, attend)` gives the final hidden states [T, hidden]. It calls `attend(layer, q, k, v)` once a layer,
    in order, with q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv], rotated and normed, not always contiguous, and wants
    [T, Hq, Dv]; v is None where values are part of the keys. `logits(hidden [R, hidden])` are float32 [R, V].
    """

    config: Any
    groups: tuple[KVGroup, ...]
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    dtype: torch.dtype
    runnable: Runnable

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        return self.runnable.forward(batch, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.runnable.logits(hidden)


@dataclass(frozen=True)
class OpenedModel:
    """A model of which only the description has been read. `needs`: what it asks of an attention kernel; `gives`: what
    parts may ask of it."""

    source: ModelSource
    config: ModelConfig
    gguf: GGUFFile | None
    interleaved_rope: bool
    needs: frozenset[str]
    gives: frozenset[str]

    @property
    def max_positions(self) -> int:
        return self.config.max_positions

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size


def open_model(model: ModelSpec | ModelSource | Mapping[str, Any]) -> OpenedModel:
    """Find a model, fetching it if need be, and read its description. PartwiseError: it cannot be served, with what is
    wrong and what to do."""
    if isinstance(model, Mapping):
        model = read_spec(model)
    source = model if isinstance(model, ModelSource) else resolve(model)
    if source.gguf:
        file = GGUFFile(source.gguf)
        config = describe_gguf(file)
        return OpenedModel(source, config, file, False, _needs(config), GIVES)
    assert source.folder is not None
    described, eos = read_folder(source.folder)
    _check_format(described, source)
    if described.model_type not in FAMILIES:
        raise PartwiseError(f"{source.folder}: architecture {described.model_type!r} is not supported")
    config = replace(describe(described), eos_token_ids=eos)
    interleaved = FAMILIES[described.model_type].interleaved_rope(described)
    return OpenedModel(source, config, None, interleaved, _needs(config), GIVES)


GIVES = frozenset({"hidden_states"})


def _needs(config: ModelConfig) -> frozenset[str]:
    asked = {
        "window": any(shape.window for shape in config.layers),
        "softcap": config.attention_softcap is not None,
        "sinks": config.sinks,
        "latent": any(shape.value_in_key for shape in config.layers),
    }
    return frozenset(name for name, needed in asked.items() if needed)


def load_model(
    opened: OpenedModel,
    *,
    structure: AttentionStructure,
    weights: WeightQuantizer,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load an opened model. `dtype` None: the checkpoint's own. `max_model_len`: the longest sequence that will be
    served, in tokens; it chooses between the short and the long factors of longrope (see core.models.rope).

    PartwiseError: a tensor is missing, unexpected or misshapen.
    """
    kind = _dtype(dtype, opened.config.dtype)
    with torch.inference_mode():
        if opened.gguf:
            tensors = open_gguf(opened.gguf, opened.config, kind, device)
        else:
            assert opened.source.folder is not None
            tensors = open_folder(opened.source.folder, opened.config, kind, device, opened.interleaved_rope)
        return _build(opened.config, tensors, structure, weights, kind, device, max_model_len)


def _dtype(asked: torch.dtype | str | None, own: str) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    found = getattr(torch, asked or own, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PartwiseError(f"dtype {asked or own!r} is not known; use float32, bfloat16 or float16")
    return found


def _check_format(config: Any, source: ModelSource) -> None:
    """MXFP4 is read; other quantized checkpoints are not."""
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    if method and str(method) not in ("mxfp4", "QuantizationMethod.MXFP4"):
        raise PartwiseError(
            f"{source.folder} is stored in the format {str(method)!r}, which is not read here; use the checkpoint in "
            "bf16, or a GGUF file"
        )


def _build(
    config: ModelConfig,
    opened: Weights,
    structure: AttentionStructure,
    quantizer: WeightQuantizer,
    dtype: torch.dtype,
    device: str,
    max_model_len: int | None,
) -> LoadedModel:
    converted, opened = structure.convert(config, opened)
    assert isinstance(converted, ModelConfig)
    groups = tuple(structure.kv_groups(converted))
    parts = Parts(opened, quantizer, dtype, device)
    specs = layer_specs(converted, groups, lambda number: _sinks(parts, converted, number))
    decoder = Decoder(parts, converted, specs, max_model_len or converted.max_positions)
    return LoadedModel(
        config=converted,
        groups=groups,
        layers=specs,
        hidden_size=converted.hidden_size,
        vocab_size=decoder.head.out_features,
        max_positions=converted.max_positions,
        eos_token_ids=converted.eos_token_ids,
        weight_bytes=parts.nbytes,
        dtype=dtype,
        runnable=decoder,
    )


def _sinks(parts: Parts, config: ModelConfig, number: int) -> Tensor | None:
    return parts.vector(f"layers.{number}.attn.sinks.weight") if config.sinks else None


def layer_specs(
    config: ModelConfig, groups: Sequence[KVGroup], sinks: Callable[[int], Tensor | None]
) -> tuple[LayerSpec, ...]:
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
            scale=config.attention_scale,
            window=shape.window,
            softcap=config.attention_softcap,
            value_in_key=shape.value_in_key,
            sinks=sinks(number),
        )
        for number, shape in enumerate(config.layers)
    )

"""An engine whose model computes nothing, so that what is left is memory and scheduling."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from core.build import assemble
from core.engine import Engine
from core.recipe import Recipe, resolve
from core.types import Batch, KVGroup, LayerSpec, Request, SamplingParams

VOCAB = 65_536
TOKEN_BYTES = 2 * 2 * 4
"""Of a cache with one layer and two heads of one number."""


class BlankModel:
    """One layer that is never run, and one with a window if there is one; after any token, token 0 or 1 is best, by
    chance."""

    dtype, vocab_size, tokenizer_vocab, max_positions = torch.float32, VOCAB, None, 1 << 20
    eos_token_ids = ()
    weight_bytes = 0

    def __init__(self, window: int | None = None) -> None:
        windows = (None, window) if window else (None,)
        self.groups = [KVGroup(f"{w or 'full'}", (layer,), 2, 1, 1, w) for layer, w in enumerate(windows)]
        self.layers = [LayerSpec(layer, layer, 2, 2, 1, 1, 1.0, w) for layer, w in enumerate(windows)]
        self._chance = torch.Generator().manual_seed(0)

    def forward(self, batch: Batch, attend: Any) -> Tensor:
        return torch.zeros(len(batch.tokens), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.rand(len(hidden), 2, generator=self._chance)


def blank_engine(
    parts: Mapping[str, Any],
    *,
    kv_tokens: int,
    max_model_len: int = 2048,
    max_waiting: int = 100_000,
    window: int | None = None,
) -> Engine:
    """`parts` as in a recipe; `kv_tokens` of one layer."""
    recipe = Recipe.model_validate({
        "name": "blank",
        "model": {},
        **parts,
        "memory": {"kv_bytes": kv_tokens * TOKEN_BYTES},
        "engine": {"max_model_len": max_model_len, "max_waiting": max_waiting, "threads": 1, "seed": 0},
    })
    registry = recipe.registry()
    return assemble(recipe, resolve(recipe, registry), registry, BlankModel(window))  # type: ignore[arg-type]


def request(id: str, prompt: Sequence[int], max_tokens: int | None = None) -> Request:
    return Request(id, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens), time.monotonic())


def answers(engine: Engine) -> Iterator[tuple[str, int]]:
    """Step until all is done; who ended, and how many of its tokens came from a cache."""
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason:
                yield event.id, event.cached_tokens

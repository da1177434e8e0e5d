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
    """One layer that is never run; after any token, token 0 or 1 is best, by chance."""

    groups = (KVGroup("full", (0,), 2, 1, 1),)
    layers = (LayerSpec(0, 0, 2, 2, 1, 1, 1.0),)
    dtype, vocab_size, tokenizer_vocab, max_positions = torch.float32, VOCAB, None, 1 << 20
    eos_token_ids = ()
    weight_bytes = 0

    def __init__(self) -> None:
        self._chance = torch.Generator().manual_seed(0)

    def forward(self, batch: Batch, attend: Any) -> Tensor:
        return torch.zeros(len(batch.tokens), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.rand(len(hidden), 2, generator=self._chance)


def blank_engine(
    parts: Mapping[str, Any], *, kv_tokens: int, max_model_len: int = 2048, max_waiting: int = 100_000
) -> Engine:
    """`parts` as in a recipe."""
    recipe = Recipe.model_validate({
        "name": "blank",
        "model": {},
        **parts,
        "memory": {"kv_bytes": kv_tokens * TOKEN_BYTES},
        "engine": {"max_model_len": max_model_len, "max_waiting": max_waiting, "threads": 1, "seed": 0},
    })
    registry = recipe.registry()
    return assemble(recipe, resolve(recipe, registry), registry, BlankModel())  # type: ignore[arg-type]


def request(id: str, prompt: Sequence[int], max_tokens: int | None = None) -> Request:
    return Request(id, tuple(prompt), SamplingParams(temperature=0.0, max_tokens=max_tokens), time.monotonic())


def answers(engine: Engine) -> Iterator[tuple[str, int]]:
    """Step until all is done; who ended, and how many of its tokens came from a cache."""
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason:
                yield event.id, event.cached_tokens

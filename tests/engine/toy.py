"""A tiny random decoder and an engine over it, for tests that drive many steps."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from core.build import assemble
from core.engine import Engine
from core.recipe import Recipe, resolve
from core.types import Batch, Event, KVGroup, LayerSpec, Request, SamplingParams

VOCAB = 61
HIDDEN, HEADS, KV_HEADS, DIM = 32, 4, 2, 8


class ToyModel:
    """Attention layers of random weights with absolute positions; `windows` gives each layer's window."""

    def __init__(self, windows: Sequence[int | None] = (None, None), seed: int = 0, max_positions: int = 512) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        kinds = sorted(set(windows), key=lambda w: (w is not None, w or 0))
        self.groups = [
            KVGroup(f"window_{w}" if w else "full", tuple(i for i, x in enumerate(windows) if x == w), KV_HEADS, DIM,
                    DIM, w)
            for w in kinds
        ]
        self.layers = [
            LayerSpec(i, kinds.index(w), HEADS, KV_HEADS, DIM, DIM, DIM**-0.5, window=w) for i, w in enumerate(windows)
        ]
        self.embed = weight(VOCAB, HIDDEN) * HIDDEN**0.5 / 2
        self.places = weight(max_positions, HIDDEN) * HIDDEN**0.5 / 2
        self.q = [weight(HEADS * DIM, HIDDEN) * 2 for _ in windows]
        self.k = [weight(KV_HEADS * DIM, HIDDEN) for _ in windows]
        self.v = [weight(KV_HEADS * DIM, HIDDEN) for _ in windows]
        self.o = [weight(HIDDEN, HEADS * DIM) * 6 for _ in windows]
        self.head = weight(VOCAB, HIDDEN) * 3
        self.dtype, self.vocab_size, self.max_positions = torch.float32, VOCAB, max_positions
        self.tokenizer_vocab = None
        self.eos_token_ids: tuple[int, ...] = ()
        self.weight_bytes, self.tokenizer_vocab = 0, None

    def forward(self, batch: Batch, attend: Any) -> Tensor:
        x = self.embed[batch.tokens] + self.places[batch.positions]
        for i in range(len(self.layers)):
            h = torch.nn.functional.layer_norm(x, (HIDDEN,))
            q = (h @ self.q[i].T).view(-1, HEADS, DIM)
            k = (h @ self.k[i].T).view(-1, KV_HEADS, DIM)
            v = (h @ self.v[i].T).view(-1, KV_HEADS, DIM)
            x = x + attend(i, q, k, v).reshape(-1, HEADS * DIM) @ self.o[i].T
        return torch.nn.functional.layer_norm(x, (HIDDEN,))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T


NULL = {"kernel": "eager", "allocator": "contiguous", "scheduler": "static", "cache": "none", "drafter": "none"}


def toy_engine(
    model: Any = None,
    *,
    kernel: str = "eager",
    allocator: str = "paged",
    scheduler: str = "continuous",
    cache: str = "none",
    eviction: str = "lru",
    drafter: str = "none",
    reduction: str = "none",
    kv: str = "none",
    page_size: int = 4,
    budget: int = 16,
    running: int = 8,
    k: int = 3,
    kv_tokens: int = 512,
    max_model_len: int = 128,
    max_waiting: int = 1000,
    plugin_path: str | None = None,
    options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Engine:
    """An engine of the named parts, with room for about `kv_tokens` tokens. `options` go to their seam."""
    model = model or ToyModel()
    token_bytes = sum(len(g.layers) * KV_HEADS * 2 * DIM * 4 for g in model.groups)
    recipe = Recipe.model_validate({
        "name": "toy",
        "model": {},
        "attention": {"structure": "native", "kernel": kernel},
        "kv_allocator": {"name": allocator, "page_size": page_size, **options.get("kv_allocator", {})},
        "scheduler": {
            "name": scheduler, "max_running": running, "token_budget": budget, **options.get("scheduler", {}),
        },
        "quantizer": {"weights": "none", "kv": kv},
        "prefix_cache": {"name": cache, "eviction": eviction, **options.get("prefix_cache", {})},
        "drafter": {"name": drafter, "k": k, **options.get("drafter", {})},
        "context_reduction": {"name": reduction, **options.get("context_reduction", {})},
        "memory": {"kv_bytes": kv_tokens * token_bytes},
        "engine": {"max_model_len": max_model_len, "max_waiting": max_waiting, "threads": 1, "seed": 0},
        "plugin_path": plugin_path,
    })
    registry = recipe.registry()
    return assemble(recipe, resolve(recipe, registry), registry, model)


_ids = itertools.count()


def request(
    prompt: Sequence[int],
    id: str | None = None,
    salt: str = "",
    priority: int = 0,
    client: str = "",
    **params: Any,
) -> Request:
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    return Request(id or f"r{next(_ids)}", tuple(prompt), sampling, time.monotonic(), priority, salt, client)


def drain(engine: Engine, check: bool = True, steps: int = 5000) -> list[Event]:
    """Step until nothing is left, checking conservation after each step."""
    events = []
    for _ in range(steps):
        if not engine.has_work:
            return events
        events += engine.step()
        if check:
            engine.check()
    raise AssertionError(f"still working after {steps} steps: {engine.stats()}")


def outputs(events: Sequence[Event]) -> dict[tuple[str, int], list[int]]:
    """Token ids by request and choice."""
    found: dict[tuple[str, int], list[int]] = {}
    for event in events:
        found.setdefault((event.id, event.index), []).extend(event.tokens)
    return found


def generate(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
    """Greedy by default; token ids for each prompt, in order."""
    requests = [request(prompt, **params) for prompt in prompts]
    for item in requests:
        engine.add(item)
    found = outputs(drain(engine))
    return [found[item.id, 0] for item in requests]

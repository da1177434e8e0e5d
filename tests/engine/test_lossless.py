"""Lossless parts do not change greedy output: all pairs of the parts at hand, over three kinds of model."""

from __future__ import annotations

import itertools
import random
from functools import cache

import pytest

from core.registry import Registry
from tests.engine.toy import NULL, VOCAB, ToyModel, generate, toy_engine

MODELS = {"full": (None, None), "mixed": (8, None, 8), "window": (5, 5)}


def _lossless(seam: str) -> list[str]:
    registry = Registry()
    return [name for name in registry.names(seam) if "lossless" in registry.info(seam, name).provides]


AXES = {
    "kernel": _lossless("attention.kernel"),
    "allocator": _lossless("kv_allocator"),
    "scheduler": _lossless("scheduler"),
    "cache": _lossless("prefix_cache"),
    "drafter": _lossless("drafter"),
    "page_size": [1, 4, 16],
    "budget": [5, 16, 64],
    "kv_tokens": [176, 1024],
    "preemption": ["swap", "recompute"],
    "chunked_prefill": [True, False],
}
EVICTIONS = itertools.cycle(_lossless("prefix_cache.eviction"))
"""What goes first can only change what is computed again: each policy in some rows will do."""


def all_pairs(axes: dict[str, list]) -> list[dict]:
    """Few rows in which every two values of different axes meet."""
    names = list(axes)
    pairs = {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(names, 2)
        for x in axes[a]
        for y in axes[b]
    }
    rng, rows = random.Random(0), []
    while pairs:
        best = max(
            ({name: rng.choice(axes[name]) for name in names} for _ in range(60)),
            key=lambda row: sum(pair <= set(row.items()) for pair in pairs),
        )
        seed = next(iter(sorted(pairs, key=lambda pair: sorted(map(repr, pair)))))
        best |= dict(seed)
        pairs = {pair for pair in pairs if not pair <= set(best.items())}
        rows.append({**best, "eviction": next(EVICTIONS)})
    return rows


PROMPTS = [[random.Random(n).randrange(VOCAB) for _ in range(n)] for n in (1, 7, 32, 5, 17, 40)]
SHARED = [[*PROMPTS[5][:24], *tail] for tail in ([1], [2, 3, 4], list(range(16)), PROMPTS[5][24:])]


@cache
def _model(kind: str) -> ToyModel:
    return ToyModel(MODELS[kind])


@cache
def _reference(kind: str) -> list[list[int]]:
    """Each prompt by itself, through the null parts."""
    engine = toy_engine(_model(kind), **NULL, kv_tokens=4096)
    return [generate(engine, [prompt], max_tokens=24)[0] for prompt in PROMPTS + SHARED]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("row", all_pairs(AXES), ids=lambda row: "-".join(map(str, row.values())))
def test_greedy_output_is_the_same_for_every_pair_of_parts(row: dict, kind: str) -> None:
    parts = {name: value for name, value in row.items() if name not in ("preemption", "chunked_prefill")}
    options = {"scheduler": {name: row[name] for name in row.keys() - parts.keys()}}
    engine = toy_engine(_model(kind), **parts, options=options)
    assert generate(engine, PROMPTS + SHARED, max_tokens=24) == _reference(kind)
    again = generate(engine, (PROMPTS + SHARED)[::-1], max_tokens=24)[::-1]
    assert again == _reference(kind)


@pytest.mark.parametrize("kind", MODELS)
def test_every_chunk_and_page_size_gives_the_same(kind: str) -> None:
    for page_size in (1, 2, 16):
        for budget in (page_size - 1 or 1, page_size, page_size + 1, 200):
            engine = toy_engine(_model(kind), page_size=page_size, budget=budget, cache="hash")
            for _ in range(2):
                assert generate(engine, [PROMPTS[2]], max_tokens=24) == [_reference(kind)[2]]

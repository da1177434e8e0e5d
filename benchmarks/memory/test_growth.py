"""What scheduling and the cache's books cost a step, as the queue and the pool grow.

A model that computes nothing, so a step is planning, admission, matching, eviction, allocation and the batch's arrays.
Sixteen sequences run; each has a prompt of 64 tokens and makes 8, so two end and two are admitted in a step. The
figures are means, in microseconds of this thread's time, for each running sequence; Python's collector does not visit
what was there before.

    python -m pytest benchmarks/memory/test_growth.py -s -k queue
    python -m pytest benchmarks/memory/test_growth.py -s -k pool
"""

from __future__ import annotations

import gc
import itertools
import random
import time

import pytest

from benchmarks.memory.blank import VOCAB, blank_engine, request
from core.engine import Engine
from core.types import Request, SamplingParams

RUNNING, PROMPT, OUTPUT = 16, 64, 8
STEPS = 200
SCHEDULERS = ("static", "continuous", "priority", "shortest_first", "fair", "cache_aware", "slo")
QUEUES = (10, 100, 1_000, 10_000)
POOLS = (1_000, 10_000, 100_000, 1_000_000)
MEMORIES = {
    "hash": {"prefix_cache": {"name": "hash", "eviction": "lru"}},
    "radix": {"prefix_cache": {"name": "radix", "eviction": "lru"}},
    "radix, and a window": {"prefix_cache": {"name": "radix", "eviction": "lru"}},
    "no cache, paged": {},
    "no cache, contiguous": {"kv_allocator": {"name": "contiguous", "fit": "best", "page_size": 16}},
}
PAGE = 16
NOISE = 3.0
"""Times that a step may grow over the whole range: caches of the processor miss more, heaps are a little deeper."""
FOUND: dict[tuple[str, str, int], float] = {}


def engine_of(parts: dict, n_pages: int, window: int | None = None) -> Engine:
    base = {
        "kv_allocator": {"name": "paged", "page_size": PAGE},
        "scheduler": {"name": "continuous", "max_running": RUNNING, "token_budget": 2048},
    }
    return blank_engine({**base, **parts}, kv_tokens=n_pages * PAGE, max_model_len=65_536, window=window)


def asks(seed: int = 0):
    """Endless requests of random tokens, from eight clients of four priorities."""
    source = random.Random(seed)
    for number in itertools.count():
        prompt = tuple(source.choices(range(2, VOCAB), k=PROMPT))
        params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
        yield Request(f"{seed}-{number}", prompt, params, time.monotonic(), number % 4, client=f"{number % 8}")


def micros_a_sequence(engine: Engine, n_waiting: int) -> float:
    """The queue is filled up again between steps, outside of what is timed."""
    source, seconds, sequences = asks(1), 0.0, 0
    for step in range(4 * OUTPUT + STEPS):
        while len(engine.waiting) < n_waiting:
            engine.add(next(source))
        started = time.thread_time()
        engine.step()
        if step >= 4 * OUTPUT:
            seconds += time.thread_time() - started
            sequences += len(engine.running)
    return seconds / sequences * 1e6


def quietly(measure) -> float:
    gc.collect()
    gc.freeze()
    try:
        return measure()
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("n_waiting", QUEUES)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_queue(benchmark, scheduler, n_waiting):
    parts = {
        "scheduler": {"name": scheduler, "max_running": RUNNING, "token_budget": 2048},
        "prefix_cache": {"name": "radix", "eviction": "lru"},
    }

    def once() -> float:
        engine = engine_of(parts, 2_000)
        return quietly(lambda: micros_a_sequence(engine, n_waiting))

    FOUND["queue", scheduler, n_waiting] = benchmark.pedantic(once, rounds=1)


def fill(engine: Engine) -> None:
    """Leave a prefix cache full of prompts that nobody asks for again."""
    source, long = random.Random(2), 256
    for number in range(engine.memory.groups[0].n_pages // long + 1):
        engine.add(request(f"fill-{number}", source.choices(range(2, VOCAB), k=long * PAGE - 8), 1))
        while engine.has_work:
            engine.step()


@pytest.mark.parametrize("n_pages", POOLS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_pool(benchmark, memory, n_pages):
    def once() -> float:
        engine = engine_of(MEMORIES[memory], n_pages, 128 if "window" in memory else None)
        if "prefix_cache" in MEMORIES[memory]:
            fill(engine)
        return quietly(lambda: micros_a_sequence(engine, 2 * RUNNING))

    FOUND["pool", memory, n_pages] = benchmark.pedantic(once, rounds=1)


def draw(lines: dict[str, dict[int, float]], label: str, path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4))
    for arm, line in lines.items():
        axis.plot(line.keys(), line.values(), marker="o", label=arm)
    axis.set(xscale="log", xlabel=label, ylabel="µs a step for each running sequence", ylim=(0, None))
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


@pytest.mark.parametrize(
    ("kind", "sizes", "label"), [("queue", QUEUES, "waiting requests"), ("pool", POOLS, "pages of the pool")]
)
def test_steps_do_not_grow(kind, sizes, label, results):
    arms = list(dict.fromkeys(arm for of, arm, _ in FOUND if of == kind))
    lines = {arm: {n: FOUND[kind, arm, n] for n in sizes} for arm in arms}
    name = f"growth_{kind}.svg"
    picture = results.picture(name)
    if picture:
        draw(lines, label, picture)
    results.show(
        f"Growth: {label}",
        [{kind: arm, **{f"{n:,}": micros for n, micros in line.items()}} for arm, line in lines.items()],
        "Microseconds a step for each of 16 running sequences (64 tokens of prompt, 8 of output).",
        name,
    )
    assert [arm for arm, line in lines.items() if line[sizes[-1]] > NOISE * line[sizes[0]]] == []

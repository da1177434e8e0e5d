"""How much of the KV memory holds tokens, and how many requests run in the same bytes, for each allocator.

Lengths are log-normal with the means of ShareGPT in Kwon et al. (SOSP 2023): 161 tokens of prompt and 338 of output.
There, engines that reserve a run for each request used 20 to 38 % of their memory for tokens, and paging 96 %. A run
is reserved as a server does that knows no length (`max`), that rounds the output up to a power of two (`pow2`), or
that knows it (`oracle`).

    python -m pytest benchmarks/memory/test_waste.py -s
"""

from __future__ import annotations

import math
import os
import random
import statistics

import pytest

from benchmarks.memory.blank import blank_engine, request

REQUESTS = int(os.environ.get("PARTWISE_REQUESTS", 120))
KV_TOKENS = 16_384
LIMIT = 2048
ARMS = {
    "contiguous first max": ({"name": "contiguous", "fit": "first"}, "max"),
    "contiguous best max": ({"name": "contiguous", "fit": "best"}, "max"),
    "contiguous first pow2": ({"name": "contiguous", "fit": "first"}, "pow2"),
    "contiguous best pow2": ({"name": "contiguous", "fit": "best"}, "pow2"),
    "contiguous first oracle": ({"name": "contiguous", "fit": "first"}, "oracle"),
    "paged": ({"name": "paged"}, "max"),
    "paged_per_head": ({"name": "paged_per_head"}, "max"),
    "tiered": ({"name": "tiered"}, "max"),
}
FOUND: dict[str, dict] = {}


def lengths(n: int) -> list[tuple[int, int]]:
    source = random.Random(0)

    def draw(mean: float, sigma: float) -> int:
        return max(4, round(source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))

    return [(min(1024, draw(161, 1.0)), min(1000, draw(338, 0.9))) for _ in range(n)]


def limit_of(output: int, knows: str) -> int | None:
    return {"max": None, "pow2": 1 << (output - 1).bit_length(), "oracle": output}[knows]


def serve(allocator: dict, knows: str) -> dict:
    engine = blank_engine(
        {"kv_allocator": allocator, "scheduler": {"name": "continuous", "max_running": 256, "token_budget": 1024}},
        kv_tokens=KV_TOKENS,
        max_model_len=LIMIT,
    )
    wanted = {}
    for number, (prompt, output) in enumerate(lengths(REQUESTS)):
        engine.add(request(f"{number}", range(2, 2 + prompt), limit_of(output, knows)))
        wanted[f"{number}"] = output
    made = dict.fromkeys(wanted, 0)
    used, internal, external, running = [], [], [], []
    while engine.has_work:
        for event in engine.step():
            made[event.id] += len(event.tokens)
            if made[event.id] >= wanted[event.id]:
                engine.abort(event.id)
        if engine.waiting and engine.counters.steps % 8 == 0:
            groups = engine.stats()["kv"].values()
            total = sum(group["total_bytes"] for group in groups)
            for found, name in ((used, "used"), (internal, "internal_waste"), (external, "external_waste")):
                found.append(100 * sum(group[f"{name}_bytes"] for group in groups) / total)
            running.append(len(engine.running))
    names = ("used %", "reserved, empty %", "fragments %", "running")
    values = (used, internal, external, running)
    return {name: float(statistics.mean(found)) for name, found in zip(names, values, strict=True)}


@pytest.mark.parametrize("arm", ARMS)
def test_waste(benchmark, arm):
    FOUND[arm] = benchmark.pedantic(serve, args=ARMS[arm], rounds=1)
    benchmark.extra_info.update(FOUND[arm])


def test_paging_uses_what_runs_waste(results):
    results.show(
        "Allocators: what holds tokens, and how many run",
        [{"allocator": arm, **found} for arm, found in FOUND.items()],
        f"{REQUESTS} requests of ShareGPT's mean lengths in {KV_TOKENS:,} tokens of memory for each, averaged over the "
        "steps in which some wait. `max`, `pow2`, `oracle`: how well the output's length is known as it is reserved.",
    )
    assert FOUND["paged"]["used %"] > 90
    assert FOUND["contiguous first max"]["used %"] < 40
    assert FOUND["paged"]["running"] > 2 * FOUND["contiguous first max"]["running"]

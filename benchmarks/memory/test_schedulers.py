"""Speed and latencies under each scheduler: short chats and, in between, long prompts, arriving as they please.

SmolLM2-135M with the compiled CPU parts, without drafts, in one engine that is idle as its scheduler is changed. Every
arm gets the same arrivals, in rounds that go through all arms in a new order; medians of the rounds. TTFT is from
arrival to the first token, ITL the time between two tokens of one answer (all gaps pooled), `in time` the share of
requests with a TTFT of at most a second and no gap over 200 ms.

    python -m pytest benchmarks/memory/test_schedulers.py -s
"""

from __future__ import annotations

import os
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from core.build import build_engine
from core.compose import compose
from core.engine import Engine
from core.interfaces.plugin import BuildContext
from core.recipe import resolve
from core.types import Request, SamplingParams

ROUNDS = int(os.environ.get("PARTWISE_ROUNDS", 3))
SHORT, LONG, DOCUMENT, SECONDS = 12, 2, 512, 1.5
TTFT, GAP = 1.0, 0.2
ARMS = {
    "static": ["scheduler=static"],
    "continuous": ["scheduler=continuous"],
    "continuous, prompts whole": ["scheduler=continuous", "scheduler.chunked_prefill=false"],
    "priority": ["scheduler=priority"],
    "shortest_first": ["scheduler=shortest_first"],
    "fair": ["scheduler=fair"],
    "cache_aware": ["scheduler=cache_aware"],
    "slo": ["scheduler=slo", f"scheduler.ttft_ms={1000 * TTFT:g}", f"scheduler.itl_ms={1000 * GAP:g}"],
}
MAX_RUNNING, TOKEN_BUDGET = 8, 128
WORDS = [
    "drafter=none",
    f"scheduler.max_running={MAX_RUNNING}",
    f"scheduler.token_budget={TOKEN_BUDGET}",
    "memory.kv_bytes=512MiB",
    "engine.max_model_len=2048",
]


@dataclass
class Served:
    arrival: float
    times: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]

    @property
    def in_time(self) -> bool:
        return self.ttft <= TTFT and max(self.gaps, default=0) <= GAP


def load(seed: int) -> list[tuple[float, Request]]:
    """Arrivals in seconds from the start: chats over one of two instructions, class 0, from three clients, and long
    documents, class 1, from one."""
    source = random.Random(seed)
    instructions = [source.choices(range(100, 40_000), k=64) for _ in range(2)]
    made = []
    for number in range(SHORT + LONG):
        short = number < SHORT
        head = source.choice(instructions) if short else []
        prompt = head + source.choices(range(100, 40_000), k=source.randrange(16, 65) if short else DOCUMENT)
        params = SamplingParams(temperature=0.0, max_tokens=source.randrange(16, 33), ignore_eos=True)
        at = source.uniform(0, SECONDS) if short else SECONDS * (number - SHORT + 1) / (LONG + 1)
        client = f"chat {number % 3}" if short else "documents"
        made.append((at, Request(f"{seed}-{number}", tuple(prompt), params, 0.0, int(not short), client=client)))
    return sorted(made, key=lambda pair: pair[0])


def serve(engine: Engine, arrivals: list[tuple[float, Request]]) -> dict[str, float]:
    engine.memory.flush()
    pending, served = arrivals[::-1], {}
    started = time.monotonic()
    while pending or engine.has_work:
        now = time.monotonic()
        while pending and started + pending[-1][0] <= now:
            at, asked = pending.pop()
            arrival = started + at
            engine.add(Request(asked.id, asked.prompt, asked.params, arrival, asked.priority, client=asked.client))
            served[asked.id] = Served(arrival)
        if not engine.has_work:
            time.sleep(max(0.0, started + pending[-1][0] - time.monotonic()))
        for event in engine.step():
            assert event.error is None, event.error
            served[event.id].times += [time.monotonic()] * len(event.tokens)
    took = time.monotonic() - started
    ttfts = [1000 * one.ttft for one in served.values()]
    gaps = [1000 * gap for one in served.values() for gap in one.gaps]
    return {
        "tokens/s": sum(len(one.times) for one in served.values()) / took,
        **{f"TTFT p{p} ms": float(np.percentile(ttfts, p)) for p in (50, 95)},
        **{f"ITL p{p} ms": float(np.percentile(gaps, p)) for p in (50, 95)},
        "ITL max ms": max(gaps),
        "in time %": 100 * statistics.mean(one.in_time for one in served.values()),
    }


def scheduler_of(words: list[str], engine: Engine) -> Any:
    recipe = compose("cpu_fast", [*words, *WORDS])
    registry = recipe.registry()
    chosen = resolve(recipe, registry)["scheduler"]
    context = BuildContext(
        page_size=engine.memory.page_size,
        max_model_len=engine.limits.max_model_len,
        max_running=MAX_RUNNING,
        token_budget=TOKEN_BUDGET,
        vocab_size=engine.limits.vocab_size,
    )
    return registry.build("scheduler", chosen.info.name, chosen.options, context)


@pytest.mark.model
@pytest.mark.timeout(1800)
def test_schedulers(benchmark, results):
    engine = build_engine(compose("cpu_fast", WORDS))
    serve(engine, load(0)[:2])

    def all_rounds() -> dict[str, list[dict[str, float]]]:
        found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
        for number in range(1, ROUNDS + 1):
            for arm in random.Random(number).sample(list(ARMS), len(ARMS)):
                engine.scheduler = scheduler_of(ARMS[arm], engine)
                found[arm].append(serve(engine, load(number)))
        return found

    found = benchmark.pedantic(all_rounds, rounds=1)
    rows = [
        {"scheduler": arm, **{name: float(statistics.median(r[name] for r in of)) for name in of[0]}}
        for arm, of in found.items()
    ]
    benchmark.extra_info["rows"] = rows
    results.show(
        "Schedulers under a mixed load",
        rows,
        f"{SHORT} chats and {LONG} prompts of {DOCUMENT} tokens within {SECONDS:g} s, outputs of 16 to 32 tokens; at "
        f"most {MAX_RUNNING} run, {TOKEN_BUDGET} tokens a step; medians of {ROUNDS} interleaved rounds. "
        "`prompts whole`: chunked_prefill off, so that running answers wait until a prompt is done.",
    )
    by_arm = {row["scheduler"]: row for row in rows}
    assert by_arm["continuous, prompts whole"]["ITL max ms"] > 2 * by_arm["continuous"]["ITL max ms"]
    assert by_arm["continuous"]["TTFT p50 ms"] < by_arm["static"]["TTFT p50 ms"]

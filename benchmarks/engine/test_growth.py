"""Time of a decode step from 1 to 64 running requests of 256 tokens, and what of it is the engine's own.

python -m pytest benchmarks/engine/test_growth.py -s
"""

from __future__ import annotations

import random
import statistics
import time

import pytest
from rich.console import Console
from rich.table import Table

from core import LLM
from core.types import Event

CONTEXT, STEPS, ROUNDS = 256, 24, 3
RUNNING = (1, 2, 4, 8, 16, 32, 64)
WORDS = ["drafter=none", "prefix_cache=none", "engine.max_model_len=512", "scheduler.max_running=64"]
WORDS += ["scheduler.token_budget=256", "memory.kv_bytes=2GiB"]
OWN = ("scheduler", "kv_allocator", "prefix_cache", "sampling", "drafter", "context_reduction")


class Steps:
    """Milliseconds of an engine's steps that only decode, and of those in the model."""

    def __init__(self, llm: LLM) -> None:
        self._engine, self._step = llm.engine, llm.engine.step
        self.whole: list[float] = []
        self.model: list[float] = []
        llm.engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> list[Event]:
        before, started = self._engine.clock.seconds["model"], time.perf_counter()
        events = self._step()
        seconds = time.perf_counter() - started
        step = self._engine.stats()["last_step"]
        if step["tokens"] == step["batch_size"] == self.wanted:
            self.whole.append(seconds * 1e3)
            self.model.append((self._engine.clock.seconds["model"] - before) * 1e3)
        return events

    def measure(self, llm: LLM, n: int, seed: int) -> None:
        rng, self.wanted = random.Random(seed), n
        prompts = [[rng.randrange(10, 49_000) for _ in range(CONTEXT)] for _ in range(n)]
        llm.generate(prompts, temperature=0, max_tokens=STEPS + n, ignore_eos=True)  # the first waits for the last


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["premium_chat", "cpu_fast"])
def test_a_step_grows_less_than_its_requests(recipe: str) -> None:
    table = Table("running", "ms a step", "of it outside the model", "tokens/s", title=f"{recipe}, context {CONTEXT}")
    medians = {}
    with LLM(recipe=recipe, overrides=WORDS) as llm:
        steps = Steps(llm)
        steps.measure(llm, 4, 0)
        for n in RUNNING:
            steps.whole.clear(), steps.model.clear()
            for round in range(ROUNDS):
                steps.measure(llm, n, round)
            whole, model = statistics.median(steps.whole), statistics.median(steps.model)
            medians[n] = whole
            table.add_row(str(n), f"{whole:.2f}", f"{whole - model:.2f}", f"{n / whole * 1e3:,.0f}")
    Console().print(table)
    assert medians[64] < 64 * medians[1] / 2

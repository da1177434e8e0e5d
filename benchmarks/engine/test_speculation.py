"""What drafting by prompt lookup gives on text that repeats itself, alone: same tokens, in turn with and without.

python -m pytest benchmarks/engine/test_speculation.py -s
"""

from __future__ import annotations

import inspect
import json
import statistics
import textwrap
import time

import pytest
from rich.console import Console
from rich.table import Table

from core import LLM
from core.types import Event

ROUNDS, TOKENS = 5, 128
WORDS = ["prefix_cache=none", "engine.max_model_len=2048"]
CODE = inspect.getsource(textwrap.wrap) + inspect.getsource(textwrap.fill) + inspect.getsource(textwrap.shorten)
PROSE = " ".join((json.__doc__ or "").split())[:1200]
TEXTS = {
    "code, edited": f"{CODE}\n\n# The same functions with other names of arguments:\n\n{CODE[:400]}",
    "summary that quotes": f"{PROSE}\n\nThe text above once more:\n\n{PROSE[:200]}",
    "fresh prose": "It was late in the year when the two engineers finally met, and",
}


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["premium_chat", "cpu_fast"])
def test_prompt_lookup_pays_where_text_repeats(recipe: str) -> None:
    table = Table("text", "without", "ngram", "ratio (range)", "drafts accepted", title=f"{recipe}, alone, tokens/s")
    gains = {}
    with (
        LLM(recipe=recipe, overrides=[*WORDS, "drafter=none"]) as plain,
        LLM(recipe=recipe, overrides=[*WORDS, "drafter=ngram"]) as drafting,
    ):
        for name, text in TEXTS.items():
            before = drafting.stats()
            pairs = [(_rate(plain, text), _rate(drafting, text)) for _ in range(ROUNDS + 1)][1:]
            after = drafting.stats()
            drafted, accepted = (sum(after[key]) - sum(before[key]) for key in ("drafted", "accepted"))
            ratios = [with_it / without for (without, _), (with_it, _) in pairs]
            assert all(theirs == ours for (_, theirs), (_, ours) in pairs)
            gains[name] = statistics.median(ratios)
            table.add_row(
                name,
                f"{statistics.median(rate for (rate, _), _ in pairs):.0f}",
                f"{statistics.median(rate for _, (rate, _) in pairs):.0f}",
                f"{gains[name]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{accepted} of {drafted}",
            )
    Console().print(table)
    assert gains["code, edited"] > 1.2 and gains["summary that quotes"] > 1.2
    assert gains["fresh prose"] > 0.9


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["premium_chat", "cpu_fast"])
def test_verifying_costs_little_more_than_a_token(recipe: str) -> None:
    """A step that computes n tokens of one sequence, with logits for each, after about 256 others."""
    table = Table("tokens", "ms a step", "against one", title=f"{recipe}, alone, time in the model")
    medians: dict[int, float] = {}
    for n in (1, 2, 3, 5, 9):
        words = [*WORDS, "drafter=none", f"scheduler.token_budget={n}"]
        with LLM(recipe=recipe, overrides=words) as llm:
            prompt = llm.tokenizer.encode(CODE)[:320]
            times = _step_times(llm, prompt, n)
        medians[n] = statistics.median(times[len(times) // 2 :])
        table.add_row(str(n), f"{medians[n]:.2f}", f"{medians[n] / medians[1]:.2f}")
    Console().print(table)
    assert medians[5] < 3 * medians[1]


def _step_times(llm: LLM, prompt: list[int], n: int) -> list[float]:
    """Milliseconds in the model of each step that computed n tokens."""
    seconds, step, times = llm.engine.clock.seconds, llm.engine.step, []

    def timed() -> list[Event]:
        before = seconds["model"]
        events = step()
        if llm.engine.stats()["last_step"]["tokens"] == n:
            times.append((seconds["model"] - before) * 1e3)
        return events

    llm.engine.step = timed  # type: ignore[method-assign]
    llm.generate([prompt], temperature=0, max_tokens=1, prompt_logprobs=0)
    return times


def _rate(llm: LLM, text: str) -> tuple[float, list[int]]:
    """Tokens a second after the first one, and the tokens."""
    prompt = llm.tokenizer.encode(text)

    def seconds(n: int) -> tuple[float, list[int]]:
        started = time.perf_counter()
        [result] = llm.generate([prompt], temperature=0, max_tokens=n, ignore_eos=True)
        return time.perf_counter() - started, result.token_ids

    first, _ = seconds(1)
    whole, tokens = seconds(1 + TOKENS)
    return TOKENS / (whole - first), tokens

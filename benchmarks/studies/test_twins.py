"""A null result on the real model: parts that only do their books, and one arm against itself, come out as "none".

`pytest -s benchmarks/studies` takes about ten minutes on two cores and wants the machine for itself.
"""

import pytest

from core.ablate.__main__ import command
from core.lab import analysis
from core.lab.ledger import Ledger
from core.lab.plan import read_lock

WORDS = [
    "recipe=premium_chat", "design=one_at_a_time", "parts=[prefix_cache,drafter]", "prefix_cache.books_only=true",
    "drafter.books_only=true", "workload=agents", "agents.n=4", "quality.tokens=60", "margin=20%",
]  # fmt: skip


@pytest.mark.timeout(1800)
def test_twins_and_one_arm_against_itself_are_no_effect(tmp_path):
    assert command([*WORDS, "budget=8min", f"output={tmp_path}"]) == 0
    plan, _ = read_lock(tmp_path / "lock.yaml")
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        found = analysis.results(
            plan.design, list(plan.workloads), plan.metric, analysis.by_key(ledger.trials), plan.log_margin
        )
    verdicts = {r.effect.name: r.verdict.kind for r in found}
    assert verdicts == {"radix (books only)": "none", "ngram (books only)": "none", "A/A": "none"}

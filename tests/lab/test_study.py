"""Whole studies of simulated arms: what they find, when they stop, and that a kill loses nothing."""

import json
import math
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from core.lab import analysis, report, study
from core.lab.errors import BudgetError, LabError, UsageError
from core.lab.ledger import Failure, Header, Impossible, Ledger, Trial, read
from core.lab.study import Study
from tests.lab.fakes import GAINS, FakeLab, runner, study_plan


def run(tmp_path, plan, lab=None, **options):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        why = Study(plan, ledger, lab or FakeLab(), run=runner(**options)).run()
        results = analysis.results(
            study.workable(plan.design, ledger),
            list(plan.workloads),
            plan.metric,
            analysis.by_key(ledger.trials),
            plan.log_margin,
        )
        return why, {(r.effect.name, r.workload): r for r in results}, ledger


def test_a_ladder_finds_the_gains_and_the_null(tmp_path):
    _, found, ledger = run(tmp_path, study_plan(blocks=12), sd=0.015)
    for part in ("int8", "continuous", "radix"):
        r = found[part, "chat"]
        assert r.verdict.kind == "real"
        assert r.estimate.low < math.log(GAINS[part]) < r.estimate.high
    assert found["paged", "chat"].verdict.kind == "none", "a part that does its books and gives nothing"
    assert found["A/A", "chat"].verdict.kind == "none"
    total = found["full over baseline", "chat"].estimate
    assert math.exp(total.mean) == pytest.approx(1.4 * 2.0 * 1.2, rel=0.05)
    assert len(ledger.trials) == len({t.key for t in ledger.trials})


def test_a_factorial_finds_the_planted_interaction_and_no_other(tmp_path):
    plan = study_plan("factorial", blocks=8)
    _, found, _ = run(tmp_path, plan, synergies={("paged", "radix"): 1.25}, sd=0.02)
    planted = found["paged x radix", "chat"]
    assert planted.verdict.kind == "real"
    assert planted.estimate.low < math.log(1.25) < planted.estimate.high
    others = [r for (name, _), r in found.items() if " x " in name and name != "paged x radix"]
    assert len(others) == 5 and all(r.verdict.kind != "real" for r in others)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_studies_keep_their_word(tmp_path):
    """The whole path, stopping included: coverage of 95 % intervals, false reals of A/A, planted interactions."""
    plan = study_plan("factorial", gains={"a": 1.3, "b": 1.0}, blocks=8)
    truth = {"a": math.log(1.3), "b": 0.0, "a x b": 0.0, "A/A": 0.0}
    covered, real = {name: 0 for name in truth}, {name: 0 for name in truth}
    for number in range(1000):
        folder = tmp_path / str(number)
        _, found, _ = run(folder, plan, gains={"a": 1.3, "b": 1.0}, sd=0.03, seed=number)
        for (name, _), r in found.items():
            covered[name] += r.estimate.low <= truth[name] <= r.estimate.high
            real[name] += r.verdict.kind == "real"
    assert all(920 <= n <= 980 for n in covered.values()), covered
    assert real["A/A"] <= 60 and real["b"] <= 60 and real["a x b"] <= 60, real
    assert real["a"] >= 990


def test_arms_are_interleaved_in_random_order(tmp_path):
    _, _, ledger = run(tmp_path, study_plan(blocks=4), sd=0.1)
    orders = [[t.arm for t in ledger.trials if t.block == b] for b in range(4)]
    assert all(sorted(o) == sorted(orders[0]) for o in orders)
    assert len({tuple(o) for o in orders}) > 1
    assert [t.block for t in ledger.trials] == sorted(t.block for t in ledger.trials)
    assert [t.position for t in ledger.trials if t.block == 0] == list(range(6))


def test_effects_that_are_known_rest_and_the_study_ends(tmp_path):
    why, _, ledger = run(tmp_path, study_plan(blocks=40), sd=0.002)
    assert why == "every effect is known well enough"
    assert len({t.block for t in ledger.trials}) == 5
    why, _, ledger = run(tmp_path / "b", study_plan(blocks=7), sd=0.2)
    assert why == "7 blocks were run"


def test_an_impossible_arm_is_recorded_and_the_rest_goes_on(tmp_path):
    _, found, ledger = run(tmp_path, study_plan(), FakeLab(impossible={"+ paged"}))
    entries = [e for e in ledger.entries if isinstance(e, Impossible)]
    assert [(e.arm, e.reasons) for e in entries] == [("+ paged", ["+ paged needs what nothing gives"])]
    assert {name for name, _ in found} == {"int8", "radix", "full over baseline", "A/A"}
    everything = {a.name for a in study_plan().design.arms}
    with pytest.raises(LabError, match="no effect can be measured"):
        run(tmp_path / "b", study_plan(), FakeLab(impossible=everything))


def test_an_arm_that_fails_twice_is_given_up(tmp_path):
    lab = FakeLab(broken={"+ continuous"})
    _, found, ledger = run(tmp_path, study_plan(), lab)
    assert [e.block for e in ledger.entries if isinstance(e, Failure)] == [0, 1]
    assert lab.started.count("+ continuous") == 2
    assert ("int8", "chat") in found and ("radix", "chat") not in found
    with pytest.raises(LabError, match="does not start"):
        run(tmp_path / "b", study_plan(), FakeLab(broken={a.name for a in study_plan().design.arms}))


class Clock:
    """Each look at it costs a second of the budget."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_the_budget_bounds_a_study(tmp_path):
    plan = study_plan(budget_s=100.0, blocks=1000)
    clock = Clock()
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        why = Study(plan, ledger, FakeLab(), run=runner(sd=0.2), clock=clock).run()
        assert "budget" in why
        assert clock.now <= 120
        whole = [b for b in range(10) if sum(t.block == b for t in ledger.trials) == 6]
        assert whole, "whole blocks were run"


def test_a_budget_too_short_for_one_block_says_so_and_keeps_what_was_measured(tmp_path):
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        with pytest.raises(BudgetError, match=r"too short for one block of 6 arms: \d were measured, about \d+ s"):
            Study(study_plan(budget_s=12.0), ledger, FakeLab(), run=runner(), clock=Clock()).run()
        assert 0 < len(ledger.trials) < 6
        more = study_plan(budget_s=1e6)
        Study(more, ledger, FakeLab(), run=runner()).run()
        keys = [t.key for t in ledger.trials]
        assert len(keys) == len(set(keys)), "a larger budget goes on from there"


def normal(text):
    return re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d\+00:00)?", "WHEN", text)


def facts(path):
    rows = []
    for entry in read(path):
        if isinstance(entry, Trial):
            rows.append((entry.key, entry.position, entry.summary))
    return rows


def test_sigkill_in_the_middle_and_resume_give_the_same_report(tmp_path):
    def start(folder, seconds):
        command = [sys.executable, "-m", "tests.lab.fakes", str(folder), str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    assert start(tmp_path / "whole", 0.0).wait() == 0
    killed = 0
    ledger = tmp_path / "killed" / "ledger.jsonl"
    for wanted in (3, 23):
        process = start(tmp_path / "killed", 0.05)
        end = time.monotonic() + 60
        while time.monotonic() < end and (not ledger.exists() or ledger.read_bytes().count(b'"trial"') < wanted):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed == 2
    with ledger.open("ab") as file:
        file.write(b'{"type":"trial","arm":"half a li')
    assert start(tmp_path / "killed", 0.0).wait() == 0
    keys = [key for key, _, _ in facts(ledger)]
    assert len(keys) == len(set(keys)), "no arm twice"
    assert facts(ledger) == facts(tmp_path / "whole" / "ledger.jsonl")
    for name in ("report.md", "report.html", "lock.yaml"):
        whole, resumed = ((tmp_path / f / name).read_text() for f in ("whole", "killed"))
        assert normal(whole) == normal(resumed)


def test_a_ledger_forgives_a_torn_end_only(tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.append(Header({"a": 1}, {}, "now"))
        with pytest.raises(UsageError, match="another study is writing"):
            Ledger(path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert len(read(path)) == 1
        with Ledger(path) as ledger:
            assert len(ledger.entries) == 1
            ledger.append(Impossible("x", [], ["y"]))
        assert [type(e) for e in read(path)] == [Header, Impossible]
    path.write_bytes(b"{broken}\n" + whole)
    with pytest.raises(UsageError, match=r"ledger\.jsonl:1 is not a ledger entry"):
        read(path)


def test_report_says_what_was_found(tmp_path):
    plan = study_plan(blocks=6, workloads={"chat": {}, "document": {}}, price={"usd_per_hour": 3.6})
    run(tmp_path, plan, FakeLab(impossible={"+ radix"}), sd=0.01, fail=2)
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        page = report.write(plan, ledger)
        built = report.build(plan, ledger)
    html, markdown = page.read_text(), (tmp_path / "report.md").read_text()
    assert any(f.startswith("continuous: ") and "on chat" in f and "on document" in f for f in built.findings)
    assert any(re.search(r"paged: no effect on \w+ \(below \d", f) for f in built.findings)
    assert "of" in built.warnings[0] and "requests failed" in built.warnings[0]
    for text in (html, markdown):
        assert "+ radix needs what nothing gives" in text
        assert "$3.6 an hour" in text or "$3.60" in text
    assert not re.findall(r'(?:src|href)="?https?://', html), "opens offline"
    assert html.count("<svg") >= 3 and "<script" not in html
    rate = next(r for r in built.rows["chat"] if r.mean.arm == "baseline")
    assert rate.usd_per_million == pytest.approx(3.6 / 3600 / rate.mean.values["output_tokens_per_s"] * 1e6)
    for picture in built.pictures:
        assert (tmp_path / "charts" / f"{picture}.svg").read_text().startswith("<svg")


def test_a_ledger_line_is_plain_json(tmp_path):
    run(tmp_path, study_plan(blocks=1))
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert all(np.isfinite(r["summary"]["values"]["requests_per_s"]) for r in rows if r["type"] == "trial")

"""How suites behave for their author: names, levels, skips, reports, and the pytest plugin."""

import json
import subprocess
import sys

import pytest

from core.interfaces import SEAMS
from core.testing import SUITES, SchedulerSuite, conformance, suite_for
from core.testing.report import as_json, as_text, checklist, overview
from core.testing.suite import BASES, Outcome, Suite, level_of, run
from core.testing.world import World
from tests.testing.test_broken_parts import FOLDER

pytest_plugins = ["pytester"]


def test_every_seam_has_a_suite():
    assert SUITES.keys() == SEAMS.keys() == BASES.keys()


@pytest.mark.parametrize("seam", SUITES)
def test_suites_have_checks_on_every_level(seam):
    suite = suite_for(seam)
    assert suite.seam == seam and suite.__doc__
    levels = {level_of(check) for check in suite.checks()}
    assert levels >= {0, 1, 2, 4}
    assert 3 in levels or seam in ("attention.structure", "prefix_cache.eviction"), "parts with state need any order"


def test_a_class_or_a_line_is_all_an_author_writes():
    class TestMine(SchedulerSuite):
        part = "static"

    line = conformance("scheduler", "static")
    for suite in (TestMine, line):
        assert issubclass(suite, Suite) and suite.part == "static"
        assert [o.status for o in run(suite, {1})] == ["passed"] * 15
    assert line.__name__.startswith("Test")


def test_runs_by_level_and_name():
    suite = conformance("kv_allocator", "paged")
    assert {o.level for o in run(suite, {1}, keep=lambda name: "extend" in name)} == {1}
    assert [o.check for o in run(suite, keep=lambda name: "pages_are_fresh" in name)] == ["test_l1_pages_are_fresh"]


def test_skips_are_by_capability_and_say_so():
    outcomes = list(run(conformance("prefix_cache", "none"), {1, 2}))
    skipped = {o.check: o.detail for o in outcomes if o.status == "skipped"}
    assert skipped and all("keeps_nothing" in detail for detail in skipped.values())
    assert "test_l2_salts_never_meet" in skipped and "test_l1_pages_are_counted" not in skipped


def test_options_reach_the_part():
    suite = conformance("drafter", "ngram", n_max=3, n_min=3)()
    assert suite.drafter().options.n_max == 3
    assert suite.drafter(k=2).options.k == 2


def test_an_unknown_part_fails_every_check_with_near_names():
    outcomes = list(run(conformance("scheduler", "statc"), {0, 1}))
    assert all(o.status == "failed" and "did you mean static" in o.detail for o in outcomes)


def test_the_world_judges_a_cached_prefix():
    world: World = conformance("scheduler", "static")().world()
    world.cached = lambda seq: 100
    seq = world.add(prompt=9, output=2)
    world.step()
    assert seq.num_computed == 9 and seq.num_tokens == 10 and not world.broken


OUTCOMES = [
    Outcome("scheduler", "mine", "test_l1_always_moves", 1, "passed", "", 0.5),
    Outcome("scheduler", "mine", "test_l1_nobody_starves", 1, "failed", "waits [for ever]", 0.1),
    Outcome("scheduler", "mine", "test_l2_output_equals_the_null_parts", 2, "skipped", "not lossless", 0.0),
    Outcome("drafter", "mine", "test_l0_card_is_complete", 0, "passed", "", 0.0),
]


def test_reports_read_well():
    text = as_text(overview(OUTCOMES))
    assert "scheduler=mine" in text and "1/2" in text and "waits [for ever]" in text and "not lossless" in text
    text = as_text(checklist(OUTCOMES[:3]))
    assert "nobody starves" in text and "1 passed, 1 failed, 1 skipped" in text
    report = as_json(OUTCOMES)
    assert not report["ok"]
    assert {p["seam"]: (p["passed"], p["failed"], p["skipped"]) for p in report["parts"]} == {
        "scheduler": (1, 1, 1),
        "drafter": (1, 0, 0),
    }
    assert as_json(OUTCOMES[3:])["ok"]
    json.dumps(report)


AUTHOR = """
from core.testing import {suite}, conformance

class TestMine({suite}):
    part = "{part}"
    plugin_path = {path!r}
"""


def run_pytest(pytester, path, part, *words):
    pytester.makepyfile(AUTHOR.format(suite="AllocatorSuite", part=part, path=str(path)))
    report = pytester.path / "report.json"
    words = ["-q", "-p", "no:cacheprovider", "--partwise-report", str(report), *words]
    command = [sys.executable, "-m", "pytest", *words]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=200)
    return done, json.loads(report.read_text()) if report.exists() else None


def test_pytest_names_each_check_and_reports(pytester):
    done, report = run_pytest(pytester, FOLDER / "broken_allocators.py", "ForgivesADoubleFree", "-k", "l0 or l1")
    assert done.returncode == 1
    (part,) = report["parts"]
    failed = [check["check"] for check in part["checks"] if check["status"] == "failed"]
    assert failed == ["test_l1_foreign_and_free_pages_are_errors"] and not report["ok"]
    assert "free([-1]) must raise ValueError" in done.stdout
    assert "kv_allocator=ForgivesADoubleFree" in done.stdout and "L1 invariants" in done.stdout
    assert "one file: card and class are imported together" in done.stdout, "skips are printed"
    assert {check["level"] for check in part["checks"]} == {0, 1}


def test_pytest_prints_nothing_without_conformance_checks(pytester):
    pytester.makepyfile("def test_it(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "Conformance" not in done.stdout


def test_the_plugin_imports_nothing_heavy():
    code = "import sys, core.testing.pytest_plugin; print([m for m in sys.modules if m in ('torch', 'hypothesis')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

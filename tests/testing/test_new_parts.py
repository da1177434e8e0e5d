"""What `new` makes, from nothing to serving: in a fresh environment, with no file of ours changed."""

import json
import re
import signal
import subprocess

import httpx
import pytest

from core.interfaces import SEAMS
from tests.serve.tiny_model import save_tiny_model
from tests.testing.fresh import Fresh, environment

OPTION = {
    "attention.structure": "layers",
    "attention.kernel": "queries",
    "kv_allocator": "ahead",
    "scheduler": "window",
    "quantizer.weights": "bits",
    "quantizer.kv": "bits",
    "prefix_cache": "pages",
    "prefix_cache.eviction": "credit",
    "drafter": "window",
    "context_reduction": "window",
}
SMALL = ["engine.threads=1", "engine.max_model_len=256", "memory.kv_bytes=8MiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return Fresh(tmp_path_factory.mktemp("one"), ["scheduler"])


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return Fresh(tmp_path_factory.mktemp("every"), list(SEAMS))


def words_for(seams):
    """`scheduler=mine scheduler.window=3` for each seam."""
    return [word for seam in seams for word in (f"{seam.replace('.', '/')}=mine", f"{seam}.{OPTION[seam]}=3")]


def assert_listed(fresh, seams):
    lines = fresh.plugins_json("list", "recipe=baseline", *words_for(seams))
    mine = {line["seam"]: line for line in lines if line["name"] == "mine"}
    assert mine.keys() == set(seams)
    for seam, line in mine.items():
        assert line["active"] and line["version"] == "0.1.0" and line["api"] == "1.0", line
        assert line["distribution"] == "partwise-" + re.sub(r"[._]", "-", seam) + "-mine"
    assert fresh.plugins_json("doctor")["findings"] == []


def assert_serves(fresh, model, seams):
    process = subprocess.Popen(
        [
            str(fresh.python),
            "-m",
            "core.serve",
            "recipe=baseline",
            f"model={model}",
            "server.port=0",
            *SMALL,
            *words_for(seams),
        ],
        cwd=fresh.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        shown = ""
        for line in process.stdout:
            shown += line
            if found := re.search(r"ready at (http\S+)", line):
                break
        else:
            raise AssertionError(process.communicate()[1])
        for seam in seams:
            assert re.search(rf"{re.escape(seam)}\W+mine\W", shown)
            assert f"{OPTION[seam]}=3" in shown
        body = {"model": model.name, "prompt": "hello hello hello", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def assert_sweeps(fresh, model, seams):
    """Two values of the first one's option as two arms of one multirun."""
    output = fresh.folder / "sweep"
    words = [f"{seams[0].replace('.', '/')}=mine", f"{seams[0]}.{OPTION[seams[0]]}=3,4", *words_for(seams[1:])]
    load = ["workload=chat", "chat.turns=1", "chat.n=1", "load.concurrency=1", f"output={output}"]
    fresh.module("core.bench", "-m", "recipe=baseline", f"model={model}", *SMALL, *words, *load)
    ledger = [json.loads(line) for line in (output / "ledger.jsonl").read_text().splitlines()]
    arms = [line for line in ledger if line["type"] != "study"]
    assert [arm["type"] for arm in arms] == ["trial", "trial"], arms
    assert len({arm["arm"] for arm in arms}) == 2


def test_a_new_part_is_listed(one):
    assert_listed(one, ["scheduler"])


def test_a_new_part_passes_its_checks(one):
    report = one.plugins_json("check", "scheduler.mine", "-l", "0", "-l", "1")
    assert report["ok"] and report["parts"][0]["passed"] > 15 and not report["parts"][0]["skipped"]


def test_a_new_part_shows_its_options(one):
    shown = one.plugins("show", "mine")
    assert "partwise-scheduler-mine 0.1.0" in shown and "scheduler.window" in shown and "number above 0" in shown


def test_a_new_part_serves(one, model):
    assert_serves(one, model, ["scheduler"])


def test_a_wrong_option_of_a_new_part_names_it(one, model):
    process = subprocess.run(
        [str(one.python), "-m", "core.serve", "recipe=baseline", f"model={model}", "scheduler=mine",
         "scheduler.window=-1"],
        cwd=one.folder, env=environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert process.returncode == 1
    assert "partwise-scheduler-mine 0.1.0" in process.stderr and "scheduler.window" in process.stderr


@pytest.mark.slow
def test_a_new_part_in_a_multirun(one, model):
    assert_sweeps(one, model, ["scheduler"])


@pytest.mark.slow
class TestEverySeam:
    def test_listed(self, every):
        assert_listed(every, list(SEAMS))

    @pytest.mark.parametrize("seam", SEAMS)
    def test_passes_its_checks(self, every, seam):
        report = every.plugins_json("check", f"{seam}.mine")
        assert report["ok"], report
        assert {check["level"] for check in report["parts"][0]["checks"]} >= {0, 1, 2, 4}

    def test_all_serve_together(self, every, model):
        assert_serves(every, model, list(SEAMS))

    def test_all_sweep_together(self, every, model):
        assert_sweeps(every, model, list(SEAMS))

    def test_the_distribution_tests_itself(self, every):
        report = every.folder / "report.json"
        every.module(
            "pytest", str(every.folder / "scheduler"), "-q", "-p", "no:cacheprovider", "--partwise-report", str(report)
        )
        assert json.loads(report.read_text())["ok"]

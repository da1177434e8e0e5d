"""`core.bench` and `core.ablate` as a user calls them; stub servers stand in for the engine's."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from core.ablate.__main__ import command as ablate
from core.bench.__main__ import command as bench
from core.bench.__main__ import expand
from core.lab import hosts, recipes
from core.lab.errors import UsageError
from core.lab.plan import duration, read_lock
from tests.lab.conftest import STUB

PACE = {"scheduler=static": 0.03, "scheduler=continuous": 0.004}


@contextmanager
def stub_server(words):
    """A stub whose pace depends on the scheduler, and which loses quality when the recipe says int8."""
    gap = next((pace for word, pace in PACE.items() if word in words), 0.004)
    loss = 0.4 if any("int8" in w for w in words) else 0.0
    with hosts.server(["--gap", str(gap), "--loss", str(loss)], command=(str(STUB),)) as host:
        yield host


@pytest.fixture(autouse=True)
def no_engine(monkeypatch, tmp_path):
    monkeypatch.setattr("core.bench.run.server", stub_server)
    monkeypatch.setattr("core.ablate.run.server", stub_server)
    impossible = {"prefix_cache=hash"}
    monkeypatch.setattr(recipes, "reasons", lambda words: [f"{w} cannot be" for w in words if w in impossible])
    monkeypatch.setattr(recipes, "model_facts", lambda words: {"name": "stub"})
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


SMALL = ["workload=document", "document.n=2", "document.output_tokens=8", "document.input_tokens=16"]


def test_one_arm(stub, tmp_path, capsys):
    with stub("--gap", "0.002") as url:
        assert bench([f"target={url}", "goodput.ttft=10000", "price=2", *SMALL]) == 0
    said = capsys.readouterr().out
    for text in ("TTFT p50 / p90 / p95 / p99", "requests a second that meet all targets", "a million output tokens"):
        assert text in said
    (folder,) = (tmp_path / "data" / "partwise" / "bench").iterdir()
    assert str(folder) in said.replace("\n", "")
    requests = rows(folder / "requests.jsonl")
    assert len(requests) == 2 and requests[0]["request"]["token_times"]
    assert os.listdir(tmp_path) == ["data"], "nothing is left in the current folder"


def test_a_sweep_lands_in_one_ledger_and_is_not_run_again(tmp_path, capsys):
    sweep = ["-m", "scheduler=static,continuous", "prefix_cache=none,hash", "output=out", *SMALL]
    assert bench(sweep) == 0
    entries = rows(tmp_path / "out" / "ledger.jsonl")
    kinds = [e["type"] for e in entries]
    assert kinds.count("trial") == 2 and kinds.count("impossible") == 2 and kinds.count("study") == 1
    assert {e["arm"] for e in entries if e["type"] == "trial"} == {
        "scheduler=static prefix_cache=none",
        "scheduler=continuous prefix_cache=none",
    }
    reasons = [e["reasons"] for e in entries if e["type"] == "impossible"]
    assert reasons == [["prefix_cache=hash cannot be"]] * 2
    said = capsys.readouterr().out
    assert "prefix_cache=hash cannot be" in said
    assert "document: rates a second, times in ms" in said and "document: what was used" in said
    assert "…" not in said, "the tables fit a terminal of 80 columns"
    assert bench(sweep) == 0
    assert [e["type"] for e in rows(tmp_path / "out" / "ledger.jsonl")].count("trial") == 2
    assert "done before" in capsys.readouterr().out
    assert bench([*sweep, "again=true"]) == 0
    trials = [e for e in rows(tmp_path / "out" / "ledger.jsonl") if e["type"] == "trial"]
    assert sorted(t["block"] for t in trials) == [0, 0, 1, 1]
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_hydras_grammar_makes_the_sweep():
    arms = expand(["scheduler=static,continuous", "drafter.k=range(1,4)", "recipe=x"], sweep=True)
    assert len(arms) == 6 and arms[0] == ["scheduler=static", "drafter.k=1", "recipe=x"]
    assert expand(["a=1,2"], sweep=False) == [["a=1,2"]]
    with pytest.raises(UsageError, match="cannot read the sweep"):
        expand(["a=[1"], sweep=True)


@pytest.mark.parametrize(
    "words,code,says",
    [
        (["workload=chta"], 2, "did you mean 'chat'"),
        (["scheduler=contnuous", "workload=chat"], 2, "did you mean continuous"),
        (["recipe=premum_chat"], 2, "premium_chat"),
        (["worklod=chat"], 2, "did you mean 'workload'"),
        (["chat.turn=2"], 2, "did you mean 'turns'"),
        (["agents.n=2"], 2, "agents.n is given, but workload=chat"),
        (["workload=chat,agents"], 2, "sweep over them with -m"),
        (["workload"], 2, "write key=value"),
        (["seed=1", "seed=2"], 2, "given twice"),
        (["repeat=0"], 2, "repeat is a whole number"),
        (["again=perhaps"], 2, "again is true or false"),
        (["goodput.tftt=3"], 2, "did you mean 'ttft'"),
        (["goodput.ttft=-3"], 2, "a time in milliseconds"),
        (["target=localhost"], 2, "target is a server's URL"),
        (["target=http://127.0.0.1:9", "scheduler=static"], 2, "changes nothing on a running server"),
        (["target=http://127.0.0.1:9", "target.apy=chat"], 2, "did you mean 'api'"),
        (["target=http://127.0.0.1:9"], 3, "nothing answers at http://127.0.0.1:9"),
        (["workload=mooncake", "path=/nowhere"], 2, "cannot read the trace"),
        (["price=1", "gpu=l4"], 2, "give one of them"),
        (["gpu=h1000"], 2, "h100"),
        (["prefix_cache=hash"], 2, "cannot be"),
    ],
)
def test_bad_input_of_bench(words, code, says, capsys):
    assert bench(words) == code
    captured = capsys.readouterr()
    assert says in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_a_broken_trace_names_its_line(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"prompt": "fine"}\n{"prompt": \n')
    assert bench(["workload=prompts", "path=t.jsonl"]) == 2
    assert "t.jsonl:2 is broken" in capsys.readouterr().err
    assert ablate(["workload=prompts", "path=t.jsonl", "output=out"]) == 2
    assert "t.jsonl:2 is broken" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "nothing was started"


def test_errors_of_a_target_are_kept_and_told(stub, tmp_path, capsys):
    with stub("--fail-every", "3") as url:
        assert bench([f"target={url}", "warmup=0", "document.n=6", "output=out", *SMALL[:1], *SMALL[2:]]) == 3
    assert "2 of 6 requests failed (2 x HTTP 500: the stub fails on purpose)" in capsys.readouterr().out
    (trial,) = (e for e in rows(tmp_path / "out" / "ledger.jsonl") if e["type"] == "trial")
    assert trial["summary"]["completed"] == 4


PAIR = ["design=pair", "a=[scheduler=static]", "b=[scheduler=continuous]", *SMALL, "blocks=2", "budget=5min",
        "quality.tokens=60", "quality.path=text"]  # fmt: skip


@pytest.fixture
def text_file(tmp_path):
    (tmp_path / "text").write_text("some words to read " * 50)


def test_a_study_from_words_to_report_replay_and_diff(tmp_path, text_file, capsys):
    assert ablate([*PAIR, "output=first"]) == 0
    said = capsys.readouterr().out
    assert "scheduler=continuous: " in said and " on document (" in said
    first = tmp_path / "first"
    assert {"report.html", "report.md", "lock.yaml", "ledger.jsonl"} <= set(os.listdir(first))
    html = (first / "report.html").read_text()
    assert "All arms gave exactly the answers" in html and "stub" in html
    made, environment = read_lock(first / "lock.yaml")
    assert environment["model"] == {"name": "stub"} and made.blocks == 2
    assert ablate(["replay=first/lock.yaml", "output=second"]) == 0
    ledgers = [rows(tmp_path / folder / "ledger.jsonl") for folder in ("first", "second")]
    trials = [[(e["arm"], e["block"], e["position"]) for e in each if e["type"] == "trial"] for each in ledgers]
    assert trials[0] == trials[1], "the same arms in the same order"
    capsys.readouterr()
    assert ablate(["diff=first,second"]) == 0
    assert "no change seen" in capsys.readouterr().out
    before = (first / "ledger.jsonl").read_bytes()
    assert ablate(["report=first"]) == 0
    assert (first / "ledger.jsonl").read_bytes() == before
    assert ablate([*PAIR, "output=first"]) == 0, "the same words go on; here there is nothing left to do"
    assert sum(e["type"] == "trial" for e in rows(first / "ledger.jsonl")) == len(trials[0])
    capsys.readouterr()
    assert ablate([*PAIR, "seed=5", "output=first"]) == 2
    assert "holds another study (seed differ)" in capsys.readouterr().err


def test_a_lossy_part_is_never_shown_without_its_loss(tmp_path, text_file, capsys):
    lossy = [*PAIR[:1], "a=[quantizer.weights=none]", "b=[quantizer.weights=int8]", *PAIR[3:], "output=out"]
    assert ablate(lossy) == 0
    said = capsys.readouterr().out
    assert "quantizer.weights=int8: " in said and "KL 0." in said
    html = (tmp_path / "out" / "report.html").read_text()
    assert "KL from the reference" in html


@pytest.mark.parametrize(
    "words,code,says",
    [
        (["design=laddr"], 2, "did you mean 'ladder'"),
        (["workload=chta"], 2, "did you mean 'chat'"),
        (["budget=soon"], 2, "write 90s, 4min"),
        (["bugdet=3min"], 2, "did you mean 'budget'"),
        (["parts=[schedulr]"], 2, "did you mean 'scheduler'"),
        (["parts=[quantizer.kv]"], 2, "nothing to switch"),
        (["scheduler=contnuous"], 2, "did you mean continuous"),
        (["metric=request_per_s"], 2, "did you mean 'requests_per_s'"),
        (["margin=wide"], 2, "margin is a share"),
        (["margin=150%"], 2, "margin"),
        (["design=pair", "a=baseline"], 2, "b is missing"),
        (["design=pair", "a=baseline", "b=baseline"], 2, "a and b are both"),
        (["a=baseline"], 2, "is for design=pair"),
        (["fraction=1"], 2, "is for design=factorial"),
        (["quality.path=/nowhere"], 2, "cannot read the quality text"),
        (["replay=/nowhere"], 2, "cannot read /nowhere"),
        (["replay=x", "scheduler=static"], 2, "leave out scheduler=static"),
        (["diff=/a"], 2, "takes two folders"),
        (["report=/nowhere"], 2, "cannot read"),
    ],
)
def test_bad_input_of_ablate(words, code, says, capsys):
    assert ablate(words) == code
    captured = capsys.readouterr()
    assert says in captured.err and "Traceback" not in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_a_budget_too_short_for_a_block(tmp_path, capsys):
    assert ablate([*PAIR[:7], "quality=false", "budget=1s", "output=out"]) == 4
    assert "too short for one block of 3 arms" in capsys.readouterr().err
    assert (tmp_path / "out" / "ledger.jsonl").exists() and (tmp_path / "out" / "report.html").exists()


def test_times():
    assert duration("1h30min") == 5400 and duration("90s") == duration(90) == duration("1.5min") == 90
    for bad in ("", "min", "-3s", 0, True, "3 parsecs"):
        with pytest.raises(UsageError):
            duration(bad)


def test_help_needs_no_engine():
    for name in ("core.bench", "core.ablate"):
        asked = [sys.executable, "-m", name, "--help"]
        done = subprocess.run(asked, capture_output=True, text=True, cwd=STUB.parents[2])
        assert done.returncode == 0 and f"python -m {name}" in done.stdout

"""The lab on the real engine and a tiny model: each way to run it tells the same things."""

import pytest

from core.bench.__main__ import command as bench
from core.lab import energy
from core.lab.energy import Reading
from core.lab.hosts import InProcessHost, server
from core.lab.metrics import METRICS
from core.lab.trial import run_trial
from core.lab.workloads import workload
from tests.serve.tiny_model import save_tiny_model

LOAD = {"n": 3, "turns": 2, "input_tokens": 8, "output_tokens": 16, "load": {"concurrency": 3}}


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = save_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
    return [
        f"model={folder}", "recipe=baseline", "scheduler=continuous", "prefix_cache=radix", "kv_allocator=paged",
        "drafter=ngram", "engine.threads=1", "memory.kv_bytes=8MiB",
    ]  # fmt: skip


def test_in_process_and_behind_the_server_the_same_is_told(words):
    targets = {"ttft": 1e6}
    inside = run_trial(InProcessHost(words), workload("chat", LOAD), 0, targets).summary
    with server([*words, "server.port=0"]) as host:
        outside = run_trial(host, workload("chat", LOAD), 0, targets).summary
    silent = {"energy_j"}
    for summary in (inside, outside):
        assert summary.values.keys() - silent == METRICS.keys() - silent
        assert summary.completed == 6 and not summary.errors
        assert 0 < summary.values["kv_bytes_mean"] <= summary.values["kv_bytes_peak"] <= 8 << 20
        assert 1e7 < summary.values["memory_bytes_mean"] <= summary.values["memory_bytes_peak"]
        assert all(seconds >= 0 for seconds in summary.seam_seconds.values())
        assert 0 < sum(summary.seam_seconds.values()) < summary.duration_s
    assert inside.seam_seconds.keys() == outside.seam_seconds.keys() >= {"attention.kernel", "scheduler", "drafter"}
    for same in ("prefix_hit_rate", "preemptions"):
        assert inside.values[same] == outside.values[same]
    assert inside.values["prefix_hit_rate"] > 0.2, "second turns find their first ones"


def plain(table):
    return " ".join(table.replace("│", " ").split())


def test_nothing_is_missing_silently(words, stub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    load = ["workload=chat", "chat.n=2", "chat.turns=1", "chat.output_tokens=8", "chat.input_tokens=8"]
    assert bench([*words, "target=engine", *load, "output=out"]) == 0
    inside = plain(capsys.readouterr().out)
    with stub() as url:
        assert bench([f"target={url}", *load, "output=foreign"]) == 0
    foreign = plain(capsys.readouterr().out)
    for text in (inside, foreign):
        for metric in METRICS.values():
            assert metric.unit == "ms" or metric.label in text
        assert "TPOT p50 / p90 / p95 / p99" in text and "time " in text
    for why in ("KV peak – (the target does not tell)", "not ours to look into", "no target was given: goodput"):
        assert why in foreign
    assert "the target does not tell" not in inside.replace("or the target does not tell", "")


def test_energy_is_summed_over_counters_that_may_start_again():
    before = {"package": Reading(90.0, 100.0), "gpu0": Reading(5.0), "gone": Reading(1.0)}
    after = {"package": Reading(10.0, 100.0), "gpu0": Reading(8.0), "new": Reading(7.0)}
    assert energy.joules(before, after) == 20.0 + 3.0
    assert energy.joules({}, after) is None


def test_packages_are_counted_and_what_holds_them_is_not(tmp_path, monkeypatch):
    for zone, name, used in (("intel-rapl:0", "package-0", "2500000"), ("intel-rapl:1", "psys", "9000000")):
        (tmp_path / zone).mkdir()
        for file, text in (("name", name), ("energy_uj", used), ("max_energy_range_uj", "262143328850")):
            (tmp_path / zone / file).write_text(text)
    (tmp_path / "intel-rapl:2").mkdir()
    (tmp_path / "intel-rapl:2" / "name").write_text("package-1")
    monkeypatch.setattr(energy, "RAPL", tmp_path)
    assert energy.read() == {"intel-rapl:0": Reading(2.5, 262143.32885)}
    monkeypatch.setattr(energy, "RAPL", tmp_path / "nowhere")
    assert energy.read() == {}

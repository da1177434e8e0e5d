"""The exporter is an observer like any other: it counts what others count, and when it fails, serving goes on."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from core.recipe import ServerConfig
from core.testing.serving import BUSY, prompts, recipe_of
from tests.serve.harness import serving
from tests.serve.observed import TALLY


def counted(path: Path) -> dict[str, float]:
    """The metrics, from what the second observer saw."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        event = json.loads(line)
        seen.setdefault(event.pop("hook"), []).append(event)
    ends = Counter(event["reason"] for event in seen["finished"])
    figures = {
        "requests_total": len(seen["added"]),
        "prompt_tokens_total": sum(event["prompt"] for event in seen["added"]),
        "engine_first_token_seconds_count": len(seen["first"]),
        "engine_first_token_seconds_sum": sum(event["seconds"] for event in seen["first"]),
        "generation_tokens_total": sum(event["tokens"] for event in seen["finished"]),
        "steps_total": len(seen["step"]),
        "computed_tokens_total": sum(event["tokens"] for event in seen["step"]),
        "batch_size_count": len(seen["step"]),
        "batch_size_sum": sum(event["batch"] for event in seen["step"]),
        "preemptions_total": len(seen["preempted"]),
        "preempted_tokens_total": sum(event["lost"] for event in seen["preempted"]),
        "evicted_pages_total": sum(event["pages"] for event in seen["evicted"]),
        **{f'batch_size_bucket{{le="{n}.0"}}': sum(e["batch"] <= n for e in seen["step"]) for n in (1, 2, 4)},
        **{f'choices_finished_total{{reason="{r}"}}': ends[r] for r in ("stop", "length", "abort", "error")},
    }
    return {f"partwise_{name}": value for name, value in figures.items()}


def test_metrics_equal_what_a_second_observer_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(TALLY, str(tmp_path / "tally"))
    made = recipe_of(BUSY, "plain", kv_tokens=100).model_copy(update={"server": ServerConfig(port=0)})
    with serving(made, factory="tests.serve.observed:build") as server:

        def ask(tokens: tuple[int, ...]) -> int:
            return server.complete(list(tokens), n=2, max_tokens=20, temperature=0.7).status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(ask, prompts() * 2)) == {200}
        assert server.complete([1, 2, 3], max_tokens=0, echo=True).status_code == 200
        server.wait_for_metrics({"partwise_requests_running": 0, "partwise_requests_waiting": 0})
        found, wanted = server.metrics(), counted(tmp_path / "tally")
        assert {name: found[name] for name in wanted} == pytest.approx(wanted)
        for name in ("preemptions", "evicted_pages", "preempted_tokens", "generation_tokens"):
            assert wanted[f"partwise_{name}_total"] > 0, name
        parts = {name for name, value in found.items() if name.startswith("partwise_part_loads_total") and value == 1}
        assert len(parts) == len(BUSY)
        for seam, part in BUSY.items():
            assert any(f'seam="{seam}"' in name and f'name="{part}"' in name for name in parts), seam


def test_an_exporter_that_raises_is_left_out_and_serving_goes_on():
    with serving(factory="tests.serve.observed:WrongSteps") as server:
        for _ in range(3):
            server.canary()
        found = server.metrics()
        assert found["partwise_steps_total"] == 1, "it must not be called again after it raised"
        assert found['partwise_request_finished_total{reason="length"}'] == 3


def test_figures_that_cannot_be_had_do_not_stop_serving():
    with serving(factory="tests.serve.observed:NoFigures") as server:
        for number in range(1, 4):
            assert server.complete("canary", max_tokens=5).json()["choices"][0]["text"] == "hello"
            found = server.metrics()
            assert found['partwise_request_finished_total{reason="length"}'] == number
            assert "partwise_steps_total" not in found
        assert server.http.get("/health").status_code == 200

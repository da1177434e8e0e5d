"""Keys, sizes and loads: what a caller can do to others."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.serve.harness import MODEL, Running, recipe, serving
from tests.serve.test_requests import refused
from tests.serve.test_streams import CHAT, TEXT, say, user

KEY = "secret-key"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(recipe(server={"api_key": KEY}), {"Authorization": f"Bearer {KEY}"}) as running:
        yield running


def status(server: Running, method: str, path: str, key: str | None) -> int:
    """Without a client library, which would tidy the path."""
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request(method, path, headers={} if key is None else {"Authorization": key})
    answer = connection.getresponse().status
    connection.close()
    return answer


def routes(server: Running) -> list[tuple[str, str]]:
    from fastapi.routing import APIRoute

    from core.serve.app import create_app

    app = create_app(recipe_service(server))
    return [(method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods]


def recipe_service(server: Running):
    from dataclasses import replace

    return replace(server.server.service, api_key=None)


def test_every_route_asks_for_the_key(guarded: Running):
    open_paths = {"/health", "/health/live", "/health/ready", "/metrics"}
    found = routes(guarded)
    assert len(found) >= 10
    for method, path in found:
        if path in open_paths:
            assert status(guarded, method, path, None) == 200
            continue
        for key in (None, "Bearer wrong", "Bearer", KEY, f"Basic {KEY}", "Bearer " + KEY + "x", "Bearer é"):
            assert status(guarded, method, path.replace("{name:path}", MODEL), key) == 401, (path, key)


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT"])
@pytest.mark.parametrize(
    "path", ["//v1/models", "/V1/models", "/v1/../v1/models", "/health/../v1/models", "/health/", "/metrics/x", "/docs",
             "/openapi.json", "/v1/models?x=/health", "/%2fhealth", "/v1%2fmodels", "/health%2f..%2fv1/models"]
)  # fmt: skip
def test_no_spelling_of_a_path_gets_round_the_key(guarded: Running, method: str, path: str):
    assert status(guarded, method, path, None) == 401


def test_the_right_key_is_let_in(guarded: Running):
    for key in (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}"):
        assert status(guarded, "GET", "/v1/models", key) == 200
    assert guarded.complete(say("ab")).status_code == 200
    answer = guarded.http.get("/v1/models", headers={"Authorization": "Bearer no"})
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert guarded.metrics()['partwise_request_refused_total{reason="unauthorized"}'] > 0


STALL = 1.5
"""Seconds that say a stall on a machine which tests share; what these tests guard against takes far longer."""


class Pulse:
    """Asks /health every 50 ms on a connection of its own while something goes on; the slowest answer in seconds."""

    def __init__(self, server: Running) -> None:
        self._connection = http.client.HTTPConnection(*server.address, timeout=20)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.times: list[float] = []

    def _ask(self) -> None:
        while not self._ended.is_set():
            started = time.monotonic()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self.times.append(time.monotonic() - started)
            time.sleep(0.05)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()
        self._connection.close()

    @property
    def slowest(self) -> float:
        return max(self.times)


def test_a_huge_prompt_stalls_nobody(server: Running):
    gaps: list[float] = []

    def stream() -> None:
        last = time.monotonic()
        for _ in server.events(CHAT, messages=user(say("x" * 200, delay=0.01))):
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=stream)
    thread.start()
    with Pulse(server) as pulse:
        message = refused(server.complete("x" * 5_000_000), "prompt")
        refused(server.chat("y" * 5_000_000), "messages")
        refused(server.complete([65] * 1_000_000), "prompt")
        thread.join()
    assert "5000000" in message
    assert pulse.slowest < STALL
    assert max(gaps) < STALL


def test_a_body_over_the_limit_is_413(server: Running):
    before = psutil.Process().memory_info().rss
    with Pulse(server) as pulse:
        refused(server.raw(TEXT, b'{"model":"fake","prompt":"' + b"x" * 17_000_000 + b'"}'), None, 413)

        def pieces() -> Iterator[bytes]:
            for _ in range(300):
                yield b"x" * 100_000

        refused(server.http.post(TEXT, content=pieces()), None, 413)
    assert pulse.slowest < STALL
    assert psutil.Process().memory_info().rss - before < 200_000_000


def test_wide_bodies_stall_nobody(server: Running):
    wide = ({"logit_bias": {str(n): "a" for n in range(200_000)}}, {f"k{n}": 1 for n in range(200_000)})
    bodies = [json.dumps({"model": MODEL, "prompt": "x", **fields}).encode() for fields in wide]
    with Pulse(server) as pulse:
        for body in bodies:
            assert server.raw(TEXT, body).status_code == 400
    assert pulse.slowest < STALL


def test_junk_from_callers_makes_no_new_series(server: Running):
    before = len(server.http.get("/metrics").text.splitlines())
    for number in range(120):
        junk = f'junk"\n{number}'
        server.chat("x", model=junk)
        server.http.get(f"/v1/xyz{number}")
        server.chat(say("a"), user=junk, cache_salt=junk, metadata={junk: junk})
    assert len(server.http.get("/metrics").text.splitlines()) - before < 10


def test_metrics_parse_and_have_what_is_promised(server: Running):
    from prometheus_client.parser import text_string_to_metric_families

    server.complete(say("abc"))
    families = {family.name: family for family in text_string_to_metric_families(server.http.get("/metrics").text)}
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
        "e2e_request_latency_seconds", "batch_size", "prompt_tokens", "generation_tokens", "request_finished",
        "request_refused", "requests_running", "requests_waiting", "kv_pages", "kv_bytes", "kv_usage_ratio",
        "prefix_cache_query_tokens", "prefix_cache_hit_tokens", "preemptions", "steps", "drafted_tokens",
        "accepted_tokens", "seam_seconds",
    ):  # fmt: skip
        assert f"partwise_{name}" in families, name
    for family in families.values():
        assert all(sample.value >= 0 for sample in family.samples)


def test_times_mean_what_they_say(server: Running):
    def seen() -> dict[str, float]:
        return server.metrics()

    before = seen()
    started = time.monotonic()
    server.complete(say("abcdefghij", delay=0.03))
    elapsed = time.monotonic() - started
    grown = {name: value - before.get(name, 0) for name, value in seen().items()}
    assert grown["partwise_time_to_first_token_seconds_count"] == 1
    assert grown["partwise_inter_token_latency_seconds_count"] == 10
    assert grown["partwise_time_per_output_token_seconds_count"] == 1
    assert grown["partwise_generation_tokens_total"] == 11
    ttft, itl = (grown[f"partwise_{name}_seconds_sum"] for name in ("time_to_first_token", "inter_token_latency"))
    e2e = grown["partwise_e2e_request_latency_seconds_sum"]
    assert ttft + itl <= e2e < ttft + itl + 0.25
    assert grown["partwise_time_per_output_token_seconds_sum"] == pytest.approx(itl / 10, rel=1e-6)
    assert 0.25 < e2e < elapsed

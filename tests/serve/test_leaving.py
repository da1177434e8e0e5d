"""Callers that leave, streams and not: their requests end at once, hold nothing and are counted."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.serve.harness import IDLE, MODEL, Running, recipe, serving
from tests.serve.test_streams import CHAT, say, user

LONG = say("token " * 50, delay=0.01, eos=False)


def test_hundreds_of_streams_that_are_left(server: Running):
    def leave(_: int) -> None:
        sock = server.open_stream(say("token " * 50, eos=False), max_tokens=500)
        sock.recv(200)
        sock.close()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(300)))
    server.wait_for_metrics(IDLE)


def test_a_left_answer_that_is_not_streamed_stops(server: Running):
    sock = server.send("/v1/completions", {"model": MODEL, "prompt": LONG, "max_tokens": 900})
    time.sleep(0.3)
    assert server.metrics()["partwise_requests_running"] == 1
    sock.close()
    server.wait_for_metrics(IDLE, seconds=1.0)
    steps = server.metrics()["partwise_steps_total"]
    time.sleep(0.2)
    assert server.metrics()["partwise_steps_total"] == steps


def test_gauges_fall_when_all_leave_and_nobody_comes(server: Running):
    socks = [server.open_stream(LONG, max_tokens=900) for _ in range(20)]
    server.wait_for_metrics({"partwise_requests_running": 16, "partwise_requests_waiting": 4})
    for sock in socks:
        sock.close()
    server.wait_for_metrics(IDLE)


def test_one_that_leaves_the_queue_lets_the_next_run():
    with serving(recipe(max_running=1)) as server:
        first = server.open_stream(LONG, max_tokens=900)
        second = server.open_stream(LONG, max_tokens=900)
        server.wait_for_metrics({"partwise_requests_running": 1, "partwise_requests_waiting": 1})
        second.close()
        server.wait_for_metrics({"partwise_requests_running": 1, "partwise_requests_waiting": 0})
        first.close()
        server.wait_for_metrics(IDLE)
        server.canary()


def test_ends_are_counted_by_how_they_came():
    with serving() as server:
        for _ in range(5):
            sock = server.open_stream(LONG, max_tokens=900)
            sock.recv(64)
            sock.close()
        for _ in range(5):
            assert server.complete(say("ab")).status_code == 200
        for wrong in ({"n": 0}, {"temperature": 9}):
            assert server.complete("x", **wrong).status_code == 400
        assert server.complete(say("ab", fault_at=1)).status_code == 500
        wanted = {
            'partwise_request_finished_total{reason="abort"}': 5,
            'partwise_request_finished_total{reason="stop"}': 5,
            'partwise_request_finished_total{reason="error"}': 1,
            'partwise_request_finished_total{reason="length"}': 0,
            "partwise_e2e_request_latency_seconds_count": 11,
            'partwise_request_refused_total{reason="invalid"}': 2,
            **IDLE,
        }
        server.wait_for_metrics(wanted)


def test_callers_with_the_same_id_do_not_meet(server: Running):
    headers = {"X-Request-Id": "id"}
    texts: dict[str, str] = {}

    def ask(word: str) -> None:
        body = {"model": MODEL, "messages": user(say(word * 40, delay=0.005)), "max_tokens": 200}
        answer = httpx.post(server.server.url + CHAT, json=body, headers=headers, timeout=20)
        texts[word] = answer.json()["choices"][0]["message"]["content"]

    threads = [threading.Thread(target=ask, args=(word,)) for word in ("abc", "xyz")]
    left = server.open_stream(LONG, max_tokens=900)
    for thread in threads:
        thread.start()
    left.close()
    for thread in threads:
        thread.join()
    assert texts == {"abc": "abc" * 40, "xyz": "xyz" * 40}
    assert all(value >= 0 for value in server.metrics().values())


def test_a_full_queue_answers_429_with_when_to_come_back():
    with serving(recipe(engine={"max_waiting": 2}, max_running=1)) as server:
        first = server.open_stream(LONG, max_tokens=900)
        server.wait_for_metrics({"partwise_requests_running": 1})
        socks = [first, *(server.open_stream(LONG, max_tokens=900) for _ in range(2))]
        for stream in (False, True):
            answer = server.chat("x", stream=stream)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "queue_full"
        assert server.metrics()['partwise_request_refused_total{reason="queue_full"}'] == 2
        for sock in socks:
            sock.close()
        server.wait_for_metrics(IDLE)
        server.canary()

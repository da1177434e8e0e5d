"""Engines that die, hang or cannot start, and servers that are told to end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from core.serve.client import EngineDown
from core.serve.launch import launch
from core.serve.server import Server
from core.types import PartwiseError
from tests.serve.harness import FACTORY, MODEL, FakeTokenizer, Running, recipe, serving
from tests.serve.test_streams import CHAT, say, user

SLOW = say("token " * 50, delay=0.02, eos=False)


def within(seconds: float, server: Running, path: str, status: int) -> dict:
    end = time.monotonic() + seconds
    while (answer := server.http.get(path)).status_code != status:
        assert time.monotonic() < end, (path, answer.status_code, answer.text)
        time.sleep(0.02)
    return answer.json()


def two_streams(server: Running, fatal: str) -> list[list]:
    """The events of a healthy stream and of the one that brings the engine down."""
    results: list[list] = [[], []]

    def read(place: int, content: str) -> None:
        for event in server.events(CHAT, messages=user(content), max_tokens=900):
            results[place].append(event)

    threads = [threading.Thread(target=read, args=pair) for pair in enumerate((SLOW, fatal))]
    threads[0].start()
    server.wait_for_metrics({"partwise_requests_running": 1})
    threads[1].start()
    for thread in threads:
        thread.join(8)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize(
    "fatal", ['{"exit": 3}', '{"break_at": 2}', "kill"], ids=["process exits", "step raises", "killed"]
)
def test_a_dead_engine_is_told_within_a_second(fatal: str):
    with serving() as server:
        if fatal == "kill":
            pid = server.server.client._engine.process.pid
            timer = threading.Timer(0.5, os.kill, (pid, signal.SIGKILL))
            timer.start()
            results = two_streams(server, SLOW)
        else:
            results = two_streams(server, f"[[{fatal}]]")
        died = time.monotonic()
        for events in results:
            assert events[-1]["error"]["code"] == "engine_down"
            assert "[DONE]" not in events
        for path in ("/health", "/health/ready", "/health/live"):
            within(1.0 - (time.monotonic() - died), server, path, 503)
        for stream in (False, True):
            answer = server.chat("x", stream=stream)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_down"
        assert server.http.get("/metrics").status_code == 200


def test_a_hung_engine_is_told_and_may_recover():
    with serving() as server:
        results = two_streams(server, '[[{"block": 6}]]')
        for events in results:
            assert events[-1]["error"]["code"] == "engine_down"
        told = within(0.5, server, "/health", 503)
        assert told["status"] == "hung"
        assert "hang_seconds" in told["message"]
        assert server.http.get("/health/live").status_code == 200
        assert server.chat("x").status_code == 503
        within(15.0, server, "/health", 200)
        server.canary()


def test_a_long_step_is_not_a_hung_engine(server: Running):
    started = time.monotonic()
    assert server.complete('[[{"compute": 3.5, "say": "abcdef"}]]').json()["choices"][0]["text"] == "abcdef"
    assert time.monotonic() - started > 3.5 > 2 * server.server.client._hang_seconds


def test_a_server_with_a_hung_engine_can_be_stopped():
    with serving() as server:
        two_streams(server, '[[{"block": true}]]')
        started = time.monotonic()
    assert time.monotonic() - started < 15


def test_an_engine_that_cannot_start_says_why():
    with pytest.raises(EngineDown, match="cannot work: scripted"), serving(recipe(refuse=True)):
        pass


def test_a_port_is_taken_before_the_model_loads():
    engine = launch(FACTORY)
    try:
        first = Server(recipe(), "first", engine, FakeTokenizer)
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(PartwiseError, match=r"cannot listen.*server\.port"):
            Server(recipe(server={"port": port}), "second", engine, FakeTokenizer)
    finally:
        engine.stop()


def test_a_port_in_use_says_so(server: Running):
    port = server.address[1]
    with pytest.raises(Exception, match=r"cannot listen.*server\.port"), serving(recipe(server={"port": port})):
        pass


SCRIPT = """
import sys
from core.serve.launch import launch
from core.serve.run import serve
from tests.serve.harness import FACTORY, MODEL, FakeTokenizer, recipe
engine = launch(FACTORY)
try:
    code = serve(recipe(server={"drain_seconds": float(sys.argv[1])}), MODEL, engine, FakeTokenizer)
finally:
    engine.stop()
print("torch" in sys.modules, flush=True)
sys.exit(code)
"""


class Command:
    """A server in a process of its own, as the command starts it."""

    def __init__(self, drain_seconds: float = 30.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(drain_seconds)], stdout=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready at (http\S+) after ([\d.]+) s", line):
                self.url = found[1]
                break

    def stream(self, seconds: float) -> tuple[threading.Thread, list[str]]:
        lines: list[str] = []
        content = say("x" * int(seconds / 0.1), delay=0.1)

        def read() -> None:
            body = {"model": MODEL, "messages": user(content), "stream": True}
            with httpx.stream("POST", self.url + CHAT, json=body, timeout=20) as response:
                lines.extend(line for line in response.iter_lines() if line)

        thread = threading.Thread(target=read)
        thread.start()
        while not lines and thread.is_alive():
            time.sleep(0.02)
        return thread, lines

    def until_draining(self) -> None:
        with contextlib.suppress(httpx.TransportError):  # it may have ended already
            while httpx.get(self.url + "/health").status_code == 200:
                time.sleep(0.02)

    def end(self) -> int:
        code = self.process.wait(15)
        self.rest = self.process.stdout.read() if self.process.stdout else ""
        return code


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones():
    command = Command()
    assert any("scheduler" in line for line in command.lines)
    thread, lines = command.stream(3.0)
    command.process.send_signal(signal.SIGTERM)
    command.until_draining()
    answer = httpx.post(command.url + CHAT, json={"model": MODEL, "messages": user("x")})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "service_unavailable"
    assert httpx.get(command.url + "/health").json()["status"] == "draining"
    assert httpx.get(command.url + "/health/live").status_code == 200
    thread.join(10)
    assert lines[-1] == "data: [DONE]"
    assert command.end() == 0
    assert command.rest.strip() == "False", "the API process must not import torch"


def test_draining_has_an_end():
    command = Command(drain_seconds=0.5)
    thread, lines = command.stream(30.0)
    command.process.send_signal(signal.SIGTERM)
    thread.join(15)
    assert "shut down" in json.loads(lines[-1][6:])["error"]["message"]
    assert command.end() == 0


def test_a_second_signal_ends_at_once():
    command = Command()
    thread, lines = command.stream(30.0)
    for _ in range(2):
        command.process.send_signal(signal.SIGINT)
        command.until_draining()
    thread.join(15)
    assert "error" in lines[-1]
    assert command.end() == 0


def test_the_engine_process_ends_with_a_killed_server():
    command = Command()
    import psutil

    children = psutil.Process(command.process.pid).children()
    assert children
    command.process.kill()
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive
    command.end()

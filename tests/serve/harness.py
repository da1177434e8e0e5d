"""A real server over the scripted engine: uvicorn in a thread, the engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from core.recipe import Recipe
from core.serve.launch import launch
from core.serve.server import Server
from core.types import InvalidRequest
from tests.serve.tiny_tokenizers import byte_tokenizer

FACTORY = "tests.serve.fake_engine:build"
MODEL = "fake"
START = 257


class FakeTokenizer:
    """Bytes; a conversation begins with <start>, as templates that hold the BOS token do."""

    def __init__(self) -> None:
        self.backend = byte_tokenizer()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if messages[-1]["content"] == "refuse":
            raise InvalidRequest("the chat template refuses: scripted", "messages")
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return [START, *self.encode(text + "assistant: ")]


def recipe(*, server: Mapping[str, Any] | None = None, engine: Mapping[str, Any] | None = None, **model: Any) -> Recipe:
    return Recipe(
        name="test",
        model={"name": MODEL, **model},
        engine={"max_model_len": 1024, "max_waiting": 200, **(engine or {})},
        server={"port": 0, "hang_seconds": 1.5, **(server or {})},
    )


class Running:
    """A server that runs, and calls to it."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop, headers: Mapping[str, str]) -> None:
        self.server, self.loop = server, loop
        self.http = httpx.Client(base_url=server.url, timeout=20, headers=dict(headers))

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.server.url)
        return url.host, url.port or 0

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.http.post(path, json=fields)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"model": MODEL, "prompt": prompt, **fields})

    def chat(self, content: Any, **fields: Any) -> httpx.Response:
        return self.post(
            "/v1/chat/completions", **{"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        )

    def raw(self, path: str, body: bytes) -> httpx.Response:
        return self.http.post(path, content=body, headers={"Content-Type": "application/json"})

    def stream(self, path: str, **fields: Any) -> list[Any]:
        """The events' JSON in order; "[DONE]" as it is."""
        return list(self.events(path, **fields))

    def events(self, path: str, **fields: Any) -> Iterator[Any]:
        body = {"model": MODEL, "stream": True, **fields}
        with self.http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                response.read()
                raise AssertionError(f"{response.status_code}: {response.text}")
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line:
                    assert line.startswith("data: "), line
                    yield line[6:] if line[6:] == "[DONE]" else json.loads(line[6:], parse_constant=_no_constant)

    def metrics(self) -> dict[str, float]:
        """Every sample by its name and labels, as the text has them."""
        samples = {}
        for line in self.http.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def wait_for_metrics(self, wanted: Mapping[str, float], seconds: float = 10.0) -> None:
        """Within `seconds` every wanted sample has its value."""
        end = time.monotonic() + seconds
        while True:
            found = self.metrics()
            seen = {name: found.get(name) for name in wanted}
            if seen == wanted:
                return
            assert time.monotonic() < end, seen
            time.sleep(0.05)

    def canary(self) -> None:
        """The server is as it was before anybody came."""
        answer = self.complete("canary", max_tokens=5)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == "hello"
        assert self.http.get("/health").status_code == 200
        self.wait_for_metrics(IDLE)

    def open_stream(self, content: str, **fields: Any) -> socket.socket:
        """A chat stream on a socket of its own, for callers that leave; read up to the headers."""
        message = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True, **fields}
        sock = self.send("/v1/chat/completions", message)
        seen = b""
        while b"\r\n\r\n" not in seen:
            piece = sock.recv(65536)
            assert piece, seen
            seen += piece
        assert b" 200 " in seen.split(b"\r\n")[0], seen
        return sock

    def send(self, path: str, fields: Mapping[str, Any]) -> socket.socket:
        """A request on a socket of its own, unanswered."""
        body = json.dumps(fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection(self.address, timeout=10)
        sock.sendall(head.encode() + body)
        return sock


IDLE = {
    "partwise_requests_running": 0,
    "partwise_requests_waiting": 0,
    'partwise_kv_pages{group="full",state="held"}': 0,
}


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@contextmanager
def serving(
    made: Recipe | None = None, headers: Mapping[str, str] | None = None, factory: str = FACTORY
) -> Iterator[Running]:
    """A server, over the scripted engine by default, ready; it must end with code 0 or, with a dead engine, 1."""
    made = made or recipe()
    ready, box = threading.Event(), {}

    async def main() -> None:
        server = Server(made, MODEL, launch(factory), FakeTokenizer)
        box.update(server=server, loop=asyncio.get_running_loop())
        box["code"] = await server.run(ready.set)

    def body() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            box["error"] = error
        ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    assert ready.wait(20)
    if "error" in box:
        thread.join()
        raise box["error"]
    running = Running(box["server"], box["loop"], headers or {})
    try:
        yield running
    finally:
        running.http.close()
        for _ in range(2):
            if thread.is_alive():
                running.loop.call_soon_threadsafe(running.server.stop)
        thread.join(20)
        assert not thread.is_alive()
        assert box.get("code") in (0, 1), box

"""What a load is sent to. Everything that can be asked for tokens looks like a `Target`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import aiohttp
import msgspec

from core.lab.errors import TargetError


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer as it arrived; `at` is `time.perf_counter()`."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """The engine's own count at the end of an answer."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class RequestFailed(Exception):
    """One request did not get its whole answer; the message is what gets counted."""


class Client(Protocol):
    """An open connection to a target."""

    def ask(self, messages: list[dict[str, str]], max_tokens: int) -> AsyncIterator[Piece | Usage]:
        """Streams one greedy answer of `max_tokens` tokens. RequestFailed when it breaks off.

        The request goes out at the first `anext`.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """The engine's own counters, by the names of `/metrics`, when it runs in this process; else empty."""
        ...


class Target(Protocol):
    """Where to send requests; small enough to be pickled to the load generator's process."""

    def connect(self) -> AbstractAsyncContextManager[Client]: ...


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None

    @property
    def piece(self) -> str:
        if self.delta is None:
            return self.text or ""
        return self.delta.content or self.delta.reasoning_content or ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_JSON = {"Content-Type": "application/json"}
_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class OpenAITarget:
    """A server that speaks OpenAI's protocol. `model` empty: the first one that it lists.

    `ignore_eos` is an extension that vLLM, SGLang and Partwise know; without it answers may end early.
    """

    url: str
    model: str = ""
    api: Literal["chat", "completions"] = "chat"
    api_key: str = ""
    ignore_eos: bool = True
    timeout_s: float = 600.0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
            yield _OpenAIClient(self, http, self.model or await self._first_model(http))

    async def _first_model(self, http: aiohttp.ClientSession) -> str:
        where = f"{self.url}/v1/models"
        try:
            async with http.get(where) as response:
                body = await response.read()
                if response.status != 200:
                    raise TargetError(f"{where} answers HTTP {response.status}: {_message(body)}.")
                return str(msgspec.json.decode(body)["data"][0]["id"])
        except (aiohttp.ClientError, OSError) as error:
            raise TargetError(f"nothing answers at {self.url}: {error}.") from None
        except (msgspec.MsgspecError, LookupError, TypeError):
            raise TargetError(f"{where} does not list a model: is it an OpenAI-compatible server?") from None


class _OpenAIClient:
    def __init__(self, target: OpenAITarget, http: aiohttp.ClientSession, model: str) -> None:
        self._http = http
        self._chat = target.api == "chat"
        self._where = f"{target.url}/v1/{'chat/completions' if self._chat else 'completions'}"
        self._base: dict[str, Any] = {
            "model": model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if target.ignore_eos:
            self._base["ignore_eos"] = True

    def counters(self) -> Mapping[str, float]:
        return {}

    async def ask(self, messages: list[dict[str, str]], max_tokens: int) -> AsyncIterator[Piece | Usage]:
        body = self._base | {"max_tokens": max_tokens}
        if self._chat:
            body["messages"] = messages
        else:
            body["prompt"] = "\n\n".join(m["content"] for m in messages)
        try:
            data = msgspec.json.encode(body)
            async with self._http.post(self._where, data=data, headers=_JSON) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}: {_message(await response.read())}")
                async for item in _events(response.content):
                    yield item
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed(f"connection: {type(error).__name__}") from None
        except TimeoutError:
            raise RequestFailed("timeout") from None


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Piece | Usage]:
    """Pieces and the usage out of server-sent events; RequestFailed unless `[DONE]` comes."""
    rest = b""
    async for data in stream.iter_any():
        at = time.perf_counter()
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                return
            for item in _items(payload, at):
                yield item
    raise RequestFailed("the stream broke off")


def _items(payload: bytes, at: float) -> list[Piece | Usage]:
    try:
        chunk = _decode_chunk(payload)
    except msgspec.MsgspecError:
        raise RequestFailed("a chunk that is not valid JSON") from None
    if chunk.error is not None:
        raise RequestFailed(f"error in the stream: {_message(payload)}")
    items: list[Piece | Usage] = [Piece(at, choice.piece) for choice in chunk.choices if choice.piece]
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        cached = details.cached_tokens if details else None
        items.append(Usage(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, cached))
    return items


def _message(body: bytes, most: int = 120) -> str:
    """The text of an OpenAI error body, or the start of whatever it is."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:most]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return body[:most].decode(errors="replace")

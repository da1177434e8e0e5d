"""The engine as a target without a server: it runs in the load generator's own process, in a thread of its own.

What the protocol costs falls away, and what the two threads take from each other comes in; the load generator's
lag tells how much that is. Resident memory is that of both. The engine's counters are those of `/metrics`.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from core.lab.errors import TargetError
from core.lab.targets import Client, Piece, RequestFailed, Usage
from core.llm import LLM
from core.text import ChoiceText
from core.types import Event, PartwiseError, Request, SamplingParams

COUNTERS_S = 0.25


def counters(stats: Mapping[str, Any]) -> dict[str, float]:
    """`Engine.stats()` by the names under which the server tells the same."""
    cache = stats["prefix_cache"]
    found: dict[str, float] = {
        "partwise_preemptions_total": stats["preemptions"],
        "partwise_prefix_cache_query_tokens_total": cache["lookup_tokens"],
        "partwise_prefix_cache_hit_tokens_total": cache["hit_tokens"],
        "partwise_drafted_tokens_total": sum(stats["drafted"]),
        "partwise_accepted_tokens_total": sum(stats["accepted"]),
    }
    found |= {f"partwise_kv_bytes{{{group},used}}": pages["used_bytes"] for group, pages in stats["kv"].items()}
    found |= {f"partwise_seam_seconds_total{{{seam}}}": seconds for seam, seconds in stats["seconds"].items()}
    return found


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """`recipe` and `overrides` as for `core.llm.LLM`."""

    recipe: str
    overrides: tuple[str, ...] = ()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        try:
            llm = LLM(self.recipe, self.overrides)
        except PartwiseError as error:
            raise TargetError(f"the engine did not start: {error}") from None
        client = _EngineClient(llm, asyncio.get_running_loop())
        try:
            yield client
        finally:
            await asyncio.to_thread(client.stop)
            llm.close()


@dataclass(frozen=True, slots=True)
class _Arrived:
    at: float
    event: Event


class _EngineClient:
    """Hands requests to the engine's thread, and its events back to the loop."""

    def __init__(self, llm: LLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._waiting: dict[str, asyncio.Queue[_Arrived | Exception]] = {}
        self._counters = counters(llm.engine.stats())
        self._counted_at = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def ask(self, messages: list[dict[str, str]], max_tokens: int) -> AsyncIterator[Piece | Usage]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple(self._llm.tokenizer.encode_chat(messages))
        request = Request(f"lab-{next(self._numbers)}", prompt, params, time.monotonic())
        events: asyncio.Queue[_Arrived | Exception] = asyncio.Queue()
        self._waiting[request.id] = events
        self._inbox.put(request)
        text = ChoiceText(self._llm.tokenizer.backend, prompt, params)
        cached = 0
        while text.finish_reason is None:
            arrived = await events.get()
            if isinstance(arrived, Exception):
                raise RequestFailed(f"{type(arrived).__name__}: {arrived}")
            if arrived.event.error:
                raise RequestFailed(arrived.event.error)
            cached = max(cached, arrived.event.cached_tokens)
            delta = text.push(arrived.event)
            if delta.text:
                yield Piece(arrived.at, delta.text)
        yield Usage(len(prompt), text.num_tokens, cached)

    def counters(self) -> Mapping[str, float]:
        return self._counters

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        engine = self._llm.engine
        while True:
            try:
                request = self._inbox.get(block=not engine.has_work)
                if request is None:
                    return
                self._add(request)
                continue
            except queue.Empty:
                pass
            try:
                events = engine.step()
            except Exception as error:
                self._tell_all(error)
                return
            at = time.perf_counter()
            self._note(at)
            for event in events:
                self._tell(event.id, _Arrived(at, event))

    def _note(self, at: float) -> None:
        """The engine belongs to this thread: the other one reads what was noted last."""
        if at - self._counted_at > COUNTERS_S or not self._llm.engine.has_work:
            self._counters, self._counted_at = counters(self._llm.engine.stats()), at

    def _add(self, request: Request) -> None:
        try:
            self._llm.engine.add(request)
        except PartwiseError as error:
            self._tell(request.id, error)

    def _tell(self, id: str, what: _Arrived | Exception) -> None:
        events = self._waiting.get(id)
        if events is not None:
            self._loop.call_soon_threadsafe(events.put_nowait, what)

    def _tell_all(self, error: Exception) -> None:
        for id in self._waiting:
            self._tell(id, error)

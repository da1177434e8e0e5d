"""The API process's side of the engine: requests in, events out, and whether the engine still lives."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import Mapping
from typing import Any, Final, Literal

from core.serve.launch import EngineProcess
from core.serve.pulse import Pulse
from core.serve.wire import (
    HEADER_BYTES,
    Abort,
    Accepted,
    Add,
    AskFigures,
    Command,
    Failed,
    Figures,
    Ready,
    Refused,
    Reply,
    Shutdown,
    Start,
    Stepped,
    body_length,
    frame,
    replies,
)
from core.types import Event, InvalidRequest, PartwiseError, QueueFull, Request

State = Literal["starting", "ready", "hung", "dead"]

_WATCH_SECONDS: Final = 0.2
_CLOSE_SECONDS: Final = 5.0


class EngineDown(PartwiseError):
    """The engine is not there: starting, hung or dead."""


class EngineLost(EngineDown):
    """The engine went down with a request in it."""


Inbox = asyncio.Queue[Event | EngineLost]


class RequestFault(PartwiseError):
    """The engine failed at this request only."""


class EngineClient:
    """Talks to one engine process. `hang_seconds` is the patience of core.serve.pulse; a hung engine may recover."""

    def __init__(self, engine: EngineProcess, hang_seconds: float) -> None:
        self.state: State = "starting"
        self.trouble = "the engine is starting"
        self._figures = b""
        self._engine = engine
        self._writer: asyncio.StreamWriter | None = None
        self._hang_seconds = hang_seconds
        self._pulse = Pulse(engine.process.pid, hang_seconds)
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._figure_waiters: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, recipe: Mapping[str, Any]) -> Ready:
        """Build the engine; what it says of itself. EngineDown: it cannot start, and why."""
        self._engine.sock.setblocking(False)
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        reader, self._writer = await asyncio.open_connection(sock=self._engine.sock)
        self._tasks = [asyncio.create_task(self._listen(reader)), asyncio.create_task(self._watch())]
        self._send(Start(dict(recipe)))
        return await self._started

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._inboxes)

    async def add(self, request: Request, inbox: Inbox) -> None:
        """Hand a request over; its events go to `inbox`. Raises InvalidRequest, QueueFull, RequestFault, EngineDown.
        Who is cancelled meanwhile must call `abort`."""
        if self.state != "ready":
            raise EngineDown(self.trouble)
        answer = self._answers[request.id] = asyncio.get_running_loop().create_future()
        self._inboxes[request.id] = inbox
        try:
            self._send(Add(request))
            await answer
        except BaseException:
            self._inboxes.pop(request.id, None)
            raise
        finally:
            del self._answers[request.id]

    def abort(self, id: str, index: int | None = None) -> None:
        """End a request, or one choice of it. Nothing more of the request arrives unless others go on."""
        if index is None:
            self._inboxes.pop(id, None)
        self._send(Abort(id, index))

    def forget(self, id: str) -> None:
        """The request has ended by itself."""
        self._inboxes.pop(id, None)

    async def figures(self, timeout: float) -> bytes:
        """The engine's metrics now, or the last known if it does not answer in time; b"" when it is dead."""
        if self.state == "ready":
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._figure_waiters.append(waiter)
            self._send(AskFigures())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter, timeout)
        return self._figures

    def end_all(self, why: str) -> None:
        """End every live request with an error."""
        for id in list(self._inboxes):
            self._inboxes.pop(id).put_nowait(EngineLost(why))
            self._send(Abort(id))

    async def close(self) -> None:
        """End the engine process, by force if it does not end itself."""
        self._send(Shutdown())
        patience = 0.0 if self.state in ("starting", "hung") else _CLOSE_SECONDS
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._engine.process.wait, patience)
        for task in self._tasks:
            task.cancel()
        self._engine.stop()

    def _send(self, command: Command) -> None:
        if self._writer is not None and self.state != "dead" and not self._writer.is_closing():
            self._writer.write(frame([command]))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Read until the engine's end of the socket closes, which is when its process ends."""
        try:
            while True:
                size = body_length(await reader.readexactly(HEADER_BYTES))
                for reply in replies(await reader.readexactly(size)):
                    self._take(reply)
                self._pulse.spoke()
                if self.state == "hung":
                    self.state = "ready"
        except (asyncio.IncompleteReadError, OSError):
            if self.state != "dead":
                self._fail("dead", "the engine process has ended")

    def _take(self, reply: Reply) -> None:
        match reply:
            case Stepped(events):
                for event in events:
                    if event.id in self._inboxes:
                        self._inboxes[event.id].put_nowait(event)
            case Figures(text):
                self._figures = text
                _settle(self._figure_waiters, None)
            case Accepted(id):
                _settle([self._answers[id]] if id in self._answers else [], None)
            case Refused(id):
                _settle([self._answers[id]] if id in self._answers else [], _error(reply))
            case Ready():
                self.state = "ready"
                if not self._started.done():  # who waited may have been stopped
                    self._started.set_result(reply)
            case Failed(message):
                self._fail("dead", message)

    async def _watch(self) -> None:
        """Notice a hung engine. Two looks in a row, so that a stall of this process is not taken for one."""
        suspect = False
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            late = self._pulse.hangs() and self.state == "ready"
            if late and suspect:
                self._fail("hung", f"the engine has not answered for {self._hang_seconds:g} s (server.hang_seconds)")
            suspect = late

    def _fail(self, state: State, message: str) -> None:
        self.state, self.trouble = state, message
        self.end_all(message)
        self._figures = b"" if state == "dead" else self._figures
        if not self._started.done():
            self._started.set_exception(EngineDown(message))
        _settle([*self._answers.values()], EngineDown(message))
        _settle(self._figure_waiters, None)


def _settle(waiters: list[asyncio.Future[None]], error: Exception | None) -> None:
    for waiter in waiters:
        if not waiter.done():
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)
    waiters.clear()


def _error(refusal: Refused) -> Exception:
    if refusal.kind == "invalid":
        return InvalidRequest(refusal.message, refusal.param)
    return QueueFull(refusal.message) if refusal.kind == "full" else RequestFault(refusal.message)

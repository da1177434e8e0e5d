"""What the routes need of HTTP: bodies with a limit, streams of events, callers that leave, and the API key."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from core.serve import errors
from core.serve.errors import HttpError

T = TypeVar("T")


class CallerLeft(Exception):
    """Nobody waits for the answer any more."""


async def read_body(request: Request, limit: int) -> bytes:
    """The body. HttpError 413 as soon as it is known to be over `limit` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > limit:
            raise _too_large(limit)
    return bytes(data)


def _too_large(limit: int) -> HttpError:
    error = HttpError(
        413, "invalid_request_error", f"the body is larger than {limit} bytes (server.max_body)", reason="too_large"
    )
    error.headers = {"Connection": "close"}
    return error


async def unless_caller_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the caller closes the connection. Raises CallerLeft."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise CallerLeft
        return task.result()
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. `close` is called when the stream has ended, for whatever reason."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_caller_leaves(receive, self._send(send))
        except (CallerLeft, OSError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ApiKey:
    """Middleware: every path needs `Authorization: Bearer KEY` but those in `open_paths`, which are exact."""

    def __init__(self, app: ASGIApp, key: str, open_paths: frozenset[str], refused: Callable[[], None]) -> None:
        self._app = app
        self._key = key.encode()
        self._open_paths = open_paths
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in self._open_paths or self._known(scope):
            await self._app(scope, receive, send)
            return
        self._refused()
        error = HttpError(401, "invalid_request_error", "the API key is missing or wrong", code="invalid_api_key")
        error.headers = {"WWW-Authenticate": "Bearer"}
        await errors.response(error)(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

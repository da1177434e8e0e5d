"""Errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

from core.serve.client import EngineDown, EngineLost, RequestFault
from core.types import InvalidRequest, PartwiseError, QueueFull


class HttpError(PartwiseError):
    """An error that has a status of its own; `reason` is what the metric of refused requests calls it, empty for one
    that was accepted first."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.reason = reason
        self.headers: dict[str, str] = {}


def as_http(error: Exception) -> HttpError:
    """What a caller is told of `error`. Only messages written for people are passed on."""
    match error:
        case HttpError():
            return error
        case InvalidRequest():
            return HttpError(400, "invalid_request_error", str(error), param=error.param, reason="invalid")
        case QueueFull():
            busy = HttpError(429, "rate_limit_error", str(error), code="queue_full", reason="queue_full")
            busy.headers = {"Retry-After": "1"}
            return busy
        case EngineDown():
            reason = "" if isinstance(error, EngineLost) else "unavailable"
            down = HttpError(503, "service_unavailable", str(error), code="engine_down", reason=reason)
            down.headers = {"Retry-After": "5"}
            return down
        case RequestFault():
            return HttpError(500, "server_error", str(error), code="request_fault")
        case _:
            return HttpError(500, "server_error", "an error inside the server; its log says more")


def body(error: HttpError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


def response(error: HttpError) -> Response:
    return Response(msgspec.json.encode(body(error)), error.status, error.headers, "application/json")

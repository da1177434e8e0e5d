"""The routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from core.serve import errors
from core.serve.answers import Answer, ChatAnswer, CompletionAnswer
from core.serve.client import EngineClient, EngineDown
from core.serve.errors import HttpError
from core.serve.generation import Generation
from core.serve.http import ApiKey, CallerLeft, EventStream, read_body, unless_caller_leaves
from core.serve.metrics import ServerMetrics
from core.serve.prompts import Prompts
from core.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
    parse,
)
from core.text import Delta
from core.types import PartwiseError, SamplingParams

OPEN_PATHS: Final = frozenset({"/health", "/health/live", "/health/ready", "/metrics"})
_INLINE_BODY: Final = 65536
_SCRAPE_SECONDS: Final = 1.0

log = logging.getLogger("partwise.serve")

AskT = TypeVar("AskT", bound=GenerationRequest | TokenizeRequest | DetokenizeRequest)


@dataclass
class Service:
    """What the routes work with. `prompts` is there once model and engine are ready."""

    client: EngineClient
    model: str
    max_body: int
    api_key: str | None = None
    prompts: Prompts | None = None
    draining: bool = False
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    started: int = field(default_factory=lambda: int(time.time()))

    def open(self) -> Prompts:
        """The prompts door. EngineDown: no request is served now."""
        if self.draining:
            raise EngineDown("the server is shutting down")
        if self.client.state != "ready" or self.prompts is None:
            raise EngineDown(self.client.trouble)
        return self.prompts

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise HttpError(
                404,
                "invalid_request_error",
                f"there is no model {name[:200]!r} here; this server has {self.model!r}",
                code="model_not_found",
                param="model",
                reason="not_found",
            )

    async def ask(self, request: Request, kind: type[AskT]) -> AskT:
        """The request's body, understood."""
        body = await read_body(request, self.max_body)
        ask = parse(body, kind) if len(body) <= _INLINE_BODY else await asyncio.to_thread(parse, body, kind)
        self.check_model(ask.model)
        return ask

    async def figures(self) -> bytes:
        """All metrics: what callers see, and what the engine tells."""
        return self.metrics.text() + await self.client.figures(_SCRAPE_SECONDS)


def create_app(service: Service) -> ASGIApp:
    """The ASGI application, behind the API key if there is one."""
    app = FastAPI(title="Partwise", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(PartwiseError, lambda request, error: _refuse(service, error))
    app.add_exception_handler(Exception, lambda request, error: _refuse(service, error))
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(CallerLeft, lambda request, error: Response(status_code=499))
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    if service.api_key is None:
        return app
    return ApiKey(app, service.api_key, OPEN_PATHS, lambda: service.metrics.refuse("unauthorized"))


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        ask = await service.ask(request, ChatRequest)
        prompts = service.open()
        params = ask.sampling()
        prompts.check(params)
        tokens = [await prompts.chat(_messages(ask.messages))]
        generation = _generation(request, ask, service, prompts, tokens, params)
        return await _answer(request, ask, generation, ChatAnswer(ask, generation, prompts.vocabulary))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        ask = await service.ask(request, CompletionRequest)
        prompts = service.open()
        params = ask.sampling()
        prompts.check(params)
        tokens = [await prompts.prompt(prompt) for prompt in ask.prompts()]
        generation = _generation(request, ask, service, prompts, tokens, params)
        answer = await asyncio.to_thread(CompletionAnswer, ask, generation, prompts.vocabulary)
        return await _answer(request, ask, generation, answer)


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        ask = await service.ask(request, TokenizeRequest)
        prompts = service.open()
        if ask.prompt is not None:
            tokens = await prompts.text(ask.prompt, ask.add_special_tokens)
        else:
            tokens = await prompts.chat(_messages(ask.messages or []))
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": prompts.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        ask = await service.ask(request, DetokenizeRequest)
        prompts = service.open()
        tokens = prompts.ids(ask.tokens, "tokens")
        return _json({"prompt": prompts.vocabulary.tokenizer.decode(tokens, skip_special_tokens=False)})


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model_card(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return _json(_model_card(service))

    @app.api_route("/health", methods=["GET", "HEAD"])
    @app.api_route("/health/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        """200 when a request sent now would be served."""
        state = "draining" if service.draining else service.client.state
        trouble = {} if state == "ready" else {"message": "draining" if service.draining else service.client.trouble}
        return _json({"status": state, **trouble}, 200 if state == "ready" else 503)

    @app.api_route("/health/live", methods=["GET", "HEAD"])
    async def live() -> Response:
        """200 unless only a restart can help."""
        dead = service.client.state == "dead"
        return _json({"status": service.client.state}, 503 if dead else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.figures(), media_type=CONTENT_TYPE_LATEST)


def _generation(
    request: Request,
    ask: GenerationRequest,
    service: Service,
    prompts: Prompts,
    tokens: list[list[int]],
    params: SamplingParams,
) -> Generation:
    caller = ask.user or (request.client.host if request.client else "")
    return Generation(
        service.client,
        service.metrics,
        prompts.vocabulary.tokenizer,
        tokens,
        params,
        priority=ask.priority,
        cache_salt=ask.cache_salt or "",
        caller=caller,
    )


async def _answer(request: Request, ask: GenerationRequest, generation: Generation, answer: Answer) -> Response:
    """The whole answer or a stream of it; nothing is left running if the caller is gone."""
    try:
        await unless_caller_leaves(request.receive, generation.start())
    except BaseException:
        generation.close()
        raise
    if ask.stream:
        return EventStream(_events(generation, answer, ask.include_usage), generation.close)
    try:
        choices = await unless_caller_leaves(request.receive, _collect(generation))
    finally:
        generation.close()
    content = await asyncio.to_thread(lambda: msgspec.json.encode(answer.whole(choices)))
    return Response(content, media_type="application/json")


async def _collect(generation: Generation) -> list[Delta]:
    choices = [Delta() for _ in range(generation.num_choices)]
    async for index, delta in generation.deltas():
        choices[index].join(delta)
    return choices


async def _events(generation: Generation, answer: Answer, include_usage: bool) -> AsyncIterator[bytes]:
    """Server-sent events. Tokens wait for the text they become, so that a chunk never shows part of a stop string."""
    waiting: dict[int, Delta] = {}
    try:
        for chunk in answer.opening():
            yield _event(chunk)
        async for index, delta in generation.deltas():
            pending = waiting.setdefault(index, Delta())
            pending.join(delta)
            if pending.text or pending.finish_reason is not None:
                del waiting[index]
                yield _event(answer.chunk(index, pending))
        if include_usage:
            yield _event(answer.usage_chunk())
        yield b"data: [DONE]\n\n"
    except PartwiseError as error:
        yield _event(errors.body(errors.as_http(error)))
    except Exception as error:
        log.exception("a stream broke")
        yield _event(errors.body(errors.as_http(error)))


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _messages(messages: list[Message]) -> list[dict[str, str]]:
    """As chat templates want them. `developer` is OpenAI's later name for `system`."""
    return [
        {"role": "system" if message.role == "developer" else message.role, "content": message.text}
        for message in messages
    ]


def _model_card(service: Service) -> dict[str, Any]:
    card = {"id": service.model, "object": "model", "created": service.started, "owned_by": "partwise"}
    return card if service.prompts is None else {**card, "max_model_len": service.prompts.max_model_len}


def _refuse(service: Service, error: Exception) -> Response:
    told = errors.as_http(error)
    if told.reason:
        service.metrics.refuse(told.reason)
    return errors.response(told)


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path[:200]}"
    told = HttpError(error.status_code, "invalid_request_error", message)
    told.headers = dict(error.headers or {})
    return errors.response(told)

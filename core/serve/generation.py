"""One HTTP request as the engine sees it: a request per prompt, and the text of every choice."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from core.serve.client import EngineClient, EngineLost, Inbox, RequestFault
from core.serve.metrics import RequestTimes, ServerMetrics
from core.text import ChoiceText, Delta
from core.types import Event, Request, SamplingParams, TokenLogprob


@dataclass(slots=True)
class Prompt:
    """One prompt's tokens, and what the engine told of it."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class _Live:
    """One engine request. `open` choices may still produce."""

    prompt: Prompt
    first_choice: int
    choices: list[ChoiceText]
    times: RequestTimes
    open: set[int] = field(default_factory=set)


class Generation:
    """The choices of all prompts; choice `prompt * n + i`. Whoever uses it closes it, which aborts what still runs."""

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        caller: str = "",
    ) -> None:
        self.prompts = [Prompt(tuple(tokens)) for tokens in prompts]
        self.params = params
        self._client = client
        self._metrics = metrics
        self._inbox: Inbox = asyncio.Queue()
        self._live: dict[str, _Live] = {}
        self._choices: list[ChoiceText] = []
        self._requests = [
            Request(uuid.uuid4().hex, prompt.tokens, params, time.monotonic(), priority, cache_salt, caller)
            for prompt in self.prompts
        ]
        for prompt in self.prompts:
            self._choices += [ChoiceText(tokenizer, prompt.tokens, params) for _ in range(params.n)]

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def num_tokens(self) -> int:
        """Tokens produced by all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    async def start(self) -> None:
        """Hand all prompts over at once; none runs if one is refused. Raises what EngineClient.add raises."""
        try:
            await asyncio.gather(*(self._client.add(request, self._inbox) for request in self._requests))
        except BaseException:
            for request in self._requests:
                self._client.abort(request.id)
            raise
        for place, (prompt, request) in enumerate(zip(self.prompts, self._requests, strict=True)):
            first = place * self.params.n
            choices = self._choices[first : first + self.params.n]
            times = self._metrics.accepted(request.arrival)
            self._live[request.id] = _Live(prompt, first, choices, times, set(range(self.params.n)))

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, by choice, until all have ended. Raises RequestFault or EngineLost."""
        while self._live:
            event = await self._inbox.get()
            if isinstance(event, EngineLost):
                for one in self._live.values():
                    one.times.finished("error")
                self._live.clear()
                raise event
            live = self._live.get(event.id)
            if live is not None and event.index in live.open:
                yield self._take(live, event)

    def _take(self, live: _Live, event: Event) -> tuple[int, Delta]:
        if event.error is not None or event.finish_reason in ("error", "abort"):
            self._end(event.id, "error")
            raise RequestFault(event.error or "the engine ended this request")
        live.prompt.cached_tokens = max(live.prompt.cached_tokens, event.cached_tokens)
        if event.prompt_logprobs is not None:
            live.prompt.logprobs = event.prompt_logprobs
        delta = live.choices[event.index].push(event)
        if delta.tokens:
            live.times.tokens(event.index, len(delta.tokens))
        if delta.finish_reason is not None:
            live.open.discard(event.index)
            if event.finish_reason is None:
                self._client.abort(event.id, event.index)
            if not live.open:
                self._end(event.id, delta.finish_reason)
        return live.first_choice + event.index, delta

    def _end(self, id: str, reason: str) -> None:
        live = self._live.pop(id)
        live.times.finished(reason)
        if live.open:
            self._client.abort(id)
        else:
            self._client.forget(id)

    def close(self) -> None:
        """Abort what still runs."""
        for id in list(self._live):
            self._end(id, "abort")

"""The engine in one's own process, without a server."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from core.text import ChoiceText, Delta
from core.types import (
    COMPLETION_TOKENS,
    Event,
    FinishReason,
    InvalidRequest,
    QueueFull,
    Request,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from core.engine import Engine
    from core.models.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Completion:
    """One choice. `logprobs` has a record a token if they were asked for; `error` says what failed where
    `finish_reason` is "error"."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class Result(Completion):
    """The first choice of a prompt; with n > 1 `choices` has all of them, this one included."""

    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    choices: list[Completion] = field(default_factory=list)


class LLM:
    """A recipe's engine, run by the caller.

    `overrides` are words of the command line, such as "scheduler=static". RecipeError: they cannot be composed, or
    cannot work. Not for several threads at once.
    """

    def __init__(self, recipe: str = "premium_chat", overrides: Sequence[str] = ()) -> None:
        from core.build import build_engine
        from core.compose import compose
        from core.models.source import read_spec, resolve
        from core.models.tokenizer import load_tokenizer

        self.recipe = compose(recipe, overrides)
        self.tokenizer: Tokenizer = load_tokenizer(resolve(read_spec(self.recipe.model)))
        self.engine: Engine = build_engine(self.recipe)
        self._numbers = itertools.count()

    def generate(self, prompts: Prompt | Sequence[Prompt], **params: Any) -> list[Result]:
        """Continue each prompt, a text or token ids; results in order.

        `params` are the fields of core.types.SamplingParams; `max_tokens` is 16 unless given (None: what the model's
        limit leaves), `stop` may be one text. InvalidRequest names what is wrong, and nothing is left running.
        """
        least = params.get("min_tokens")
        limit = max(COMPLETION_TOKENS, least) if isinstance(least, int) else COMPLETION_TOKENS
        checked = _params({"max_tokens": limit, **params})
        return self._run([self._encoded(prompt) for prompt in _as_list(prompts)], checked)

    def chat(self, messages: Messages | Sequence[Messages], **params: Any) -> list[Result]:
        """The assistant's answer to a conversation, or to each of several. `max_tokens` is what the model's limit
        leaves unless given."""
        if isinstance(messages, (str, Mapping)):
            raise InvalidRequest("messages must be a list of {'role': ..., 'content': ...}", "messages")
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", messages if several else [messages])
        return self._run([self.tokenizer.encode_chat(each) for each in conversations], _params(params))

    def stats(self) -> dict[str, Any]:
        """See Engine.stats."""
        return self.engine.stats()

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _encoded(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(_items("prompt", prompt))

    def _run(self, prompts: list[list[int]], params: SamplingParams) -> list[Result]:
        requests = [
            Request(f"offline-{next(self._numbers)}", tuple(prompt), params, time.monotonic()) for prompt in prompts
        ]
        pending = {request.id: _Pending(self.tokenizer.backend, request) for request in requests}
        waiting = list(reversed(requests))
        try:
            while waiting or any(each.open for each in pending.values()):
                self._feed(waiting)
                for event in self.engine.step():
                    if event.id in pending:
                        self._take(pending[event.id], event)
        finally:
            for id, each in pending.items():
                if each.open:
                    self.engine.abort(id)
        return [each.result() for each in pending.values()]

    def _feed(self, waiting: list[Request]) -> None:
        """Hand over as many requests as the engine's queue takes."""
        try:
            while waiting:
                self.engine.add(waiting[-1])
                waiting.pop()
        except QueueFull:
            if not self.engine.has_work:
                raise

    def _take(self, pending: _Pending, event: Event) -> None:
        if pending.push(event) and event.finish_reason is None:
            self.engine.abort(event.id, event.index)


class _Pending:
    """One request's choices while they grow."""

    def __init__(self, tokenizer: Any, request: Request) -> None:
        self._request = request
        self._texts = [ChoiceText(tokenizer, request.prompt, request.params) for _ in range(request.params.n)]
        self._deltas = [Delta() for _ in self._texts]
        self._errors: dict[int, str | None] = {}
        self._prompt_logprobs: list[TokenLogprob | None] | None = None
        self._cached_tokens = 0
        self.open = set(range(request.params.n))

    def push(self, event: Event) -> bool:
        """Take an event; whether its choice has ended by it."""
        if event.index not in self.open:
            return False
        self._cached_tokens = max(self._cached_tokens, event.cached_tokens)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = list(event.prompt_logprobs)
        delta = self._texts[event.index].push(event)
        self._deltas[event.index].join(delta)
        if delta.finish_reason is None:
            return False
        self.open.discard(event.index)
        self._errors[event.index] = event.error
        return True

    def result(self) -> Result:
        choices = [self._completion(index) for index in range(len(self._deltas))]
        first = choices[0]
        return Result(
            text=first.text,
            token_ids=first.token_ids,
            logprobs=first.logprobs,
            finish_reason=first.finish_reason,
            error=first.error,
            prompt_token_ids=list(self._request.prompt),
            prompt_logprobs=self._prompt_logprobs,
            cached_tokens=self._cached_tokens,
            choices=choices,
        )

    def _completion(self, index: int) -> Completion:
        delta = self._deltas[index]
        logprobs = None if self._request.params.logprobs is None else delta.logprobs
        return Completion(delta.text, delta.tokens, logprobs, delta.finish_reason, self._errors.get(index))


def _as_list(prompts: Any) -> list[Prompt]:
    """One prompt or several, told apart by the first element."""
    if isinstance(prompts, str):
        return [prompts]
    prompts = list(_items("prompts", prompts))
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _params(given: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams, where None is absent and a list as good as a tuple. InvalidRequest: an unknown name."""
    known = SamplingParams.__dataclass_fields__
    given = {name: value for name, value in given.items() if value is not None}
    unknown = [name for name in given if name not in known]
    if unknown:
        raise InvalidRequest(f"unknown parameter {unknown[0]!r}; there are {', '.join(known)}", unknown[0])
    stop = given.get("stop", ())
    return SamplingParams(
        **{
            **given,
            "stop": (stop,) if isinstance(stop, str) else _items("stop", stop),
            "stop_token_ids": _items("stop_token_ids", given.get("stop_token_ids", ())),
        }
    )


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """InvalidRequest: `value` does not hold several of something."""
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a list, not {value!r}", name) from None

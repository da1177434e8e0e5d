"""What callers may ask, after OpenAI: strict about types; a null is an absent field, an unknown field an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.names import nearest
from core.types import COMPLETION_TOKENS, MAX_CHOICES, MAX_LOGPROBS, InvalidRequest, SamplingParams

MAX_MESSAGES: Final = 4096
MAX_VALUES: Final = 65536

Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Fields):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Fields):
    type: Literal["text"]


class TextPart(_Fields):
    type: Literal["text"]
    text: str


class Message(_Fields):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        present = {key: value for key, value in data.items() if value is not None}
        return {"content": "", **present} if present.get("role") == "assistant" else present

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class GenerationRequest(_Fields):
    """Fields of both generating routes. `user`, `metadata`, `store` and `safety_identifier` change no output."""

    model: Name
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    min_p: Number | None = None
    n: Int = 1
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    predicted_tokens: Int | None = None
    ignore_eos: bool | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Int = 0
    cache_salt: Name | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    safety_identifier: str | None = None

    plain: ClassVar[tuple[str, ...]] = (
        "temperature", "top_p", "top_k", "min_p", "n", "seed", "min_tokens", "predicted_tokens", "ignore_eos",
        "presence_penalty", "frequency_penalty", "repetition_penalty",
    )  # fmt: skip

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self) -> SamplingParams:
        """Raises InvalidRequest naming the field."""
        given: dict[str, Any] = {name: getattr(self, name) for name in self.plain if getattr(self, name) is not None}
        stop = self.stop if self.stop is not None else ()
        return SamplingParams(
            **given,
            **self._limits(),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias or {}),
        )

    def _limits(self) -> dict[str, Any]:
        raise NotImplementedError


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Int | None = None
    logprobs: bool = False
    top_logprobs: Int | None = None
    response_format: TextFormat | None = None
    tools: list[Any] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.tools:
            raise InvalidRequest("tools are not supported; leave them out or send an empty list", "tools")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be between 0 and {MAX_LOGPROBS}", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one", "max_completion_tokens")
        return self

    def _limits(self) -> dict[str, Any]:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}


class CompletionRequest(GenerationRequest):
    prompt: Any
    best_of: Int | None = None
    echo: bool = False
    logprobs: Int | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidRequest("best_of other than n is not supported", "best_of")
        return self

    def prompts(self) -> list[str | list[int]]:
        """One prompt or several, each a text or token ids. Raises InvalidRequest."""
        prompt = self.prompt
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        prompts = prompt if several else [prompt]
        if len(prompts) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(prompts)} prompts with n={self.n} ask for more than {MAX_CHOICES} choices", "prompt"
            )
        kind = type(prompts[0])
        if kind not in (str, list) or any(type(each) is not kind for each in prompts):
            raise InvalidRequest("prompt must be a text, token ids, or a list of either", "prompt")
        return prompts

    def _limits(self) -> dict[str, Any]:
        limit = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        limit = max(limit, self.min_tokens or 0) if self.max_tokens is None else limit
        return {
            "max_tokens": limit,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.logprobs if self.echo else None,
        }


class TokenizeRequest(_Fields):
    model: Name | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", "prompt")
        return self


class DetokenizeRequest(_Fields):
    model: Name | None = None
    tokens: Any


RequestT = TypeVar("RequestT", bound=_Fields)


def parse(body: bytes, kind: type[RequestT]) -> RequestT:
    """The request in a JSON body. InvalidRequest names the field at fault."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    if _count([value for name, value in data.items() if name not in ("prompt", "tokens")]) > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values beside its prompt")
    try:
        return kind.model_validate({name: value for name, value in data.items() if value is not None})
    except ValidationError as error:
        raise _explained(error, kind) from None


def _count(value: Any) -> int:
    """Values in nested lists and objects, counted until there are too many."""
    waiting, count = [value], 0
    while waiting and count <= MAX_VALUES:
        value = waiting.pop()
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += len(inner)
        waiting += inner if count <= MAX_VALUES else ()
    return count


def _explained(error: ValidationError, kind: type[_Fields]) -> InvalidRequest:
    item = max(error.errors(include_url=False, include_input=False), key=lambda item: len(item["loc"]))
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        return cause
    where = [str(piece) for piece in item["loc"]]
    if item["type"] == "extra_forbidden":
        close = nearest(where[-1], kind.model_fields, most=1, cutoff=0.75) if len(where) == 1 else []
        hint = f"; did you mean {close[0]}?" if close else ""
        return InvalidRequest(f"{'.'.join(where)[:200]} is not supported{hint}", where[0][:200])
    return InvalidRequest(f"{'.'.join(where)[:200]}: {item['msg']}", where[0] if where else None)


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 19):
            raise InvalidRequest(f"logit_bias: {key[:40]!r} is not a token id", "logit_bias")
        biases[int(key)] = bias
    return biases

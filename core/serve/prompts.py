"""From what callers send to token ids, off the event loop when it is long and not at all when it is hopeless."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol, TypeVar

from tokenizers import Tokenizer

from core.text import Vocabulary
from core.types import InvalidRequest, SamplingParams

_INLINE_CHARS: Final = 4096
_THREADS: Final = 2

T = TypeVar("T")


class ModelTokenizer(Protocol):
    """What the server needs of a model's tokenizer (core.models.tokenizer)."""

    @property
    def backend(self) -> Tokenizer: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers. InvalidRequest: no template, or it refuses."""


class Prompts:
    """Prompts as token ids. Raises InvalidRequest naming the field."""

    def __init__(self, tokenizer: ModelTokenizer, vocabulary: Vocabulary, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.max_model_len = max_model_len
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self._check_chars(len(text), "prompt")
        return await self._run(len(text), lambda: self.tokenizer.encode(text, add_special_tokens))

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        chars = sum(len(message["content"]) for message in messages)
        self._check_chars(chars, "messages")
        return await self._run(chars, lambda: self.tokenizer.encode_chat(messages))

    async def prompt(self, prompt: str | list[int]) -> list[int]:
        """One prompt of a completion, not empty."""
        tokens = await self.text(prompt) if isinstance(prompt, str) else self.ids(prompt)
        if not tokens:
            raise InvalidRequest("prompt is empty; give at least one token", "prompt")
        return tokens

    def ids(self, tokens: object, param: str = "prompt") -> list[int]:
        """Token ids as a caller sent them, each checked."""
        if not isinstance(tokens, list):
            raise InvalidRequest(f"{param} must be a list of token ids", param)
        if len(tokens) > self.max_model_len:
            raise InvalidRequest(
                f"{param} has {len(tokens)} tokens and the model's limit is {self.max_model_len}", param
            )
        self._check_ids(tokens, param)
        return tokens

    def check(self, params: SamplingParams) -> None:
        """The token ids in `params`, of which a model's head may have more rows than there are tokens."""
        self._check_ids(params.logit_bias, "logit_bias")
        self._check_ids(params.stop_token_ids, "stop_token_ids")

    def _check_ids(self, tokens: Iterable[object], param: str) -> None:
        size = self.vocabulary.size
        for token in tokens:
            if type(token) is not int or not 0 <= token < size:
                raise InvalidRequest(f"{param} holds {token!r}; token ids lie in [0, {size - 1}]"[:300], param)

    def _check_chars(self, chars: int, param: str) -> None:
        """No text this long can fit, so it is not worth tokenizing."""
        most = self.max_model_len * self.vocabulary.longest
        if chars > most:
            raise InvalidRequest(
                f"{param} has {chars} characters; the model's limit of {self.max_model_len} tokens "
                f"can hold {most} at the very most",
                param,
            )

    async def _run(self, chars: int, encode: Callable[[], T]) -> T:
        if chars <= _INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)

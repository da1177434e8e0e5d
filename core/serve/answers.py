"""Answers in OpenAI's shapes: whole, and in chunks."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from typing import Any

from core.serve.generation import Generation
from core.serve.protocol import CompletionRequest, GenerationRequest
from core.text import Delta, Detokenizer, Vocabulary
from core.types import LOGPROB_FLOOR, TokenLogprob


class Answer:
    """What both routes' answers have in common."""

    prefix = ""
    object_whole = ""
    object_chunk = ""

    def __init__(self, request: GenerationRequest, generation: Generation, vocabulary: Vocabulary) -> None:
        self._request = request
        self._generation = generation
        self._vocabulary = vocabulary
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model,
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks sent before anything is produced."""
        return []

    def chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a choice has got since its last chunk."""
        return self._part([self._choice(index, delta, self._streamed(index, delta))])

    def usage_chunk(self) -> dict[str, Any]:
        return {**self._wrap(self.object_chunk, []), "usage": self.usage()}

    def whole(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """Everything, from one delta a choice."""
        rendered = [self._choice(index, delta, self._finished(index, delta)) for index, delta in enumerate(choices)]
        return {**self._wrap(self.object_whole, rendered), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompts = self._generation.prompts
        prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        completion_tokens = self._generation.num_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.cached_tokens for prompt in prompts)},
        }

    def _part(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk before the one with the usage."""
        usage = {"usage": None} if self._request.include_usage else {}
        return {**self._wrap(self.object_chunk, choices), **usage}

    def _wrap(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": object, "choices": choices}

    def _choice(self, index: int, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": delta.finish_reason}
        if self._request.return_token_ids:
            choice["token_ids"] = delta.tokens
        return choice

    def _streamed(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _finished(self, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError


class ChatAnswer(Answer):
    prefix = "chatcmpl"
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._part([{"index": index, **first}]) for index in range(self._generation.params.n)]

    def _streamed(self, index: int, delta: Delta) -> dict[str, Any]:
        content = {"content": delta.text} if delta.text else {}
        return {"delta": content, "logprobs": self._logprobs(delta)}

    def _finished(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._generation.params.logprobs is None:
            return None
        return {"content": [self._entry(record) for record in delta.logprobs], "refusal": None}

    def _entry(self, record: TokenLogprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in record.top]
        return {**self._token(record.token, record.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        """`bytes` is what the token adds to the text: null for one that is left out of it."""
        known = None if self._vocabulary.special(token) else list(self._vocabulary.bytes(token))
        return {"token": self._vocabulary.string(token), "logprob": finite(logprob), "bytes": known}


class CompletionAnswer(Answer):
    prefix = "cmpl"
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(self, request: CompletionRequest, generation: Generation, vocabulary: Vocabulary) -> None:
        super().__init__(request, generation, vocabulary)
        self._echoes = [self._echo(place) for place in range(len(generation.prompts))] if request.echo else []
        self._begun: set[int] = set()

    def _echo(self, place: int) -> tuple[str, list[int]]:
        """A prompt's text and the characters before each of its tokens."""
        detokenizer = Detokenizer(self._vocabulary.tokenizer)
        text, offsets = "", []
        for token in self._generation.prompts[place].tokens:
            offsets.append(len(text))
            text += detokenizer.push(token)
        return text + detokenizer.flush(), offsets

    def _streamed(self, index: int, delta: Delta) -> dict[str, Any]:
        if not self._echoes:
            return {"text": delta.text, "logprobs": self._logprobs(delta, 0)}
        place = index // self._generation.params.n
        text, offsets = self._echoes[place]
        own = self._logprobs(delta, len(text))
        if index in self._begun:
            return {"text": delta.text, "logprobs": own}
        self._begun.add(index)
        if own is not None:
            tokens = self._generation.prompts[place].tokens
            own = _joined(self._table(tokens, self._generation.prompts[place].logprobs or (), offsets), own)
        return {"text": text + delta.text, "logprobs": own}

    _finished = _streamed

    def _logprobs(self, delta: Delta, base: int) -> dict[str, Any] | None:
        if self._generation.params.logprobs is None:
            return None
        return self._table(delta.tokens, delta.logprobs, [base + offset for offset in delta.offsets])

    def _table(
        self, tokens: Sequence[int], records: Sequence[TokenLogprob | None], offsets: list[int]
    ) -> dict[str, Any]:
        return {
            "tokens": [self._vocabulary.string(token) for token in tokens],
            "token_logprobs": [None if record is None else finite(record.logprob) for record in records],
            "top_logprobs": [None if record is None else self._top(record) for record in records],
            "text_offset": offsets,
        }

    def _top(self, record: TokenLogprob) -> dict[str, float]:
        """Alternatives best first, the token itself among them; of two that read the same, the better one."""
        ranked = sorted({(record.token, record.logprob), *record.top}, key=lambda pair: -pair[1])
        top: dict[str, float] = {}
        for token, logprob in ranked:
            top.setdefault(self._vocabulary.string(token), finite(logprob))
        return top


def _joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + then[name] for name in first}


def finite(logprob: float) -> float:
    """JSON has no infinities: what is not a finite number, or below it, is LOGPROB_FLOOR."""
    return max(logprob, LOGPROB_FLOOR) if math.isfinite(logprob) else LOGPROB_FLOOR

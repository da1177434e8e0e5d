"""From token ids to text as they come: incremental decoding, stop strings, and where both end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from core.types import Event, FinishReason, InvalidRequest, SamplingParams, TokenLogprob

MAX_STOP_CHARS: Final = 1024
_CONTEXT_TOKENS: Final = 32


class Vocabulary:
    """What single tokens stand for. `size`: one more than the highest id; `longest`: characters of the longest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        pieces = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(pieces.values()) + 1
        self.longest = max(map(len, pieces))
        self._added = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        kinds = _decoder_kinds(tokenizer)
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._marked_spaces = bool(kinds & {"Replace", "Metaspace"})

    def special(self, token: int) -> bool:
        """Whether the token is left out of text."""
        return token in self._special

    def bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text, its own name for a special one, none for an unknown id."""
        if token in self._added:
            return self._added[token].encode()
        piece = self.tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(_byte_of(char) for char in piece)
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x"):
            return bytes([int(piece[3:5], 16)])
        if self._marked_spaces:
            return piece.replace("▁", " ").encode()
        return self.tokenizer.decode([token], skip_special_tokens=False).encode()

    def string(self, token: int) -> str:
        """The same as text; bytes that are no whole character are written as \\xNN."""
        return self.bytes(token).decode("utf-8", "backslashreplace")


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {decoder["type"] for decoder in state.get("decoders", [state])}


def _byte_table() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE (GPT-2): visible Latin-1 for itself, the rest from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


_BYTES: Final = _byte_table()


def _byte_of(char: str) -> bytes:
    return bytes([_BYTES[char]]) if char in _BYTES else char.encode()


class Detokenizer:
    """One choice's tokens to text. What `push` and `flush` return joins to the decoding of all tokens at once.

    `prompt` is context only: a word that continues it keeps its space, a character that it left open is completed.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        self._pending: list[int] = []
        for token in prompt[-_CONTEXT_TOKENS:]:
            self.push(token)

    def push(self, token: int) -> str:
        """The text that is certain now; empty while a character is incomplete."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # the library raises a bare one when later tokens change earlier text
            text = self._rest()
            self._stream = DecodeStream(skip_special_tokens=True)
        if not text:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """What an end in the middle of a character leaves."""
        text = self._rest()
        self._pending = []
        return text

    def _rest(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=True)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=True)[len(before) :]


class StopStrings:
    """Searches text as it comes for the stop that is complete first (Knuth, Morris and Pratt 1977), and holds back
    what may still become one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        if any(len(stop) > MAX_STOP_CHARS for stop in self._stops):
            raise InvalidRequest(f"a stop string has more than {MAX_STOP_CHARS} characters", "stop")
        self._failures = [_failures(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str, armed: bool = True) -> tuple[str, bool]:
        """The text that may go out, and whether a stop ended it. With `armed` False a complete stop is let pass."""
        if not self._stops:
            return text, False
        for place, char in enumerate(text):
            complete = self._advance(char)
            if complete and armed:
                whole = self._held + text[: place + 1]
                self._held = ""
                return whole[: len(whole) - complete], True
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> int:
        """Length of the longest stop that `char` completes."""
        complete = 0
        for index, (stop, failures) in enumerate(zip(self._stops, self._failures, strict=True)):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = failures[matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete = max(complete, matched)
                matched = failures[-1]
            self._matched[index] = matched
        return complete


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the longest shorter prefix that also ends it."""
    table = [0] * len(stop)
    for place in range(1, len(stop)):
        length = table[place - 1]
        while length and stop[length] != stop[place]:
            length = table[length - 1]
        table[place] = length + (stop[length] == stop[place])
    return table


@dataclass(slots=True)
class Delta:
    """What one event adds to a choice. `offsets` are the characters of produced text before each token."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def join(self, later: Delta) -> None:
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.offsets += later.offsets
        self.finish_reason = later.finish_reason


class ChoiceText:
    """Turns one choice's events into text that ends where its tokens, logprobs and count end.

    A stop string is cut from the text; the token that completes it is the choice's last. A stop token is kept in the
    tokens and leaves no text. Before `min_tokens` a stop string is text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._stops = StopStrings(params.stop)
        self._min_tokens = params.min_tokens
        self._chars = 0
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, event: Event) -> Delta:
        """`event` as text. Once `finish_reason` is set nothing more comes of the choice, whatever the engine sends."""
        delta = Delta()
        if self.finish_reason is not None:
            return delta
        for place, token in enumerate(event.tokens):
            delta.tokens.append(token)
            delta.offsets.append(self._chars)
            delta.logprobs += event.logprobs[place : place + 1]
            self.num_tokens += 1
            last = place == len(event.tokens) - 1
            silent = last and event.finish_reason == "stop" and token == event.stop_token
            if not silent and self._add(self._detokenizer.push(token), delta):
                return delta
        if event.finish_reason is not None:
            self._end(event.finish_reason, delta)
        return delta

    def _add(self, text: str, delta: Delta) -> bool:
        self._chars += len(text)
        released, stopped = self._stops.push(text, self.num_tokens >= self._min_tokens)
        delta.text += released
        if stopped:
            self.finish_reason = delta.finish_reason = "stop"
        return stopped

    def _end(self, reason: FinishReason, delta: Delta) -> None:
        if not self._add(self._detokenizer.flush(), delta):
            delta.text += self._stops.flush()
            self.finish_reason = delta.finish_reason = reason

"""Readers of published traces. A broken line stops the study: skipping it would change the load unseen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from core.lab.errors import UsageError
from core.lab.text import tokens_in

MOONCAKE_PAGE = 512


@dataclass(frozen=True, slots=True)
class Exchange:
    prompt: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class MooncakeEntry:
    """`at` in seconds."""

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class _PromptLine(msgspec.Struct):
    prompt: str | None = None
    turns: list[str] | None = None


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def sharegpt(path: Path) -> list[Exchange]:
    """First exchange of each conversation, by the filter of vLLM's `bench serve`: at least two turns, prompt
    and answer of 4 tokens or more, prompt up to 1,024, both together up to 2,048. Tokens are estimated."""
    try:
        conversations = msgspec.json.decode(_bytes(path), type=list[_Conversation])
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is not ShareGPT's JSON: {error}.") from None
    exchanges = []
    for conversation in conversations:
        if len(conversation.conversations) < 2:
            continue
        prompt = conversation.conversations[0].value
        asked, answered = tokens_in(prompt), tokens_in(conversation.conversations[1].value)
        if asked >= 4 and answered >= 4 and asked <= 1024 and asked + answered <= 2048:
            exchanges.append(Exchange(prompt, answered))
    return exchanges


def mooncake(path: Path) -> list[MooncakeEntry]:
    """Mooncake's JSONL; its timestamps are milliseconds."""
    entries = []
    for where, line in _lines(path, _MooncakeLine):
        pages = -(-line.input_length // MOONCAKE_PAGE)
        if pages != len(line.hash_ids):
            given = len(line.hash_ids)
            raise UsageError(f"{where}: {line.input_length} tokens need {pages} hash ids, not {given}.")
        entries.append(MooncakeEntry(line.timestamp / 1e3, line.input_length, line.output_length, tuple(line.hash_ids)))
    return entries


def prompts(path: Path) -> list[list[str]]:
    """JSONL of `{"turns": [...]}` or `{"prompt": ...}`; the turns of each line."""
    conversations = []
    for where, line in _lines(path, _PromptLine):
        turns = line.turns or ([line.prompt] if line.prompt else [])
        if not turns:
            raise UsageError(f"{where}: neither `turns` nor `prompt`.")
        conversations.append(turns)
    return conversations


def _lines(path: Path, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_bytes(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", msgspec.json.decode(line, type=kind)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}:{number} is broken: {error}. Mend or remove the line.") from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}.") from None

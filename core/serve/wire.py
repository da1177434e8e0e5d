"""What the API process and the engine process say to each other: frames of messages, one list of them a frame."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from core.types import Event, Request

_LENGTH: Final = struct.Struct("<I")
HEADER_BYTES: Final = _LENGTH.size


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages."""


class Start(Message):
    """First command: build the engine of this recipe."""

    recipe: dict[str, Any]


class Add(Message):
    request: Request


class Abort(Message):
    """End a request, or only its choice `index`. Unknown and ended ones are ignored."""

    id: str
    index: int | None = None


class AskFigures(Message):
    pass


class Shutdown(Message):
    pass


Command = Start | Add | Abort | AskFigures | Shutdown


class Ready(Message):
    """The engine can serve, with these parts by slot."""

    max_model_len: int
    parts: Mapping[str, str]


class Failed(Message):
    """The engine cannot start, or cannot go on."""

    message: str


class Accepted(Message):
    id: str


class Refused(Message):
    id: str
    kind: Literal["invalid", "full", "fault"]
    message: str
    param: str | None = None


class Stepped(Message):
    """What one step did; also the sign that the engine lives."""

    events: tuple[Event, ...]


class Figures(Message):
    """The engine's metrics, as Prometheus reads them."""

    text: bytes


Reply = Ready | Failed | Accepted | Refused | Stepped | Figures

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_replies = msgspec.msgpack.Decoder(list[Reply])


def frame(messages: Sequence[Command] | Sequence[Reply]) -> bytes:
    """Messages as bytes: a length of 4 bytes, then MessagePack."""
    body = _encoder.encode(messages)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    return int(_LENGTH.unpack(header)[0])


def replies(body: bytes) -> list[Reply]:
    return _replies.decode(body)


def read_commands(sock: socket.socket) -> list[Command]:
    """Wait for the next frame. EOFError: the other side is gone."""
    return _commands.decode(_read(sock, body_length(_read(sock, HEADER_BYTES))))


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        received = sock.recv_into(view[filled:])
        if not received:
            raise EOFError
        filled += received
    return bytes(data)

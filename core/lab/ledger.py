"""The ledger: one JSON line for each thing that happened in a study, never changed afterwards.

A line is written, flushed and synced when a trial is over, so a crash loses at most the trial under way; what a
crash left half written at the end is cut off when the ledger is opened again.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from core.lab.errors import UsageError
from core.lab.metrics import Summary


class Header(msgspec.Struct, tag="study", frozen=True):
    """First line of a session of work: what is studied (`plan`, as in lock.yaml) and where (`environment`)."""

    plan: dict[str, Any]
    environment: dict[str, Any]
    at: str


class Trial(msgspec.Struct, tag="trial", frozen=True):
    """One run of one workload against one arm. `seconds`: all of it, warm-up included; `start_s`: the arm's
    own start, counted with the first workload it ran."""

    arm: str
    words: list[str]
    workload: str
    block: int
    position: int
    at: str
    seconds: float
    start_s: float
    summary: Summary

    @property
    def key(self) -> tuple[str, str, int]:
        return (self.arm, self.workload, self.block)


class Impossible(msgspec.Struct, tag="impossible", frozen=True):
    """An arm that was never started, and all reasons why it cannot work."""

    arm: str
    words: list[str]
    reasons: list[str]


class Failure(msgspec.Struct, tag="failure", frozen=True):
    """An arm that should have worked and did not."""

    arm: str
    words: list[str]
    block: int
    reason: str
    seconds: float


Entry = Header | Trial | Impossible | Failure
_decode = msgspec.json.Decoder(Entry).decode


class Ledger:
    """An open ledger file; `entries` are all lines so far. One process writes a ledger at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another study is writing {path}: wait for it, or name another output.") from None
        self._cut_torn_line()
        self.entries = read(path)

    def _cut_torn_line(self) -> None:
        self._file.seek(0)
        data = self._file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._file.truncate(whole)

    def append(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.entries.append(entry)

    @property
    def trials(self) -> list[Trial]:
        return [e for e in self.entries if isinstance(e, Trial)]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def read(path: Path) -> list[Entry]:
    """All entries of a ledger file; a torn last line is no entry yet. UsageError names a broken line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the ledger {path}: {error.strerror}.") from None
    entries: list[Entry] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            entries.append(_decode(line))
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path}:{number} is not a ledger entry: {error}.") from None
    return entries

"""The engine process: commands in, steps, events out. Run as `python -m core.serve.worker SOCKET_FD FACTORY`."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from core.serve.engine_metrics import EngineMetrics
from core.serve.wire import (
    Abort,
    Accepted,
    Add,
    AskFigures,
    Command,
    Failed,
    Figures,
    Ready,
    Refused,
    Reply,
    Shutdown,
    Start,
    Stepped,
    frame,
    read_commands,
)
from core.types import Event, InvalidRequest, PartwiseError, QueueFull, Request

FIGURES_SECONDS: Final = 0.5

log = logging.getLogger("partwise.engine")


class Limits(Protocol):
    @property
    def max_model_len(self) -> int: ...


class Engine(Protocol):
    """What the server needs of an engine."""

    @property
    def limits(self) -> Limits: ...
    @property
    def parts(self) -> Mapping[str, str]: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def abort(self, id: str, index: int | None = None) -> None: ...
    def step(self) -> list[Event]: ...
    def stats(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


def main() -> None:
    gc.disable()  # what imports and loading make stays
    descriptor, reference = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole group; the API process decides when we end
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    sock = socket.socket(fileno=int(descriptor))
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sock, commands), daemon=True).start()
    metrics = EngineMetrics()
    engine = _build(reference, metrics, commands, sock)
    gc.freeze()
    gc.enable()
    if engine is not None:
        Loop(engine, metrics, commands, sock).run()


def _listen(sock: socket.socket, commands: queue.SimpleQueue[Command]) -> None:
    try:
        while True:
            for command in read_commands(sock):
                commands.put(command)
    except (EOFError, OSError):
        os._exit(1)  # the API process is gone; a step may be running, and its result has no reader


def _build(
    reference: str, metrics: EngineMetrics, commands: queue.SimpleQueue[Command], sock: socket.socket
) -> Engine | None:
    try:
        build = _factory(reference)
        start = commands.get()
        if not isinstance(start, Start):
            return None
        engine = build(start.recipe, (metrics,))
        sock.sendall(frame([Ready(engine.limits.max_model_len, engine.parts)]))
        return engine
    except PartwiseError as error:
        sock.sendall(frame([Failed(str(error))]))
    except Exception as error:
        log.exception("the engine cannot start")
        sock.sendall(frame([Failed(_told(error))]))
    return None


def _factory(reference: str) -> Callable[[Mapping[str, Any], Sequence[object]], Engine]:
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


class Loop:
    """Takes what has been asked, steps while there is work, and reports once a step."""

    def __init__(
        self, engine: Engine, metrics: EngineMetrics, commands: queue.SimpleQueue[Command], sock: socket.socket
    ) -> None:
        self._engine = engine
        self._metrics: EngineMetrics | None = metrics
        self._commands = commands
        self._sock = sock
        self._figures_due = 0.0
        self._ended = False

    def run(self) -> None:
        """Until a Shutdown, or until the engine itself raises: then nothing it holds can be trusted."""
        try:
            while not self._ended:
                self._turn()
        except Exception as error:
            log.exception("the engine failed")
            self._send([Failed(_told(error))])
            sys.exit(1)
        finally:
            self._engine.close()

    def _turn(self) -> None:
        self._send([reply for command in self._asked() for reply in self._do(command)])
        if self._engine.has_work and not self._ended:
            self._send([Stepped(tuple(self._engine.step()))])
        if not self._engine.has_work or time.monotonic() >= self._figures_due:
            self._figures_due = time.monotonic() + FIGURES_SECONDS
            self._send([Figures(self._figures())])

    def _asked(self) -> Iterator[Command]:
        """All commands that wait; without work, wait for one."""
        try:
            if self._engine.has_work:
                yield self._commands.get_nowait()
            else:
                yield self._commands.get(timeout=FIGURES_SECONDS)
            while True:
                yield self._commands.get_nowait()
        except queue.Empty:
            return

    def _do(self, command: Command) -> list[Reply]:
        match command:
            case Add(request):
                return [self._add(request)]
            case Abort(id, index):
                self._engine.abort(id, index)
            case AskFigures():
                return [Figures(self._figures())]
            case Shutdown():
                self._ended = True
        return []

    def _add(self, request: Request) -> Reply:
        try:
            self._engine.add(request)
            return Accepted(request.id)
        except InvalidRequest as error:
            return Refused(request.id, "invalid", str(error), error.param)
        except QueueFull as error:
            return Refused(request.id, "full", str(error))
        except Exception as error:
            log.exception("request %s could not be added", request.id)
            return Refused(request.id, "fault", _told(error))

    def _figures(self) -> bytes:
        """The metrics; none from the moment that they cannot be had, which must not stop serving."""
        try:
            return self._metrics.text(self._engine.stats()) if self._metrics is not None else b""
        except Exception:
            log.exception("the engine's metrics are switched off")
            self._metrics = None
            return b""

    def _send(self, messages: list[Reply]) -> None:
        if messages:
            self._sock.sendall(frame(messages))


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


if __name__ == "__main__":
    main()

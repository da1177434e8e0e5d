"""Starts the engine process. Imports the standard library only, so that it can be the first thing a server does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

SPIN_COUNT: Final = "10000"
"""How long torch's threads spin for each other, well under a millisecond. Their default, without end, burns whole time
slices as soon as the cores are shared, be it with our own API process: a load took 39 s so, 11 s with this."""

DEFAULT_FACTORY: Final = "core.build:build_engine"


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A started engine process and our end of the socket pair."""

    process: subprocess.Popen[bytes]
    sock: socket.socket

    def stop(self) -> None:
        """End it at once."""
        self.sock.close()
        self.process.kill()
        self.process.wait()


def launch(factory: str = DEFAULT_FACTORY) -> EngineProcess:
    """Start a process that imports `factory` ("module:function", of recipe and observers) and waits for a recipe."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", "core.serve.worker", str(theirs.fileno()), factory],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # what a terminal sends to its group is for us; we end this process
        env={"GOMP_SPINCOUNT": SPIN_COUNT, **os.environ, "PYTHONPATH": path},
    )
    theirs.close()
    return EngineProcess(process, ours)

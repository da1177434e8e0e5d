"""The command is stopped before it is ready."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_it_starts(number: signal.Signals):
    command = subprocess.Popen([sys.executable, "-m", "core.serve", "server.port=0"], stderr=subprocess.PIPE, text=True)
    engine = _engine_of(command.pid)
    command.send_signal(number)
    _, told = command.communicate(timeout=20)
    assert command.returncode == 128 + number
    assert "Traceback" not in told
    assert psutil.wait_procs([engine], timeout=20)[0], "the engine process is left behind"


def _engine_of(pid: int) -> psutil.Process:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if children := psutil.Process(pid).children():
            return children[0]
        time.sleep(0.01)
    raise AssertionError("no engine process was started")

"""Tells a hung engine process from one that is deep in a long step."""

from __future__ import annotations

import time
from typing import Final

import psutil

_BUSY_SHARE: Final = 0.1
_LONGEST_STEP: Final = 30


class Pulse:
    """Listens to one process. It hangs when it has neither spoken nor computed for `patience` seconds, or only
    computed for 30 times as long."""

    def __init__(self, pid: int, patience: float) -> None:
        self._pid = pid
        self._patience = patience
        self._spoke = self._looked = self._active = time.monotonic()
        self._cpu_seconds = 0.0

    def spoke(self) -> None:
        """It has sent something."""
        self._spoke = time.monotonic()

    def hangs(self) -> bool:
        """To be asked several times a second."""
        now, used = time.monotonic(), self._used()
        if used - self._cpu_seconds > _BUSY_SHARE * (now - self._looked):
            self._active = now
        self._looked, self._cpu_seconds = now, used
        silent = now - self._spoke
        return min(silent, now - self._active) > self._patience or silent > _LONGEST_STEP * self._patience

    def _used(self) -> float:
        try:
            times = psutil.Process(self._pid).cpu_times()
        except psutil.Error:
            return self._cpu_seconds
        return float(times.user + times.system)

"""Processes that must not outlive the study: an orphaned engine would take the machine from the next one."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def start(arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Starts this Python with `arguments`; `options` as for Popen. On Linux the process gets SIGTERM when the study
    dies, however it dies."""
    return subprocess.Popen([sys.executable, *arguments], preexec_fn=_follow_parent, **options)


def _follow_parent() -> None:
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

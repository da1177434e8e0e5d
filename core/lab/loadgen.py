"""Starts the load generator's process, hands it a job and reads what comes back."""

from __future__ import annotations

import pickle
import subprocess
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from core.lab import children
from core.lab.errors import LabError, TargetError
from core.lab.generator import NOT_ASKED, Job, Line
from core.lab.metrics import RequestRecord


class DeadlineReached(Exception):
    """The time given to a run is over; what it had measured is not a whole run and is dropped."""


def _nothing(_: int) -> None:
    return None


def measure(
    job: Job,
    started: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = _nothing,
    deadline_s: float | None = None,
) -> list[RequestRecord]:
    """Runs `job` in a fresh process and returns its records.

    `started` is called after the warm-up, just before the first request; `progress` with the number of
    requests that have ended. TargetError when the target cannot be reached or fails every request of the
    warm-up; DeadlineReached after `deadline_s` seconds.
    """
    process = children.start(["-m", "core.lab.generator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    late = threading.Event()
    timer = threading.Timer(deadline_s, _stop, (process, late)) if deadline_s is not None else None
    if timer:
        timer.start()
    try:
        return _converse(process, job, started, progress)
    except _Gone:
        if late.is_set():
            raise DeadlineReached from None
        raise LabError("the load generator's process died; its message is above.") from None
    finally:
        if timer:
            timer.cancel()
        process.kill()
        process.communicate()


class _Gone(Exception):
    pass


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


def _converse(
    process: subprocess.Popen[bytes], job: Job, started: Callable[[], None], progress: Callable[[int], None]
) -> list[RequestRecord]:
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):
        pickle.dump(job, process.stdin)
        process.stdin.flush()
    for raw in process.stdout:
        line = msgspec.json.decode(raw, type=Line)
        if line.failed:
            raise TargetError(line.failed)
        if line.ready:
            _check_warmup(job, line.warmup_errors)
            started()
            process.stdin.write(b"\n")
            process.stdin.flush()
        elif line.records is None:
            progress(line.ended)
        else:
            return line.records
    raise _Gone


def _check_warmup(job: Job, errors: list[str]) -> None:
    wanted = sum(s.requests for s in job.warmup)
    if wanted and len(errors) == wanted:
        worst = next((e for e, _ in Counter(errors).most_common() if e != NOT_ASKED), errors[0])
        raise TargetError(f"the target failed all {wanted} requests of the warm-up: {worst}.")

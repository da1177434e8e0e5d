"""Starts the load generator's process, hands it a job and reads what comes back."""

from __future__ import annotations

import pickle
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from core.lab import children
from core.lab.errors import LabError, TargetError
from core.lab.generator import NOT_ASKED, Job, Line
from core.lab.metrics import RequestRecord


class DeadlineReached(Exception):
    """The time given to a run is over; what it had measured is not a whole run and is dropped."""


Heard = Callable[[int, Mapping[str, float]], None]


def _nothing(_: int) -> None:
    return None


def _not_heard(_: int, __: Mapping[str, float]) -> None:
    return None


def measure(
    job: Job,
    started: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = _nothing,
    deadline_s: float | None = None,
    heard: Heard = _not_heard,
) -> list[RequestRecord]:
    """Runs `job` in a fresh process and returns its records.

    `started` is called after the warm-up, just before the first request; `progress` with the number of requests that
    have ended; `heard` with the process and the counters of an engine that runs in it. TargetError when the target
    cannot be reached or fails every request of the warm-up; DeadlineReached after `deadline_s` seconds.
    """
    process = children.start(["-m", "core.lab.generator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    late = threading.Event()
    timer = threading.Timer(deadline_s, _stop, (process, late)) if deadline_s is not None else None
    if timer:
        timer.start()
    try:
        return _converse(process, job, started, progress, heard)
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
    process: subprocess.Popen[bytes],
    job: Job,
    started: Callable[[], None],
    progress: Callable[[int], None],
    heard: Heard,
) -> list[RequestRecord]:
    assert process.stdin and process.stdout
    with suppress(BrokenPipeError):
        pickle.dump(job, process.stdin)
        process.stdin.flush()
    for raw in process.stdout:
        line = msgspec.json.decode(raw, type=Line)
        if line.counters:
            heard(process.pid, line.counters)
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
        requests = f"all {wanted} requests" if wanted > 1 else "the request"
        raise TargetError(f"the target failed {requests} of the warm-up: {worst}.")

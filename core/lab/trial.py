"""One run of one workload against one running arm."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from core.lab.errors import TargetError
from core.lab.generator import Job
from core.lab.hosts import Host
from core.lab.loadgen import measure
from core.lab.metrics import RequestRecord, Summary, summarize
from core.lab.observe import Watch
from core.lab.workloads import Session, Workload

WARMUP_SEED = 1_000_003
WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    summary: Summary
    records: Sequence[RequestRecord]
    seconds: float


def run_trial(
    host: Host,
    workload: Workload,
    seed: int,
    targets: Mapping[str, float],
    warmup: int = 1,
    deadline_s: float | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Warms the arm up with `warmup` short requests of other text, then measures one run.

    `targets`: milliseconds by latency name, for goodput. TargetError when no request got its answer;
    DeadlineReached after `deadline_s` seconds.
    """
    began = time.monotonic()
    other = workload.model_copy(update={"n": warmup}).sessions(seed + WARMUP_SEED) if warmup else []
    warm = [_first_request(session) for session in other]
    job = Job(host.target, tuple(warm), tuple(workload.sessions(seed)), workload.load, seed)
    watch = Watch(host)
    try:
        records = measure(job, watch.start, progress, deadline_s, watch.heard)
    finally:
        watch.stop()
    seen, seams = watch.seen()
    summary = summarize(records, max(r.ended for r in records), targets)
    if not summary.completed:
        raise TargetError(f"the target failed all {summary.requests} requests: {describe_errors(summary)}.")
    summary = replace(summary, values=summary.values | seen, seam_seconds=seams)
    return Outcome(summary, records, time.monotonic() - began)


def _first_request(session: Session) -> Session:
    """Enough of a session to touch all that an engine does for the first time."""
    ask = session.stages[0][0]
    return Session(((replace(ask, max_tokens=min(ask.max_tokens, WARMUP_TOKENS)),),))


def describe_errors(summary: Summary) -> str:
    """Empty when every request got its answer."""
    failed = summary.requests - summary.completed
    if not failed:
        return ""
    what = ", ".join(f"{n} x {error}" for error, n in Counter(summary.errors).most_common())
    return f"{failed} of {summary.requests} requests failed ({what})"

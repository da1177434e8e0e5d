"""What is measured of a request and of a run, by vLLM's definitions.

Source of the definitions: vLLM `bench serve` (`benchmarks/serve.py`, `calculate_metrics`):
TTFT is send to first token; ITL are the raw gaps between received pieces, pooled over requests;
TPOT is (E2E - TTFT) / (output tokens - 1), requests of one token left out; E2E is send to last token;
goodput counts requests that meet every target, with a TPOT of 0 for requests of one token.
All percentiles interpolate linearly. Times are seconds inside, milliseconds in a summary.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from core.lab.errors import unknown

PERCENTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as the load generator saw it; seconds since the run began.

    `due`: when it should have been sent: by the arrival process, or when what it waited for had ended.
    `token_times` has one entry per received piece of text (a piece may hold several tokens).
    """

    session: int
    stage: int
    label: str
    due: float
    sent: float
    ended: float
    token_times: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.token_times[-1] - self.sent

    @property
    def itl(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """None for a request of one token, which has no time between tokens."""
        if self.output_tokens <= 1:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def latencies(self) -> dict[str, float | None]:
        """Milliseconds by name, the mean of its ITL among them; None for what this request does not have."""
        if self.error is not None:
            return dict.fromkeys(f"{name}_ms" for name in LATENCIES)
        itl = sum(self.itl) / len(self.itl) if self.itl else None
        seconds = zip(LATENCIES, (self.ttft, itl, self.tpot, self.e2e), strict=True)
        return {f"{name}_ms": None if value is None else value * 1e3 for name, value in seconds}

    @property
    def lag(self) -> float:
        """How late the load generator sent it."""
        return self.sent - self.due


@dataclass(frozen=True, slots=True)
class Metric:
    """How a number of a summary is named, written, and read: is more of it better?"""

    label: str
    unit: str
    higher_is_better: bool


def _metrics() -> dict[str, Metric]:
    table = {
        "requests_per_s": Metric("requests a second", "1/s", True),
        "output_tokens_per_s": Metric("output tokens a second", "1/s", True),
        "total_tokens_per_s": Metric("prompt and output tokens a second", "1/s", True),
        "goodput_per_s": Metric("requests a second that meet all targets", "1/s", True),
        "kv_bytes_peak": Metric("KV peak", "B", False),
        "kv_bytes_mean": Metric("KV mean", "B", False),
        "memory_bytes_peak": Metric("memory peak", "B", False),
        "memory_bytes_mean": Metric("memory mean", "B", False),
        "prefix_hit_rate": Metric("prefix hit rate", "", True),
        "acceptance": Metric("draft acceptance", "", True),
        "preemptions": Metric("preemptions", "", False),
        "energy_j": Metric("energy", "J", False),
    }
    for name in LATENCIES:
        for q in PERCENTILES:
            table[f"{name}_p{q}_ms"] = Metric(f"{name.upper()} p{q}", "ms", False)
        table[f"{name}_mean_ms"] = Metric(f"{name.upper()} mean", "ms", False)
    return table


METRICS = _metrics()


def metric(name: str) -> Metric:
    """The metric called `name`; UsageError with the nearest name if there is none."""
    if name not in METRICS:
        raise unknown("metric", name, METRICS)
    return METRICS[name]


@dataclass(frozen=True, slots=True)
class Summary:
    """The numbers of one run: `values` by metric name, and what did not go well."""

    requests: int
    completed: int
    duration_s: float
    values: dict[str, float]
    errors: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    output_tokens: int = 0
    max_concurrency: int = 0
    seam_seconds: dict[str, float] = field(default_factory=dict)
    lag_p50_ms: float = 0.0
    lag_p99_ms: float = 0.0


def summarize(records: Sequence[RequestRecord], duration_s: float, targets: Mapping[str, float]) -> Summary:
    """Reduces a run to its summary.

    `duration_s`: from the run's start until the last request ended. `targets`: milliseconds by latency name
    (`{"ttft": 200, "tpot": 50}`); empty means no goodput. A failed request counts in `requests` and `errors`
    and adds neither latency nor throughput.
    """
    for name in targets:
        if name not in ("ttft", "tpot", "e2e"):
            raise unknown("target", name, ("ttft", "tpot", "e2e"))
    done = [r for r in records if r.error is None]
    output = sum(r.output_tokens for r in done)
    prompt = sum(r.prompt_tokens for r in done)
    values = {
        "requests_per_s": len(done) / duration_s,
        "output_tokens_per_s": output / duration_s,
        "total_tokens_per_s": (prompt + output) / duration_s,
    }
    values |= _latencies(done)
    if targets:
        values["goodput_per_s"] = sum(_meets(r, targets) for r in done) / duration_s
    cached = [r.cached_tokens for r in done if r.cached_tokens is not None]
    if cached and prompt:
        values["prefix_hit_rate"] = sum(cached) / prompt
    lag_p50, lag_p99 = np.percentile([r.lag for r in records] or [0.0], (50, 99)) * 1e3
    return Summary(
        requests=len(records),
        completed=len(done),
        duration_s=duration_s,
        values=values,
        errors=dict(Counter(r.error for r in records if r.error is not None)),
        prompt_tokens=prompt,
        output_tokens=output,
        max_concurrency=max_concurrency(records),
        lag_p50_ms=float(lag_p50),
        lag_p99_ms=float(lag_p99),
    )


def _latencies(done: Sequence[RequestRecord]) -> dict[str, float]:
    samples = {
        "ttft": [r.ttft for r in done],
        "itl": [gap for r in done for gap in r.itl],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "e2e": [r.e2e for r in done],
    }
    values: dict[str, float] = {}
    for name, seconds in samples.items():
        if not seconds:
            continue
        values[f"{name}_mean_ms"] = float(np.mean(seconds)) * 1e3
        for q, value in zip(PERCENTILES, np.percentile(seconds, PERCENTILES), strict=True):
            values[f"{name}_p{q}_ms"] = float(value) * 1e3
    return values


def _meets(record: RequestRecord, targets: Mapping[str, float]) -> bool:
    reached = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2e": record.e2e}
    return all(reached[name] * 1e3 <= limit for name, limit in targets.items())


def max_concurrency(records: Sequence[RequestRecord]) -> int:
    """Most requests in flight at once; one that ends as another is sent does not overlap it."""
    edges = sorted([(r.ended, -1) for r in records] + [(r.sent, 1) for r in records])
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    return peak

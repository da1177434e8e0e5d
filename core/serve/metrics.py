"""Figures for Prometheus as callers see them; core.serve.engine_metrics has the engine's. No label's value comes from a
caller.

Times mean what they mean in vLLM: TTFT from arrival to the first token, ITL between two of a choice's outputs, TPOT
(end to end - TTFT) / (tokens - 1), E2E from arrival to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from core.types import FinishReason

REFUSALS: Final = ("invalid", "too_large", "not_found", "unauthorized", "queue_full", "unavailable")
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)


class ServerMetrics:
    """What the API process sees."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two outputs of a choice.", _SHORT)
        self.tpot = self._histogram("time_per_output_token_seconds", "A choice's mean after its first token.", _SHORT)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end, aborts included.", _LONG)
        self.finished = self._labelled(
            "request_finished", "Accepted requests by how they ended.", get_args(FinishReason)
        )
        self.refused = self._labelled("request_refused", "Requests that were not accepted, by why.", REFUSALS)

    def accepted(self, arrival: float) -> RequestTimes:
        return RequestTimes(self, arrival)

    def refuse(self, why: str) -> None:
        self.refused.labels(why).inc()

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"partwise_{name}", help, buckets=buckets, registry=self.registry)

    def _labelled(self, name: str, help: str, values: Iterable[str]) -> Counter:
        counter = Counter(f"partwise_{name}", help, ["reason"], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter


class RequestTimes:
    """The moments of one accepted request. Choices have their own first token, gaps and mean."""

    def __init__(self, metrics: ServerMetrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self._count: dict[int, int] = {}

    def tokens(self, index: int, count: int) -> None:
        """A choice has got `count` tokens at once."""
        now = time.monotonic()
        if index in self._last:
            self._metrics.itl.observe(now - self._last[index])
        else:
            self._first[index] = now
            self._metrics.ttft.observe(now - self._arrival)
        self._last[index] = now
        self._count[index] = self._count.get(index, 0) + count

    def finished(self, reason: str) -> None:
        for index, count in self._count.items():
            if count > 1:
                self._metrics.tpot.observe((self._last[index] - self._first[index]) / (count - 1))
        self._metrics.e2e.observe(time.monotonic() - self._arrival)
        self._metrics.finished.labels(reason).inc()

"""Figures for Prometheus. No label's value comes from a caller.

Times mean what they mean in vLLM: TTFT from arrival to the first token, ITL between two of a choice's outputs, TPOT
(end to end - TTFT) / (tokens - 1), E2E from arrival to the last token.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
REFUSALS: Final = ("invalid", "too_large", "not_found", "unauthorized", "queue_full", "unavailable")
_SHORT: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_BATCH: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    """What the API process sees, and the engine's figures as last told."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", _LONG)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two outputs of a choice.", _SHORT)
        self.tpot = self._histogram("time_per_output_token_seconds", "A choice's mean after its first token.", _SHORT)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end, aborts included.", _LONG)
        self.batch = self._histogram("batch_size", "Sequences computed in a step.", _BATCH)
        self.prompt_tokens = Counter("partwise_prompt_tokens", "Tokens of accepted prompts.", registry=self.registry)
        self.generated = Counter("partwise_generation_tokens", "Tokens sent or returned.", registry=self.registry)
        self.finished = self._labelled("request_finished", "Accepted requests by how they ended.", FINISH_REASONS)
        self.refused = self._labelled("request_refused", "Requests that were not accepted, by why.", REFUSALS)
        self.engine: Mapping[str, Any] = {}
        self.registry.register(_EngineFigures(self))

    def accepted(self, prompt_tokens: int, arrival: float) -> RequestTimes:
        self.prompt_tokens.inc(prompt_tokens)
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
        self._metrics.generated.inc(count)

    def finished(self, reason: str) -> None:
        for index, count in self._count.items():
            if count > 1:
                self._metrics.tpot.observe((self._last[index] - self._first[index]) / (count - 1))
        self._metrics.e2e.observe(time.monotonic() - self._arrival)
        self._metrics.finished.labels(reason).inc()


class _EngineFigures:
    """Turns the engine's last figures into metrics at each scrape, so that none is older than they are."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._metrics.engine
        if not stats:
            return
        yield GaugeMetricFamily("partwise_requests_running", "Sequences in the batch.", stats["running"])
        yield GaugeMetricFamily("partwise_requests_waiting", "Sequences in the queue.", stats["waiting"])
        yield from _kv(stats["kv"])
        cache = stats["prefix_cache"]
        yield CounterMetricFamily("partwise_prefix_cache_query_tokens", "Tokens looked up.", cache["lookup_tokens"])
        yield CounterMetricFamily("partwise_prefix_cache_hit_tokens", "Tokens found.", cache["hit_tokens"])
        yield CounterMetricFamily("partwise_preemptions", "Sequences put back to waiting.", stats["preemptions"])
        yield CounterMetricFamily("partwise_steps", "Steps of the engine.", stats["steps"])
        yield _by_position("drafted_tokens", "Tokens drafted, by place in the draft.", stats["drafted"])
        yield _by_position("accepted_tokens", "Drafted tokens accepted, by place in the draft.", stats["accepted"])
        yield _labelled_counter("seam_seconds", "Time spent in each seam.", "seam", stats["seconds"])


def _kv(groups: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
    pages = GaugeMetricFamily("partwise_kv_pages", "Pages by group and state.", labels=["group", "state"])
    used = GaugeMetricFamily("partwise_kv_bytes", "Bytes by group and state.", labels=["group", "state"])
    usage = GaugeMetricFamily("partwise_kv_usage_ratio", "Share of the pages that sequences hold.", labels=["group"])
    for group, values in groups.items():
        for state in ("free", "held", "cached"):
            pages.add_metric([group, state], values[state])
        for state in ("total", "used", "reserved"):
            used.add_metric([group, state], values[f"{state}_bytes"])
        usage.add_metric([group], values["held"] / max(1, values["pages"]))
    return pages, used, usage


def _by_position(name: str, help: str, counts: Sequence[int]) -> Metric:
    return _labelled_counter(name, help, "position", {str(place): count for place, count in enumerate(counts)})


def _labelled_counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"partwise_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

"""The engine's figures for Prometheus: an observer in the engine's process counts what happens, and what is a state is
asked for at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from core.hooks import hookimpl
from core.types import FinishReason, Request

_BATCH: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)


class EngineMetrics:
    """An observer (core.hooks) that keeps counters of all it is told."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._state = _State()
        self._registry.register(self._state)
        self._parts = self._counter("part_loads", "Parts of the recipe.", ("seam", "name", "distribution", "version"))
        self._requests = self._counter("requests", "Requests that joined the queue.")
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of accepted prompts.")
        self._first_token = self._histogram(
            "engine_first_token_seconds", "Arrival to a choice's first token.", _SECONDS
        )
        self._finished = self._counter("choices_finished", "Choices by how the engine ended them.", ("reason",))
        for reason in get_args(FinishReason):
            self._finished.labels(reason)
        self._steps = self._counter("steps", "Steps of the engine.")
        self._batch = self._histogram("batch_size", "Sequences computed in a step.", _BATCH)
        self._computed = self._counter("computed_tokens", "Tokens that went through the model, drafted ones included.")
        self._generated = self._counter("generation_tokens", "Tokens generated.")
        self._preemptions = self._counter("preemptions", "Sequences put back to waiting.")
        self._lost = self._counter("preempted_tokens", "Tokens to compute again after a preemption.")
        self._evicted = self._counter("evicted_pages", "Pages that the prefix cache gave up.")

    def text(self, stats: Mapping[str, Any]) -> bytes:
        """The exposition format, version 0.0.4, with the state that `stats` (Engine.stats) tells."""
        self._state.stats = stats
        return generate_latest(self._registry)

    @hookimpl
    def on_plugin_loaded(self, seam: str, name: str, distribution: str, version: str) -> None:
        self._parts.labels(seam, name, distribution, version).inc()

    @hookimpl
    def on_request_added(self, request: Request) -> None:
        self._requests.inc()
        self._prompt_tokens.inc(len(request.prompt))

    @hookimpl
    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    @hookimpl
    def on_request_finished(self, reason: FinishReason) -> None:
        self._finished.labels(reason).inc()

    @hookimpl
    def on_step(self, stats: Mapping[str, Any]) -> None:
        self._steps.inc()
        self._batch.observe(stats["batch_size"])
        self._computed.inc(stats["tokens"])
        self._generated.inc(stats["generated"])

    @hookimpl
    def on_preempted(self, computed_tokens: int) -> None:
        self._preemptions.inc()
        self._lost.inc(computed_tokens)

    @hookimpl
    def on_evicted(self, pages: int) -> None:
        self._evicted.inc(pages)

    def _counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"partwise_{name}", help, labels, registry=self._registry)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"partwise_{name}", help, buckets=buckets, registry=self._registry)


class _State:
    """The engine's queues and memory, and the books that its parts keep themselves."""

    def __init__(self) -> None:
        self.stats: Mapping[str, Any] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self.stats
        yield GaugeMetricFamily("partwise_requests_running", "Sequences in the batch.", stats["running"])
        yield GaugeMetricFamily("partwise_requests_waiting", "Sequences in the queue.", stats["waiting"])
        yield from _kv(stats["kv"])
        cache = stats["prefix_cache"]
        yield CounterMetricFamily("partwise_prefix_cache_query_tokens", "Tokens looked up.", cache["lookup_tokens"])
        yield CounterMetricFamily("partwise_prefix_cache_hit_tokens", "Tokens found.", cache["hit_tokens"])
        yield _labelled_counter(
            "scheduler", "What the scheduler counts of itself.", "count", stats.get("scheduler", {})
        )
        yield _by_position("drafted_tokens", "Tokens drafted, by place in the draft.", stats["drafted"])
        yield _by_position("accepted_tokens", "Drafted tokens accepted, by place in the draft.", stats["accepted"])
        yield _labelled_counter("seam_seconds", "Time spent in each seam.", "seam", stats["seconds"])


def _kv(groups: Mapping[str, Mapping[str, int]]) -> Iterable[Metric]:
    pages = GaugeMetricFamily("partwise_kv_pages", "Pages by group and state.", labels=["group", "state"])
    used = GaugeMetricFamily("partwise_kv_bytes", "Bytes by group and state.", labels=["group", "state"])
    usage = GaugeMetricFamily("partwise_kv_usage_ratio", "Share of the pages that sequences hold.", labels=["group"])
    copied = CounterMetricFamily(
        "partwise_kv_host_pages_copied", "Pages moved to the host tier and back.", labels=["group", "direction"]
    )
    for group, values in groups.items():
        for state in ("free", "held", "cached", "host_held", "host_cached"):
            if state in values:
                pages.add_metric([group, state], values[state])
        for state in ("total", "used", "reserved", "host_total", "host_used"):
            if f"{state}_bytes" in values:
                used.add_metric([group, state], values[f"{state}_bytes"])
        for direction in ("out", "in"):
            copied.add_metric([group, direction], values.get(f"host_pages_{direction}", 0))
        usage.add_metric([group], values["held"] / max(1, values["pages"]))
    return pages, used, usage, copied


def _by_position(name: str, help: str, counts: Sequence[int]) -> Metric:
    return _labelled_counter(name, help, "position", {str(place): count for place, count in enumerate(counts)})


def _labelled_counter(name: str, help: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"partwise_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family

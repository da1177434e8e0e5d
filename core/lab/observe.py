"""What can be seen of an arm from outside while it runs: memory, its own counters, energy."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import psutil

from core.lab import energy
from core.lab.hosts import Host

PERIOD_S = 0.5

COUNTERS = {"preemptions": "partwise_preemptions_total"}
SHARES = {
    "acceptance": ("partwise_accepted_tokens_total", "partwise_drafted_tokens_total"),
    "prefix_hit_rate": ("partwise_prefix_cache_hit_tokens_total", "partwise_prefix_cache_query_tokens_total"),
}
KV_GAUGE = "partwise_kv_bytes"
KV_USED = ",used}"
SEAM_SECONDS = "partwise_seam_seconds_total"


class Watch:
    """Samples a host from `start()` to `seen()`; one thread, twice a second."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._pid = host.pid
        self._told: Mapping[str, float] = {}
        self._memory: list[float] = []
        self._kv: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._before: Mapping[str, float] = {}
        self._energy: Mapping[str, energy.Reading] = {}

    def heard(self, pid: int, counters: Mapping[str, float]) -> None:
        """What an engine in the load generator's process tells of itself."""
        self._pid, self._told = pid, counters

    def start(self) -> None:
        self._before = self._snapshot()
        self._energy = energy.read()
        self._thread.start()

    def stop(self) -> None:
        """Ends the sampling; harmless when it never started or has ended."""
        self._over.set()

    def seen(self) -> tuple[dict[str, float], dict[str, float]]:
        """Stops, and says what was seen, by the names in `metrics.METRICS`; and the seconds by seam."""
        self.stop()
        self._thread.join()
        after = self._snapshot()
        values = _stated("memory_bytes", self._memory) | _stated("kv_bytes", self._kv)
        values |= differences(self._before, after)
        used = energy.joules(self._energy, energy.read())
        if used is not None and self._pid is not None:
            values["energy_j"] = used
        return values, seam_seconds(self._before, after)

    def _snapshot(self) -> Mapping[str, float]:
        return self._host.snapshot() or self._told

    def _sample(self) -> None:
        while True:
            if self._pid is not None and (held := resident_bytes(self._pid)):
                self._memory.append(held)
            self._kv += kv_bytes(self._snapshot())
            if self._over.wait(PERIOD_S):
                return


def _stated(name: str, samples: list[float]) -> dict[str, float]:
    if not samples:
        return {}
    return {f"{name}_peak": max(samples), f"{name}_mean": sum(samples) / len(samples)}


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Counters between two snapshots: plain ones, and shares of one in another."""

    def grown(name: str) -> float | None:
        return after[name] - before.get(name, 0.0) if name in after else None

    values = {}
    for metric, counter in COUNTERS.items():
        change = grown(counter)
        if change is not None:
            values[metric] = change
    for metric, (part, whole) in SHARES.items():
        some, every = grown(part), grown(whole)
        if some is not None and every:
            values[metric] = some / every
    return values


def kv_bytes(snapshot: Mapping[str, float]) -> list[float]:
    """Bytes of KV that hold tokens, all groups together; an empty list when the engine does not say."""
    used = [v for name, v in snapshot.items() if name.startswith(KV_GAUGE) and name.endswith(KV_USED)]
    return [sum(used)] if used else []


def seam_seconds(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds spent in each seam between two snapshots."""
    start = f"{SEAM_SECONDS}{{"
    grown = {name: after[name] - before.get(name, 0.0) for name in after if name.startswith(start)}
    return {name[len(start) : -1]: seconds for name, seconds in grown.items()}


def resident_bytes(pid: int) -> float:
    """Memory that a process and its children hold, what they share counted once if the system tells."""
    try:
        root = psutil.Process(pid)
        return float(sum(_own(p) for p in [root, *root.children(recursive=True)]))
    except psutil.NoSuchProcess:
        return 0.0


def _own(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except psutil.NoSuchProcess:
        return 0
    except psutil.AccessDenied:
        return int(process.memory_info().rss)

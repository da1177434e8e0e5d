"""By the priority of who uses it."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy


class PriorityEviction(EvictionPolicy):
    """Entries that only requests of a high priority number use go first, each class by the last use."""

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (-entry.priority, entry.last_used)

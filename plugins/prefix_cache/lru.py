"""Least recently used goes first."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """By the time of the last use."""

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.last_used,)

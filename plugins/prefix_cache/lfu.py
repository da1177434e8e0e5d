"""Least frequently used goes first."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy


class LeastFrequentlyUsed(EvictionPolicy):
    """By the number of matches, then by the last."""

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.uses, entry.last_used)

"""First in, first out."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy


class FirstInFirstOut(EvictionPolicy):
    """By age, whatever its use."""

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.created,)

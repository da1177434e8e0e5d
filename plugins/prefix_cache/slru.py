"""Segmented LRU: what was never used again goes first."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy
from plugins.prefix_cache import SegmentedOptions


class SegmentedLRU(EvictionPolicy):
    """Entries on probation before protected ones, each by the last use, so that a long scan does not push out what is
    in use."""

    options: SegmentedOptions

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.uses >= self.options.protected_uses, entry.last_used)

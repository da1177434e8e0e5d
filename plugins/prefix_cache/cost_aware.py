"""By what it costs to compute again."""

from __future__ import annotations

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy
from plugins.prefix_cache import CostAwareOptions


class CostAwareEviction(EvictionPolicy):
    """Uses and cost per byte, on top of recency, in the manner of GreedyDual-Size-Frequency (Cherkasova, 1998).

    A token costs its linear layers, and attention over all before it; its bytes are the same anywhere. So a page deep
    in a context is worth more than one at its start.
    """

    options: CostAwareOptions

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        context = entry.depth_tokens + entry.tokens / 2
        cost = 1 + context / self.options.attention_tokens
        return (entry.last_used + self.options.horizon * (1 + entry.uses) * cost,)

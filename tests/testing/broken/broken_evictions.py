"""Eviction policies that are wrong in one way each."""

import math
import random

from core.interfaces import CacheEntry, EvictionPolicy, PluginInfo


class Right(EvictionPolicy):
    """Least recently used; the ones below change one thing of it."""

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.last_used, -entry.depth_tokens)


class RollsDice(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (random.random(),)


class CountsItsOwnCalls(Right):
    calls = 0

    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        self.calls += 1
        return (self.calls, *super().key(entry))


class DividesByUses(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.last_used / entry.uses if entry.uses else math.nan,)


class MarksTheEntry(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        entry.uses += 1
        return super().key(entry)


class GivesANumber(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return float(entry.last_used)  # type: ignore[return-value]


class GivesUnlikeLengths(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.last_used,) if entry.uses else (entry.last_used, 1.0)


class LikesAllTheSame(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (0.0,)


class ThinksForLong(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        return (entry.last_used, float(sum(range(20_000)) > 0))


class FailsInTheLongRun(Right):
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        if entry.created > 25:
            raise OverflowError("a table of 25 entries is full")
        return super().key(entry)


BROKEN = {
    RollsDice: {"l1_keys_stay_until_the_entry_changes"},
    CountsItsOwnCalls: {"l1_keys_stay_until_the_entry_changes"},
    DividesByUses: {"l1_keys_are_tuples_of_numbers"},
    MarksTheEntry: {"l1_entries_are_not_changed"},
    GivesANumber: {"l1_keys_are_tuples_of_numbers"},
    GivesUnlikeLengths: {"l1_keys_are_tuples_of_numbers"},
    LikesAllTheSame: {"l2_tells_entries_apart"},
    ThinksForLong: {"l4_cost"},
    FailsInTheLongRun: {"l2_every_cache_works_with_it", "l2_serves_every_request"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="prefix_cache.eviction",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

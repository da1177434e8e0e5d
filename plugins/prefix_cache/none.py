"""No prefix cache: every prompt is computed anew."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.plugin import CacheContext, Options
from core.interfaces.prefix_cache import Insertion, PrefixCache
from core.types import Match


class NoPrefixCache(PrefixCache):
    """Matches nothing and keeps nothing."""

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        self._locks = 0

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(tokens)
        return Match(())

    def lock(self, match: Match) -> None:
        self._locks += 1

    def unlock(self, match: Match) -> None:
        if not self._locks:
            raise ValueError("unlock without a lock before it")
        self._locks -= 1

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        return Insertion((), Match(()))

    def evict(self, n_pages: int) -> list[int]:
        return []

    @property
    def n_pages(self) -> int:
        return 0

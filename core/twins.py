"""Cost twins: a part that does all its work and gives none of its benefit, so that cost and gain can be told apart.

In a study three arms stand beside each other: the null part, the twin, and the part. The twin against the null part is
what the part's own work costs; the part against its twin is what it gives for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from core.interfaces import CacheContext, Drafter, Insertion, PrefixCache
from core.types import Draft, DraftView, Match


class UnusedPrefixCache(PrefixCache):
    """Looks up, inserts, locks and evicts as the real one does, and never lets a prefix be used.

    What it keeps takes memory, as in the real one, and is given up under the same pressure.
    """

    def __init__(self, real: PrefixCache) -> None:
        super().__init__(real.options, CacheContext(**{**vars(real.context), "eviction": real.eviction}))
        self.real = real

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        found = self.real.match(tokens, salt)
        self._count()
        return Match((), found)

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        self.real.peek(tokens, salt)
        return 0

    def lock(self, match: Match) -> None:
        self.real.lock(match.handle)

    def unlock(self, match: Match) -> None:
        self.real.unlock(match.handle)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        insertion = self.real.insert(tokens, pages, salt)
        self._count()
        return Insertion(insertion.adopted, Match((), insertion.match))

    def evict(self, n_pages: int) -> list[int]:
        gone = self.real.evict(n_pages)
        self._count()
        return gone

    def prioritize(self, match: Match, priority: int) -> None:
        self.real.prioritize(match.handle, priority)

    @property
    def n_pages(self) -> int:
        return self.real.n_pages

    def _count(self) -> None:
        self.stats = replace(self.real.stats, hit_tokens=0)


class UnusedDrafter(Drafter):
    """Drafts as the real one does, and throws the drafts away. What verifying them costs is on the side of the gain:
    only together do verification and acceptance decide whether drafts are worth their tokens."""

    def __init__(self, real: Drafter) -> None:
        super().__init__(real.options, real.context)
        self.real = real

    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        return [Draft() for _ in self.real.propose(views)]

    def forget(self, id: str) -> None:
        self.real.forget(id)


TWINS: Final[dict[str, Callable[[Any], Any]]] = {"prefix_cache": UnusedPrefixCache, "drafter": UnusedDrafter}
"""The seams that have a twin, and what makes it from a part that is built already."""

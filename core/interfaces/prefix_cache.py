"""The prefix-cache seam: which tokens are computed already."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from core.interfaces.plugin import CacheContext, Options, Part
from core.types import Match


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` did. `adopted`: the pages it now keeps, of those given; `match`: the prefix as it now lies in
    the cache, to be locked instead of the one before."""

    adopted: tuple[int, ...]
    match: Match


@dataclass(slots=True)
class PrefixStats:
    """Counts since the start. `hit_tokens` counts what matches returned."""

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    inserted_pages: int = 0
    evicted_pages: int = 0


class PrefixCache(Part[Options], ABC):
    """An index from tokens to the pages that hold them. It never touches memory: the core holds a reference for each
    page that `insert` adopts and gives it back for each page that `evict` returns.

    Only whole pages enter, and only once their tokens are computed. Prefixes under different salts never meet.
    """

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        self.page_size = context.page_size
        self.eviction = context.eviction
        self.stats = PrefixStats()

    @abstractmethod
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        """The longest cached prefix in whole pages. Does not lock it."""

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        """How many tokens `match` would find. Not a use, where a cache can tell: overridden to leave no trace."""
        return len(self.match(tokens, salt).pages) * self.page_size

    @abstractmethod
    def lock(self, match: Match) -> None:
        """Keep the matched pages from eviction until `unlock`; locks count."""

    @abstractmethod
    def unlock(self, match: Match) -> None:
        """Undo one `lock`. ValueError: it is not locked."""

    @abstractmethod
    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        """Offer `pages`, which hold `tokens` (len(pages) * page_size of them). What is cached already stays as it
        is, and its page of those offered is not adopted."""

    @abstractmethod
    def evict(self, n_pages: int) -> list[int]:
        """Give up at least `n_pages` unlocked pages if there are as many, best first to lose, and return them."""

    def prioritize(self, match: Match, priority: int) -> None:
        """A request of this priority, the lower the better, uses the matched pages. For eviction policies that ask
        for it; by default it is not kept."""
        return None

    @property
    @abstractmethod
    def n_pages(self) -> int:
        """Pages it keeps."""


class EvictionPolicy(Part[Options], ABC):
    """Which of the entries that may go goes first: the one of the lowest key."""

    @abstractmethod
    def key(self, entry: CacheEntry) -> tuple[float, ...]:
        """Ordered by value; recomputed whenever an entry changes."""


@dataclass(slots=True)
class CacheEntry:
    """What an eviction policy may know of an entry. Times are counts of cache operations, not seconds."""

    created: int
    last_used: int
    uses: int = 0
    depth_tokens: int = 0
    tokens: int = 0
    priority: int = 0

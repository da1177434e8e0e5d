"""What prefix caches that keep pages in trees share: locks, counts, priorities, and who may go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from core.interfaces.eviction import GONE, EvictionQueue
from core.interfaces.plugin import CacheContext, Options
from core.interfaces.prefix_cache import CacheEntry, Insertion, PrefixCache
from core.types import Match


class PageNode(ABC):
    """Some pages that follow those of `parent`. A node that has left the cache has none."""

    __slots__ = ("entry", "locks", "pages", "parent", "stamp")

    pages: list[int]
    parent: Self | None
    entry: CacheEntry
    locks: int
    stamp: int

    def __init__(self, pages: list[int], parent: Self | None, entry: CacheEntry) -> None:
        self.pages = pages
        self.parent = parent
        self.entry = entry
        self.locks = 0
        self.stamp = GONE

    @property
    @abstractmethod
    def is_leaf(self) -> bool:
        """Whether no cached page follows its own."""


NodeT = TypeVar("NodeT", bound=PageNode)


class PageTreeCache(PrefixCache, Generic[NodeT]):
    """A match ends with a node. Locking that node keeps all before it, since only leaves are evicted."""

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        if context.eviction is None:
            raise ValueError("this cache needs an eviction policy; set prefix_cache.eviction")
        self.queue: EvictionQueue[NodeT] = EvictionQueue(context.eviction)
        self.time = 0

    @abstractmethod
    def find(self, tokens: Sequence[int], salt: str) -> list[NodeT]:
        """The nodes that hold the prefix to give, from the first on."""

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        path = self.find(tokens, salt)
        self._touch(path, uses=1)
        found = _match(path)
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(tokens)
        self.stats.hit_tokens += len(found.pages) * self.page_size
        return found

    def lock(self, match: Match) -> None:
        node: NodeT | None = match.handle
        if node is None:
            return
        if node.pages[-1:] != list(match.pages[-1:]):
            raise ValueError("this match was evicted before it was locked; match again")
        node.locks += 1
        self.queue.withdraw(node)

    def unlock(self, match: Match) -> None:
        node: NodeT | None = match.handle
        if node is None:
            return
        if not node.locks:
            raise ValueError("unlock without a lock before it")
        node.locks -= 1
        self.offer(node)

    def prioritize(self, match: Match, priority: int) -> None:
        node: NodeT | None = match.handle
        while node is not None:
            node.entry.priority = min(node.entry.priority, priority)
            node = node.parent
        if match.handle is not None:
            self.offer(match.handle)

    def inserted(self, path: list[NodeT], adopted: Sequence[int]) -> Insertion:
        """What `insert` returns when `path` holds what was offered and `adopted` of it is new."""
        self._touch(path)
        self.stats.inserted_pages += len(adopted)
        return Insertion(tuple(adopted), _match(path))

    def offer(self, node: NodeT) -> None:
        """It may go, if nothing follows it and nobody holds it."""
        if node.pages and not node.locks and node.is_leaf:
            self.queue.offer(node)

    def _touch(self, path: list[NodeT], uses: int = 0) -> None:
        self.time += 1
        for node in path:
            node.entry.last_used = self.time
            node.entry.uses += uses
        if path:
            self.offer(path[-1])


def _match(path: Sequence[PageNode]) -> Match:
    return Match(tuple(page for node in path for page in node.pages), path[-1] if path else None)

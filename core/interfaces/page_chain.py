"""What prefix caches by hash share: pages chained by the digest of all tokens up to their end."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from core.interfaces.eviction import GONE, EvictionQueue, new_entry
from core.interfaces.plugin import CacheContext, Options
from core.interfaces.prefix_cache import CacheEntry, Insertion, PrefixCache
from core.types import Match


class PageNode:
    """One cached page. `children`: cached pages that continue it; one with any is not evicted before them. `ends`:
    tokens that were inserted end with it."""

    __slots__ = ("children", "digest", "ends", "entry", "locks", "page", "parent", "stamp")

    def __init__(self, digest: bytes, page: int, parent: PageNode | None, entry: CacheEntry) -> None:
        self.digest = digest
        self.page = page
        self.parent = parent
        self.entry = entry
        self.children = 0
        self.ends = False
        self.locks = 0
        self.stamp = GONE


class PageChainCache(PrefixCache):
    """A chain of SHA-256 digests: a page's covers its tokens and the digest before it, the first one's the salt.

    Locking the last page of a match keeps all before it, since only a page without a cached successor is evicted.
    """

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        if context.eviction is None:
            raise ValueError("this cache needs an eviction policy; set prefix_cache.eviction")
        self._nodes: dict[bytes, PageNode] = {}
        self._queue: EvictionQueue[PageNode] = EvictionQueue(context.eviction)
        self._time = 0

    @abstractmethod
    def hit(self, path: list[PageNode], n_pages: int) -> list[PageNode]:
        """What to give of `path`, the cached pages that the `n_pages` asked for begin with."""

    def is_of_use(self, node: PageNode) -> bool:
        """Whether a page is worth keeping though nothing continues it any more."""
        return True

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        path = self._hit(tokens, salt)
        self._touch(path, uses=1)
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(tokens)
        self.stats.hit_tokens += len(path) * self.page_size
        return _match(path)

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        return len(self._hit(tokens, salt)) * self.page_size

    def lock(self, match: Match) -> None:
        node: PageNode | None = match.handle
        if node is None:
            return
        if self._nodes.get(node.digest) is not node:
            raise ValueError("this match was evicted before it was locked; match again")
        node.locks += 1
        self._queue.withdraw(node)

    def unlock(self, match: Match) -> None:
        node: PageNode | None = match.handle
        if node is None:
            return
        if not node.locks:
            raise ValueError("unlock without a lock before it")
        node.locks -= 1
        self._offer(node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        path: list[PageNode] = []
        adopted = []
        self._time += 1
        for digest, page in zip(self._digests(tokens, salt), pages, strict=False):
            node = self._nodes.get(digest)
            if node is None:
                node = self._add(digest, page, path[-1] if path else None, len(path))
                adopted.append(page)
            path.append(node)
        if path:
            path[-1].ends = True
        self._touch(path)
        self.stats.inserted_pages += len(adopted)
        return Insertion(tuple(adopted), _match(path))

    def prioritize(self, match: Match, priority: int) -> None:
        node: PageNode | None = match.handle
        while node is not None:
            node.entry.priority = min(node.entry.priority, priority)
            node = node.parent
        self._offer(match.handle)

    def evict(self, n_pages: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < n_pages and (node := self._queue.pop()) is not None:
            self._remove(node, gone)
        self.stats.evicted_pages += len(gone)
        return gone

    @property
    def n_pages(self) -> int:
        return len(self._nodes)

    def _add(self, digest: bytes, page: int, parent: PageNode | None, depth: int) -> PageNode:
        size = self.page_size
        entry = new_entry(self._time, depth * size, size)
        node = self._nodes[digest] = PageNode(digest, page, parent, entry)
        if parent is not None:
            parent.children += 1
            self._queue.withdraw(parent)
        self._offer(node)
        return node

    def _remove(self, node: PageNode, gone: list[int]) -> None:
        """Take a leaf out, and the pages before it that are of no use without it."""
        while True:
            del self._nodes[node.digest]
            gone.append(node.page)
            if node.parent is None:
                return
            node = node.parent
            node.children -= 1
            if node.children or node.locks or self.is_of_use(node):
                self._offer(node)
                return

    def _hit(self, tokens: Sequence[int], salt: str) -> list[PageNode]:
        return self.hit(self._path(tokens, salt), len(tokens) // self.page_size)

    def _path(self, tokens: Sequence[int], salt: str) -> list[PageNode]:
        path = []
        for digest in self._digests(tokens, salt):
            node = self._nodes.get(digest)
            if node is None:
                break
            path.append(node)
        return path

    def _digests(self, tokens: Sequence[int], salt: str) -> Iterator[bytes]:
        digest = sha256(salt.encode("utf-8", "surrogatepass")).digest()
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            digest = sha256(digest + array("q", tokens[end - self.page_size : end]).tobytes()).digest()
            yield digest

    def _touch(self, path: list[PageNode], uses: int = 0) -> None:
        self._time += 1
        for node in path:
            node.entry.last_used = self._time
            node.entry.uses += uses
        if path:
            self._offer(path[-1])

    def _offer(self, node: PageNode | None) -> None:
        if node is not None and not node.locks and not node.children:
            self._queue.offer(node)


def _match(path: list[PageNode]) -> Match:
    return Match(tuple(node.page for node in path), path[-1] if path else None)

"""What prefix caches by hash share: pages chained by the digest of all tokens up to their end."""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from core.interfaces.eviction import new_entry
from core.interfaces.page_tree import PageNode, PageTreeCache
from core.interfaces.plugin import CacheContext, Options
from core.interfaces.prefix_cache import CacheEntry, Insertion


class ChainedPage(PageNode):
    """One cached page. `children`: cached pages that continue it. `ends`: tokens that were inserted end with it."""

    __slots__ = ("children", "digest", "ends")

    def __init__(self, digest: bytes, page: int, parent: ChainedPage | None, entry: CacheEntry) -> None:
        super().__init__([page], parent, entry)
        self.digest = digest
        self.children = 0
        self.ends = False

    @property
    def is_leaf(self) -> bool:
        return not self.children


class PageChainCache(PageTreeCache[ChainedPage]):
    """A chain of SHA-256 digests: a page's covers its tokens and the digest before it, the first one's the salt."""

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        self._nodes: dict[bytes, ChainedPage] = {}

    @abstractmethod
    def hit(self, path: list[ChainedPage], n_pages: int) -> list[ChainedPage]:
        """What to give of `path`, the cached pages that the `n_pages` asked for begin with."""

    def is_of_use(self, node: ChainedPage) -> bool:
        """Whether a page is worth keeping though nothing continues it any more."""
        return True

    def find(self, tokens: Sequence[int], salt: str) -> list[ChainedPage]:
        path = []
        for digest in self._digests(tokens, salt):
            node = self._nodes.get(digest)
            if node is None:
                break
            path.append(node)
        return self.hit(path, len(tokens) // self.page_size)

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        return len(self.find(tokens, salt)) * self.page_size

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        path: list[ChainedPage] = []
        adopted = []
        self.time += 1
        for digest, page in zip(self._digests(tokens, salt), pages, strict=False):
            node = self._nodes.get(digest)
            if node is None:
                node = self._add(digest, page, path[-1] if path else None, len(path))
                adopted.append(page)
            path.append(node)
        if path:
            path[-1].ends = True
        return self.inserted(path, adopted)

    def evict(self, n_pages: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < n_pages and (node := self.queue.pop()) is not None:
            self._remove(node, gone)
        self.stats.evicted_pages += len(gone)
        return gone

    @property
    def n_pages(self) -> int:
        return len(self._nodes)

    def _add(self, digest: bytes, page: int, parent: ChainedPage | None, depth: int) -> ChainedPage:
        size = self.page_size
        entry = new_entry(self.time, depth * size, size)
        node = self._nodes[digest] = ChainedPage(digest, page, parent, entry)
        if parent is not None:
            parent.children += 1
            self.queue.withdraw(parent)
        self.offer(node)
        return node

    def _remove(self, node: ChainedPage, gone: list[int]) -> None:
        """Take a leaf out, and the pages before it that are of no use without it."""
        while True:
            del self._nodes[node.digest]
            gone.append(node.pages.pop())
            if node.parent is None:
                return
            node = node.parent
            node.children -= 1
            if node.children or node.locks or self.is_of_use(node):
                self.offer(node)
                return

    def _digests(self, tokens: Sequence[int], salt: str) -> Iterator[bytes]:
        digest = salt_digest(salt)
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            digest = page_digest(digest, tokens[end - self.page_size : end])
            yield digest


def salt_digest(salt: str) -> bytes:
    """What a chain of digests begins with."""
    return sha256(salt.encode("utf-8", "surrogatepass")).digest()


def page_digest(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page that holds `tokens` after the page, or the salt, whose digest is `before`."""
    return sha256(before + array("q", tokens).tobytes()).digest()

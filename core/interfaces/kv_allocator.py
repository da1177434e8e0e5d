"""The allocator seam: which page holds which token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from pydantic import PositiveInt

from core.interfaces.plugin import Options, Part, PoolContext
from core.types import KVGroup, KVStats


class AllocatorOptions(Options):
    """`page_size` in tokens."""

    page_size: PositiveInt = 16


class KVAllocator(Part[AllocatorOptions], ABC):
    """Hands out the pages of one KV group, numbered 0 to `n_pages - 1`, and counts their references.

    A page handed out has one reference; `share` adds one, `free` takes one, and at none the page is free again.
    The core owns the page lists: an allocator neither keeps nor changes a list it was given. Pages are handed out
    and freed between steps, never during one.
    """

    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        if context.n_pages < 1:
            raise ValueError(f"a pool needs at least one page, not {context.n_pages}")
        self.n_pages = context.n_pages
        self.page_size = context.page_size
        self.page_bytes = context.page_bytes

    @classmethod
    def regroup(cls, groups: Sequence[KVGroup]) -> Sequence[KVGroup]:
        """The KV groups that it wants pools for, out of those of the attention structure; it is then built once for
        each. Each KV head of each layer lies in exactly one, groups without a window come first, and names differ.
        The default takes them as they are."""
        return groups

    @abstractmethod
    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        """Pages for a sequence that needs `n_tokens` now and may grow to `upper_bound`, in order; possibly more than
        `n_tokens` need. None: no room now. ValueError: more than the whole pool holds."""

    @abstractmethod
    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        """The further pages with which `pages` hold `n_tokens` in all; [] if they do already. None: no room now."""

    @abstractmethod
    def share(self, pages: Iterable[int]) -> None:
        """One more reference to each page. ValueError: a page that is free or not of this pool."""

    @abstractmethod
    def free(self, pages: Iterable[int]) -> None:
        """One reference less to each page. ValueError: a page that is free or not of this pool."""

    @abstractmethod
    def references(self, page: int) -> int:
        """How many hold the page; 0: it is free."""

    @property
    @abstractmethod
    def n_free(self) -> int:
        """Pages without a reference."""

    @property
    def host(self) -> KVAllocator | None:
        """A second tier in host memory, with page numbers of its own, to which the core may move a preempted
        sequence's pages and those that leave the prefix cache, and from which it moves them back. None: what is
        preempted is computed again."""
        return None

    def external_waste(self, n_pages: int) -> int:
        """Free pages that a request for `n_pages` could not get, though as many are free. 0 where any page will do."""
        return 0

    def stats(self, used_tokens: int = 0) -> KVStats:
        """The accounting in bytes, of `used_tokens` tokens that the core has written to held pages."""
        token_bytes = self.page_bytes / self.page_size
        held = (self.n_pages - self.n_free) * self.page_bytes
        used = min(held, int(used_tokens * token_bytes))
        return KVStats(
            total=self.n_pages * self.page_bytes,
            used=used,
            reserved=held - used,
            internal_waste=held - used,
            external_waste=self.external_waste(1) * self.page_bytes,
        )


class CountedPages(KVAllocator):
    """The reference counting that allocators share; a subclass decides only which free pages to take."""

    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        self._references = [0] * self.n_pages
        self._n_free = self.n_pages

    def take(self, pages: Sequence[int]) -> list[int]:
        """Mark free pages as handed out."""
        for page in pages:
            self._references[page] = 1
        self._n_free -= len(pages)
        return list(pages)

    def released(self, page: int) -> None:
        """Called as a page loses its last reference, for subclasses that keep a list of free pages."""

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._held(page)
            self._references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._held(page)
            self._references[page] -= 1
            if not self._references[page]:
                self._n_free += 1
                self.released(page)

    def references(self, page: int) -> int:
        return self._references[page]

    @property
    def n_free(self) -> int:
        return self._n_free

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def _held(self, page: int) -> None:
        if not 0 <= page < self.n_pages or not self._references[page]:
            raise ValueError(f"page {page} is not held (the pool has pages 0 to {self.n_pages - 1})")

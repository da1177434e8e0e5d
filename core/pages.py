"""One KV group's pages, with references counted beside the allocator."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequence_

from core.clock import Clock
from core.interfaces.kv_allocator import KVAllocator
from core.kv import Pool
from core.types import PartFault


class Pages:
    """One KV group's pages: the allocator, watched."""

    def __init__(self, allocator: KVAllocator, pool: Pool, label: str, clock: Clock) -> None:
        self.allocator = allocator
        self.pool = pool
        self.window = pool.group.window
        self.page_size = pool.page_size
        self.label = label
        self._clock = clock
        self.references = [0] * pool.n_pages
        self.n_held = 0

    @property
    def n_pages(self) -> int:
        return self.pool.n_pages

    def allocate(self, n_tokens: int, upper_bound: int) -> list[int] | None:
        with self._clock.part("kv_allocator", self.label):
            pages = self.allocator.allocate(n_tokens, upper_bound=upper_bound)
        return self._taken(pages, n_tokens, 0)

    def extend(self, pages: Sequence_[int], n_tokens: int) -> list[int] | None:
        with self._clock.part("kv_allocator", self.label):
            more = self.allocator.extend(tuple(pages), n_tokens)
        return self._taken(more, n_tokens, len(pages))

    def share(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        with self._clock.part("kv_allocator", self.label):
            self.allocator.share(pages)
        for page in pages:
            self.references[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        pages = list(pages)
        with self._clock.part("kv_allocator", self.label):
            self.allocator.free(pages)
        for page in pages:
            self.references[page] -= 1
            self.n_held -= not self.references[page]

    def check(self, holders: Iterable[int], name: str) -> None:
        """PartFault unless references are `holders`, a page for each, and what is not held is free."""
        held = [0] * self.n_pages
        for page in holders:
            held[page] += 1
        if held != self.references:
            wrong = next(page for page in range(self.n_pages) if held[page] != self.references[page])
            counted = self.references[wrong]
            raise PartFault(f"group {name}: page {wrong} has {counted} references, but {held[wrong]} holders")
        n_free = self.allocator.n_free
        if n_free + self.n_held != self.n_pages:
            raise PartFault(f"group {name}: {n_free} free and {self.n_held} held pages of {self.n_pages}")

    def _taken(self, pages: list[int] | None, n_tokens: int, had: int) -> list[int] | None:
        if pages is None:
            return None
        if not isinstance(pages, list):
            raise PartFault(f"{self.label} returned a {type(pages).__name__} where a list of pages belongs")
        if (had + len(pages)) * self.page_size < n_tokens:
            raise PartFault(f"{self.label} gave {had + len(pages)} pages where {n_tokens} tokens need more")
        for page in pages:
            if not 0 <= page < self.n_pages or self.references[page]:
                raise PartFault(f"{self.label} handed out page {page}, which is held already or not of the pool")
            self.references[page] = 1
        self.n_held += len(pages)
        return pages

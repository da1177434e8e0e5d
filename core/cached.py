"""The prefix cache with what the core knows of its pages: whose tokens they hold, and their twins in other groups."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from core.clock import Clock
from core.interfaces.prefix_cache import PrefixCache
from core.pages import Pages
from core.prefixes import page_digests
from core.sequence import PageTable, Sequence
from core.types import Match, PartFault

log = logging.getLogger("partwise")


@dataclass(slots=True)
class CachedPage:
    """What is kept with one page of the first group: the same tokens' pages in the other groups, and a digest of salt
    and tokens up to its end, so that a page is never served for other tokens than its own."""

    digest: bytes
    others: list[int | None]


class CachedPages:
    """The books beside a prefix cache, which itself sees pages of the first group only. `leaves` is told the digest
    and the pages, by group, of what is given up, before they are freed."""

    def __init__(
        self,
        groups: list[Pages],
        cache: PrefixCache,
        *,
        label: str,
        clock: Clock,
        on_evicted: Callable[[int], None],
        leaves: Callable[[bytes, list[int | None]], None] | None,
    ) -> None:
        self.groups = groups
        self.cache = cache
        self.page_size = groups[0].page_size
        self.pages: dict[int, CachedPage] = {}
        self.label = label
        self._clock = clock
        self._on_evicted = on_evicted
        self._leaves = leaves
        self._strippable: list[OrderedDict[int, None]] = [OrderedDict() for _ in groups]

    def match(self, seq: Sequence) -> Match:
        """The longest cached prefix. PartFault: it is not one."""
        with self._clock.part("prefix_cache", self.label):
            match = self.cache.match(seq.tokens, seq.request.cache_salt)
        self._check(match, seq)
        for strippable in self._strippable:
            for page in match.pages if strippable else ():
                if page in strippable:
                    strippable.move_to_end(page)
        return match

    def peek(self, seq: Sequence) -> int:
        """How many pages a match would have; 0 if the cache cannot say. Changes nothing."""
        try:
            with self._clock.part("prefix_cache", self.label):
                return self.cache.peek(seq.tokens, seq.request.cache_salt) // self.page_size
        except PartFault as fault:
            log.error("%s", fault)
            return 0

    def insert(self, seq: Sequence, n_full: int) -> None:
        """Offer a sequence's first pages. Where the tokens were cached already, it holds those pages from now on."""
        tokens, pages = seq.tokens[: n_full * self.page_size], seq.tables[0].pages[:n_full]
        with self._clock.part("prefix_cache", self.label):
            insertion = self.cache.insert(tokens, pages, seq.request.cache_salt)
            self.cache.prioritize(insertion.match, seq.priority)
        self._adopt(seq, insertion.adopted, n_full)
        self._check(insertion.match, seq)
        self._use_twins(seq, insertion.match)
        self.lock(seq, insertion.match)

    def twin(self, page: int, index: int) -> int | None:
        """The page of group `index` with the same tokens as a cached page of the first."""
        return page if index == 0 else self.pages[page].others[index - 1]

    def in_group(self, index: int) -> list[int]:
        """All cached pages of a group."""
        twins = (self.twin(page, index) for page in self.pages)
        return [page for page in twins if page is not None]

    def lock(self, seq: Sequence, match: Match) -> None:
        """Keep a match from eviction while the sequence runs. A model of windows only holds what it reads by
        references alone, or a lock would keep pages behind the window."""
        if self.groups[0].window is not None:
            return
        with self._clock.part("prefix_cache", self.label):
            self.cache.lock(match)
        self.unlock(seq)
        seq.match = match

    def unlock(self, seq: Sequence) -> None:
        if seq.match is not None:
            with self._clock.part("prefix_cache", self.label):
                self.cache.unlock(seq.match)
            seq.match = None

    def evict(self, n_pages: int) -> int:
        """Give up to `n_pages` back, in every group. How many it were."""
        if not self.cache.n_pages:
            return 0
        with self._clock.part("prefix_cache", self.label):
            gone = self.cache.evict(n_pages)
        for page in gone:
            entry = self.pages.pop(page, None)
            if entry is None:
                raise PartFault(f"{self.label} evicted page {page}, which it did not keep")
            for strippable in self._strippable:
                strippable.pop(page, None)
            if self._leaves is not None:
                self._leaves(entry.digest, [page, *entry.others])
            self.groups[0].free([page])
            for pages, other in zip(self.groups[1:], entry.others, strict=True):
                pages.free([other] if other is not None else [])
        if gone:
            self._on_evicted(len(gone))
        return len(gone)

    def strip_window(self, pages: Pages, n_pages: int) -> int:
        """Drop a window group's pages from the least recently used cached prefixes; a match then ends before them."""
        index = self.groups.index(pages)
        if index == 0 or pages.window is None:
            return 0
        found = ((page, self.twin(page, index)) for page in self._strippable[index])
        unused = ((page, twin) for page, twin in found if twin is not None and pages.references[twin] == 1)
        stripped = list(islice(unused, n_pages))
        for page, twin in stripped:
            pages.free([twin])
            self.pages[page].others[index - 1] = None
            del self._strippable[index][page]
        return len(stripped)

    def _check(self, match: Match, seq: Sequence) -> None:
        """PartFault unless every page of the match is cached for this sequence's very tokens and salt."""
        if not isinstance(match, Match):
            raise PartFault(f"{self.label} returned a {type(match).__name__} where a Match belongs")
        n_pages = len(match.pages)
        if n_pages > seq.num_tokens // self.page_size:
            raise PartFault(f"{self.label} matched {n_pages} pages to {seq.num_tokens} tokens")
        for page, digest in zip(match.pages, page_digests(seq, n_pages, self.page_size), strict=True):
            entry = self.pages.get(page)
            if entry is None or entry.digest != digest:
                raise PartFault(f"{self.label} matched page {page} to tokens or a salt that are not its own")

    def _adopt(self, seq: Sequence, adopted: Iterable[int], n_full: int) -> None:
        places = {page: position for position, page in enumerate(seq.tables[0].pages[:n_full])}
        digests = page_digests(seq, n_full, self.page_size)
        for page in adopted:
            if page not in places or page in self.pages:
                raise PartFault(f"{self.label} adopted page {page}, which was not offered or is cached already")
            position = places[page]
            others = [self._page_at(table, position) for table in seq.tables[1:]]
            self.groups[0].share([page])
            for index, (pages, other) in enumerate(zip(self.groups[1:], others, strict=True), start=1):
                pages.share([other] if other is not None else [])
                if pages.window is not None and other is not None:
                    self._strippable[index][page] = None
            self.pages[page] = CachedPage(digests[position], others)

    def _use_twins(self, seq: Sequence, match: Match) -> None:
        """Where the cache had pages of the same tokens already, hold those and free our own."""
        for position, page in enumerate(match.pages[: len(seq.tables[0])]):
            if seq.tables[0].pages[position] == page:
                continue
            for index, (pages, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
                own, twin = self._page_at(table, position), self.twin(page, index)
                if own is not None and twin is not None:
                    pages.share([twin])
                    pages.free([own])
                    table.replace(position - table.start // self.page_size, twin)

    def _page_at(self, table: PageTable, position: int) -> int | None:
        place = position - table.start // self.page_size
        return table.pages[place] if 0 <= place < len(table) else None

"""One unbroken run of pages for each sequence, as engines held their caches before paging."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from core.interfaces.kv_allocator import CountedPages
from core.interfaces.plugin import PoolContext
from core.types import KVStats
from plugins.kv_allocator import ContiguousOptions


class ContiguousAllocator(CountedPages):
    """An arena of runs. A sequence holds the longest it may become from the start, and gaps between runs are lost to
    whatever is longer than each of them."""

    options: ContiguousOptions

    def __init__(self, options: ContiguousOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        self._starts = [0]
        self._lengths = {0: self.n_pages}
        self._asked = 1

    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        wanted = self.pages_for(max(n_tokens, upper_bound))
        if wanted > self.n_pages:
            raise ValueError(f"a run of {wanted} pages was asked for; the pool has {self.n_pages}")
        self._asked = wanted
        return self._take_run(self._find(wanted), wanted) if wanted else []

    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        wanted = self.pages_for(n_tokens) - len(pages)
        if wanted <= 0:
            return []
        behind = pages[-1] + 1 if pages else self._find(wanted)
        return self._take_run(behind, wanted) if self._lengths.get(behind, 0) >= wanted else None

    def released(self, page: int) -> None:
        at = bisect_left(self._starts, page)
        start, length = page, 1
        if at < len(self._starts) and self._starts[at] == page + 1:
            length += self._lengths.pop(self._starts.pop(at))
        before = self._starts[at - 1] if at else -1
        if at and before + self._lengths[before] == page:
            self._lengths[before] += length
        else:
            self._starts.insert(at, start)
            self._lengths[start] = length

    def external_waste(self, n_pages: int) -> int:
        if n_pages > self.n_free:
            return 0
        return sum(length for length in self._lengths.values() if length < n_pages)

    def stats(self, used_tokens: int = 0) -> KVStats:
        """`external_waste` is counted for runs of the size asked for last."""
        waste = self.external_waste(self._asked) * self.page_bytes
        return replace(super().stats(used_tokens), external_waste=waste)

    def _find(self, wanted: int) -> int:
        """The start of the free run to take from; -1 if none is long enough."""
        fitting = (start for start in self._starts if self._lengths[start] >= wanted)
        if self.options.fit == "best":
            return min(fitting, key=lambda start: self._lengths[start], default=-1)
        return next(fitting, -1)

    def _take_run(self, start: int, wanted: int) -> list[int] | None:
        if start < 0:
            return None
        length = self._lengths.pop(start)
        at = bisect_left(self._starts, start)
        if length == wanted:
            del self._starts[at]
        else:
            self._starts[at] = start + wanted
            self._lengths[start + wanted] = length - wanted
        return self.take(range(start, start + wanted))

"""What paged allocators share: a free list used as a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.interfaces.kv_allocator import AllocatorOptions, CountedPages
from core.interfaces.plugin import PoolContext


class StackedPages(CountedPages):
    """Hands out any free pages as they are needed, in constant time a page, those freed last first."""

    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        self._free = list(range(self.n_pages - 1, -1, -1))

    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        wanted = self.pages_for(n_tokens)
        if wanted > self.n_pages:
            raise ValueError(f"{n_tokens} tokens need {wanted} pages; the pool has {self.n_pages}")
        return self._pop(wanted)

    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        return self._pop(max(0, self.pages_for(n_tokens) - len(pages)))

    def free(self, pages: Iterable[int]) -> None:
        # Backwards, so that the next sequence finds neighbours in order on the stack.
        super().free(reversed(list(pages)))

    def released(self, page: int) -> None:
        self._free.append(page)

    def _pop(self, n: int) -> list[int] | None:
        if n > len(self._free):
            return None
        cut = len(self._free) - n
        taken = self._free[cut:]
        del self._free[cut:]
        return self.take(taken[::-1])

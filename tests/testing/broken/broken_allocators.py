"""Allocators that are wrong in one way each."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from core.interfaces import AllocatorOptions, CountedPages, PluginInfo, PoolContext
from core.types import KVGroup, KVStats


class Right(CountedPages):
    """A free list; the ones below change one thing of it."""

    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        self._free = list(range(self.n_pages))

    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        wanted = self.pages_for(n_tokens)
        if wanted > self.n_pages:
            raise ValueError(f"{wanted} pages of {self.n_pages}")
        return self._take(wanted)

    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        return self._take(max(0, self.pages_for(n_tokens) - len(pages)))

    def released(self, page: int) -> None:
        self._free.append(page)

    def _take(self, wanted: int) -> list[int] | None:
        if wanted > len(self._free):
            return None
        return self.take([self._free.pop() for _ in range(wanted)])


class LeaksAPage(Right):
    def free(self, pages: Iterable[int]) -> None:
        super().free(list(pages)[:-1])


class FreesSharedPages(Right):
    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._held(page)
            self._references[page] = 0
            self._n_free += 1
            self.released(page)


class OnePageShort(Right):
    def pages_for(self, n_tokens: int) -> int:
        return max(1, n_tokens // self.page_size)


class FreesTheCallersList(Right):
    def free(self, pages: Iterable[int]) -> None:
        super().free(pages)
        if isinstance(pages, list):
            pages.clear()


class ForgivesADoubleFree(Right):
    def free(self, pages: Iterable[int]) -> None:
        super().free([page for page in pages if 0 <= page < self.n_pages and self._references[page]])


class NeverSaysNever(Right):
    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        return self._take(self.pages_for(n_tokens))


class KeepsPagesWhenItFails(Right):
    def _take(self, wanted: int) -> list[int] | None:
        if wanted > len(self._free):
            self.take([self._free.pop() for _ in range(len(self._free))])
            return None
        return super()._take(wanted)


class CountsReservedAsUsed(Right):
    def stats(self, used_tokens: int = 0) -> KVStats:
        held = (self.n_pages - self.n_free) * self.page_bytes
        return KVStats(self.n_pages * self.page_bytes, held, 0, 0, 0)


class LooksAtEveryPagePair(Right):
    def allocate(self, n_tokens: int, *, upper_bound: int) -> list[int] | None:
        size = self.n_pages // 10
        list(range(size * size // 4))
        return super().allocate(n_tokens, upper_bound=upper_bound)


class SharesOnePool(Right):
    pools: ClassVar[list[list[int]]] = []

    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        if not self.pools or len(self.pools[0]) != self.n_pages:
            self.pools[:] = [[0] * self.n_pages]
        self._references = self.pools[0]


class GivesOutPagesAgain(Right):
    def _take(self, wanted: int) -> list[int] | None:
        if wanted > self.n_free:
            return None
        return self.take(self._free[:wanted])


class ExtendsByTooLittle(Right):
    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        further = super().extend(pages, n_tokens)
        if further:
            self.free(further[-1:])
        return further and further[:-1]


class CallsEverythingWaste(Right):
    def external_waste(self, n_pages: int) -> int:
        return self.n_free


class HidesItsWaste(Right):
    """Gives only pages in one unbroken run, and says that none is wasted."""

    def _take(self, wanted: int) -> list[int] | None:
        for start in range(self.n_pages - wanted + 1):
            run = list(range(start, start + wanted))
            if not any(self._references[page] for page in run):
                return self.take(run)
        return None


class KeepsTheFirstHeadOnly(Right):
    @classmethod
    def regroup(cls, groups: Sequence[KVGroup]) -> list[KVGroup]:
        return [replace(group, kv_heads=1) for group in groups]


BROKEN = {
    LeaksAPage: {
        "l3_any_order",
        "l2_serves_every_request",
        "l2_output_equals_the_null_parts",
        "l1_pages_are_conserved",
        "l1_freed_pages_come_back",
        "l1_lists_stay_the_callers",
        "l1_bytes_are_those_held",
        "l1_foreign_and_free_pages_are_errors",
    },
    FreesSharedPages: {"l3_any_order", "l1_pages_are_conserved", "l1_lists_stay_the_callers"},
    OnePageShort: {"l1_pages_hold_the_tokens", "l1_no_room_is_none_and_changes_nothing"},
    FreesTheCallersList: {"l1_lists_stay_the_callers", "l1_pages_are_conserved"},
    ForgivesADoubleFree: {"l1_foreign_and_free_pages_are_errors"},
    NeverSaysNever: {"l1_more_than_the_pool_is_an_error"},
    KeepsPagesWhenItFails: {"l1_no_room_is_none_and_changes_nothing"},
    CountsReservedAsUsed: {"l1_bytes_are_those_held"},
    LooksAtEveryPagePair: {"l4_cost_and_growth"},
    SharesOnePool: {"l1_pools_are_independent"},
    GivesOutPagesAgain: {
        "l1_pages_are_fresh",
        "l1_pages_are_conserved",
        "l1_lists_stay_the_callers",
        "l1_extend_adds_what_is_missing",
        "l1_external_waste_is_true",
    },
    ExtendsByTooLittle: {"l1_extend_adds_what_is_missing"},
    CallsEverythingWaste: {"l1_external_waste_is_true"},
    HidesItsWaste: {"l1_external_waste_is_true"},
    KeepsTheFirstHeadOnly: {"l1_every_head_is_in_one_group"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="kv_allocator",
        part=f"{__name__}:{part.__name__}",
        options=AllocatorOptions,
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

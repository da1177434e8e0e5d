"""Conformance of an allocator: no page is lost, handed out twice or miscounted."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from core.heads import checked_groups
from core.interfaces import KVAllocator, PoolContext
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import KVGroup, PartFault

PAGE_BYTES = 4096
GROUPS = {
    "one kind of layer": (KVGroup("full", (0, 1), 3, 8, 8),),
    "windows beside": (KVGroup("full", (0, 3), 2, 8, 8), KVGroup("window", (1, 2), 4, 8, 8, window=16)),
    "windows only": (KVGroup("window", (0, 1), 2, 8, 8, window=16),),
    "a latent": (KVGroup("latent", (0, 1), 1, 24, 16, value_in_key=True),),
}


class AllocatorSuite(SameOutput, Suite):
    """Checks of a `kv_allocator` part."""

    seam: ClassVar[str] = "kv_allocator"

    def pool(self, n_pages: int = 32) -> KVAllocator:
        size = self.page_size
        context = PoolContext(page_size=size, page_bytes=PAGE_BYTES, n_pages=n_pages, max_model_len=n_pages * size)
        pool: KVAllocator = self.build(context, page_size=size)
        return pool

    def tokens(self, n_pages: int) -> int:
        return n_pages * self.page_size

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_pages_hold_the_tokens(self) -> None:
        for n_tokens in (1, self.page_size, self.page_size + 1, self.tokens(5)):
            pool = self.pool()
            pages = pool.allocate(n_tokens, upper_bound=self.tokens(6))
            assert pages is not None, f"an empty pool of 32 pages has no room for {n_tokens} tokens"
            assert self.tokens(len(pages)) >= n_tokens, f"{len(pages)} pages do not hold {n_tokens} tokens"

    def test_l1_pages_are_fresh(self) -> None:
        pool = self.pool()
        seen: list[int] = []
        while (pages := pool.allocate(self.tokens(3), upper_bound=self.tokens(3))) is not None:
            assert len(seen) <= pool.n_pages, "allocate goes on for ever"
            seen += pages
        assert all(0 <= page < pool.n_pages for page in seen), f"pages must lie in 0 to {pool.n_pages - 1}: {seen}"
        twice = [page for page, count in Counter(seen).items() if count > 1]
        assert not twice, f"pages {twice} were handed out twice"
        assert {pool.references(page) for page in seen} <= {1}, "a page handed out must have one reference"

    def test_l1_pages_are_conserved(self) -> None:
        pool = self.pool()
        held = [pool.allocate(self.tokens(n), upper_bound=self.tokens(n)) or [] for n in (1, 3, 2, 5)]
        self.assert_conserved(pool, held)
        pool.share(held[1])
        self.assert_conserved(pool, [*held, held[1]])
        for pages in (held[0], held[1], held[2], held[1]):
            pool.free(pages)
        self.assert_conserved(pool, [held[3]])
        pool.free(held[3])
        self.assert_conserved(pool, [])

    def assert_conserved(self, pool: KVAllocator, held: list[list[int]]) -> None:
        expected = Counter(page for pages in held for page in pages)
        counts = {page: pool.references(page) for page in range(pool.n_pages)}
        wrong = {page: (count, expected[page]) for page, count in counts.items() if count != expected[page]}
        assert not wrong, f"references (counted, right) by page: {wrong}"
        free = pool.n_pages - len(expected)
        assert pool.n_free == free, f"n_free says {pool.n_free}, but {free} pages have no reference"

    def test_l1_freed_pages_come_back(self) -> None:
        pool = self.pool(8)
        for _ in range(10):
            pages = pool.allocate(self.tokens(8), upper_bound=self.tokens(8))
            assert pages is not None, f"a pool of 8 free pages ({pool.n_free} by n_free) has no room for 8 pages"
            pool.free(pages)
        self.assert_conserved(pool, [])

    def test_l1_no_room_is_none_and_changes_nothing(self) -> None:
        pool = self.pool(8)
        held = pool.allocate(self.tokens(6), upper_bound=self.tokens(6)) or []
        given = pool.allocate(self.tokens(5), upper_bound=self.tokens(5))
        assert given is None, f"a pool with 2 free pages gave {given} for 5 pages of tokens"
        self.assert_conserved(pool, [held])
        further = pool.extend(held, self.tokens(8) + 1)
        assert further is None, f"a pool with 2 free pages extended 6 pages to 9: {further}"
        self.assert_conserved(pool, [held])

    def test_l1_more_than_the_pool_is_an_error(self) -> None:
        pool = self.pool(8)
        try:
            given = pool.allocate(self.tokens(9), upper_bound=self.tokens(9))
        except ValueError:
            self.assert_conserved(pool, [])
        else:
            raise AssertionError(f"allocate gave {given} for more tokens than the pool holds; it must raise ValueError")

    def test_l1_extend_adds_what_is_missing(self) -> None:
        pool = self.pool()
        held = pool.allocate(1, upper_bound=self.tokens(8)) or []
        again = pool.extend(held, self.tokens(len(held)))
        assert again == [], f"{len(held)} pages hold the tokens already, but extend gave {again}"
        wanted = max(len(held), 5)
        further = pool.extend(held, self.tokens(wanted)) or []
        assert len(held + further) >= wanted, f"extend from {len(held)} to {wanted} pages gave {further}"
        assert not set(held) & set(further), f"extend gave pages that the sequence holds already: {further}"
        self.assert_conserved(pool, [held, further])

    def test_l1_foreign_and_free_pages_are_errors(self) -> None:
        pool = self.pool(8)
        held = pool.allocate(self.tokens(2), upper_bound=self.tokens(2)) or []
        free = next(page for page in range(8) if page not in held)
        for verb in (pool.share, pool.free):
            for page in (-1, 8, free):
                try:
                    verb([page])
                except ValueError:
                    continue
                raise AssertionError(f"{verb.__name__}([{page}]) must raise ValueError: the page is not held")
        self.assert_conserved(pool, [held])

    def test_l1_lists_stay_the_callers(self) -> None:
        pool = self.pool()
        pages = pool.allocate(self.tokens(3), upper_bound=self.tokens(3)) or []
        given = list(pages)
        further = pool.extend(given, self.tokens(4)) or []
        pool.share(given)
        pool.free(given)
        assert given == pages, f"a list that the core owns was changed from {pages} to {given}"
        copies = [list(pages), list(further)]
        pages.clear()
        further.clear()
        self.assert_conserved(pool, copies)

    def test_l1_bytes_are_those_held(self) -> None:
        pool = self.pool()
        assert pool.stats().total == 32 * PAGE_BYTES, f"total is {pool.stats().total}, the pool {32 * PAGE_BYTES} bytes"
        pages = pool.allocate(self.tokens(3), upper_bound=self.tokens(6)) or []
        written = self.tokens(2)
        stats, held = pool.stats(written), len(pages) * PAGE_BYTES
        assert stats.used == 2 * PAGE_BYTES, f"2 full pages of tokens are {2 * PAGE_BYTES} bytes, not {stats.used}"
        assert stats.used + stats.reserved == held, f"used {stats.used} + reserved {stats.reserved} is not {held} held"
        pool.free(pages)
        stats = pool.stats()
        assert (stats.used, stats.reserved) == (0, 0), f"an empty pool counts {stats}"

    def test_l1_external_waste_is_true(self) -> None:
        pool = self.pool(12)
        held = [pool.allocate(self.tokens(1), upper_bound=self.tokens(1)) or [] for _ in range(12)]
        for pages in held[::2]:
            pool.free(pages)
        free = pool.n_free
        for n in range(1, free + 1):
            waste = pool.external_waste(n)
            assert 0 <= waste <= free, f"external_waste({n}) is {waste} of {free} free pages"
            given = pool.allocate(self.tokens(n), upper_bound=self.tokens(n))
            assert given is not None or waste > 0, f"external_waste({n}) is 0, yet {n} of {free} pages cannot be had"
            assert given is None or waste < free, f"external_waste({n}) counts all {free} pages, yet {n} can be had"
            pool.free(given or [])

    def test_l1_every_head_is_in_one_group(self) -> None:
        for name, given in GROUPS.items():
            try:
                checked_groups(self.pool().regroup(given), given, "the part")
            except PartFault as fault:
                raise AssertionError(f"{name}: {fault}") from None

    def test_l1_pools_are_independent(self) -> None:
        one, other = self.pool(8), self.pool(8)
        one.allocate(self.tokens(5), upper_bound=self.tokens(5))
        self.assert_conserved(other, [])

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from core.testing.hypothesis_settings import run_machine
        from core.testing.machines import AllocatorMachine

        run_machine(lambda: AllocatorMachine(self))

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        small, large = (self._allocation_cost(n) for n in (1_000, 10_000))
        assert_cost(small, self.declared("cost_us", self.cost_us), "allocate and free of 4 pages, 1,000 in the pool")
        assert_growth(small, large, self.declared("growth", 1), "allocate and free, with 10 times the pages")

    def _allocation_cost(self, n_pages: int) -> Cost:
        pool = self.pool(n_pages)
        held = [pool.allocate(self.tokens(4), upper_bound=self.tokens(4)) or [] for _ in range(n_pages // 5)]
        for pages in held[::3]:
            pool.free(pages)

        def cycle() -> None:
            pool.free(pool.allocate(self.tokens(4), upper_bound=self.tokens(4)) or [])

        return microseconds(cycle)

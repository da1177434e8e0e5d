"""Allocators under any order of use, and what tells each of them from the others."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.interfaces import AllocatorOptions, PoolContext
from plugins.kv_allocator import ContiguousOptions, TieredOptions
from plugins.kv_allocator.contiguous import ContiguousAllocator
from plugins.kv_allocator.paged import PagedAllocator
from plugins.kv_allocator.tiered import TieredAllocator

PAGE = 4


def paged(n_pages=16):
    return PagedAllocator(AllocatorOptions(), PoolContext(page_size=PAGE, page_bytes=100, n_pages=n_pages))


def contiguous(n_pages=16, fit="first"):
    return ContiguousAllocator(ContiguousOptions(fit=fit), PoolContext(page_size=PAGE, page_bytes=100, n_pages=n_pages))


def tiered(n_pages=16, host_ratio=1.5):
    context = PoolContext(page_size=PAGE, page_bytes=100, n_pages=n_pages)
    return TieredAllocator(TieredOptions(host_ratio=host_ratio), context)


def free_runs(pool):
    """Lengths of unbroken runs of free pages, by the reference counts alone."""
    marks = "".join("x" if pool.references(page) else "." for page in range(pool.n_pages))
    return [len(run) for run in marks.split("x") if run]


class Pool(RuleBasedStateMachine):
    """Sequences come, grow, share and go; a plain count of references is the truth."""

    build = staticmethod(paged)

    def __init__(self):
        super().__init__()
        self.tables: list[list[int]] = []

    @initialize(n_pages=st.integers(1, 24))
    def start(self, n_pages):
        self.pool = self.build(n_pages)

    def room(self, n_wanted):
        return n_wanted <= self.pool.n_free

    @rule(n=st.integers(1, 40), more=st.integers(0, 30))
    def allocate(self, n, more):
        n_pages = -(-(n + more) // PAGE)
        if n_pages > self.pool.n_pages:
            with pytest.raises(ValueError, match=str(self.pool.n_pages)):
                self.pool.allocate(n + more, upper_bound=n + more)
            return
        room = self.fits(n, n + more)
        pages = self.pool.allocate(n, upper_bound=n + more)
        assert (pages is not None) == room
        if pages is not None:
            assert len(pages) * PAGE >= n and len(set(pages)) == len(pages)
            self.check_new(pages, n + more)
            self.tables.append(pages)

    def fits(self, n, upper_bound):
        return self.room(-(-n // PAGE))

    def check_new(self, pages, upper_bound):
        pass

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), n=st.integers(1, 20))
    def extend(self, data, n):
        table = data.draw(st.sampled_from(self.tables))
        n_tokens = len(table) * PAGE + n
        free = self.pool.n_free
        more = self.pool.extend(tuple(table), n_tokens)
        if more is None:
            assert self.pool.n_free == free
        else:
            assert not set(more) & set(table)
            table += more
            assert len(table) * PAGE >= n_tokens
        assert self.pool.extend(tuple(table), len(table) * PAGE) == []

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data):
        table = data.draw(st.sampled_from(self.tables))
        shared = table[: data.draw(st.integers(1, len(table)))]
        self.pool.share(shared)
        self.tables.append(list(shared))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @invariant()
    def conserved(self):
        if hasattr(self, "pool"):
            held = Counter(page for table in self.tables for page in table)
            assert [self.pool.references(page) for page in range(self.pool.n_pages)] == [
                held[page] for page in range(self.pool.n_pages)
            ]
            assert self.pool.n_free == self.pool.n_pages - len(held)


class Arena(Pool):
    build = staticmethod(contiguous)

    def fits(self, n, upper_bound):
        return max(free_runs(self.pool), default=0) >= -(-upper_bound // PAGE)

    def check_new(self, pages, upper_bound):
        assert pages == list(range(pages[0], pages[0] + len(pages)))
        assert len(pages) == -(-upper_bound // PAGE)

    @invariant()
    def external_waste_is_what_cannot_be_had(self):
        if hasattr(self, "pool"):
            for n in range(1, self.pool.n_pages + 1):
                short = sum(run for run in free_runs(self.pool) if run < n)
                assert self.pool.external_waste(n) == (short if n <= self.pool.n_free else 0)


class BestFitArena(Arena):
    build = staticmethod(lambda n_pages: contiguous(n_pages, fit="best"))


class Tier(Pool):
    build = staticmethod(tiered)


class HostTier(Pool):
    build = staticmethod(lambda n_pages: tiered(n_pages, host_ratio=1).host)


for machine in (Pool, Arena, BestFitArena, Tier, HostTier):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPaged = Pool.TestCase
TestContiguous = Arena.TestCase
TestBestFit = BestFitArena.TestCase
TestTiered = Tier.TestCase
TestHostTier = HostTier.TestCase


def test_a_fresh_paged_pool_gives_neighbours():
    pool = paged(8)
    assert pool.allocate(3 * PAGE, upper_bound=100) == [0, 1, 2]
    assert pool.allocate(1, upper_bound=100) == [3]


def test_paged_hands_out_what_was_freed_last():
    pool = paged(8)
    first, second = (pool.allocate(2 * PAGE, upper_bound=2 * PAGE) for _ in range(2))
    pool.free(first)
    pool.free(second)
    assert pool.allocate(4 * PAGE, upper_bound=4 * PAGE) == second + first


def test_paged_holds_what_is_needed_now():
    assert len(paged().allocate(1, upper_bound=16 * PAGE)) == 1


def fragmented(fit):
    """Free runs of 3 and 2 pages, in this order."""
    pool = contiguous(8, fit)
    runs = [pool.allocate(n * PAGE, upper_bound=n * PAGE) for n in (3, 1, 2, 2)]
    pool.free(runs[0])
    pool.free(runs[2])
    return pool


def test_first_fit_and_best_fit_differ():
    assert fragmented("first").allocate(2 * PAGE, upper_bound=2 * PAGE) == [0, 1]
    assert fragmented("best").allocate(2 * PAGE, upper_bound=2 * PAGE) == [4, 5]


def test_external_fragmentation_is_counted_in_bytes():
    pool = fragmented("first")
    assert pool.allocate(5 * PAGE, upper_bound=5 * PAGE) is None
    assert pool.stats().external_waste == 5 * 100
    assert pool.allocate(2 * PAGE, upper_bound=2 * PAGE) == [0, 1]
    assert pool.allocate(3 * PAGE, upper_bound=3 * PAGE) is None
    assert pool.stats().external_waste == 3 * 100


def test_contiguous_reserves_the_longest_a_request_may_become():
    pool = contiguous(16)
    pool.allocate(PAGE, upper_bound=8 * PAGE)
    stats = pool.stats(used_tokens=PAGE)
    assert (stats.used, stats.reserved, stats.internal_waste) == (100, 700, 700)


def test_the_host_tier_has_pages_of_its_own():
    pool = tiered(4, host_ratio=2)
    device = pool.allocate(4 * PAGE, upper_bound=4 * PAGE)
    host = pool.host.allocate(4 * PAGE, upper_bound=4 * PAGE)
    assert (pool.n_free, pool.host.n_free, pool.host.n_pages) == (0, 4, 8)
    pool.free(device)
    assert (pool.n_free, pool.host.n_free) == (4, 4)
    assert len(host) == 4 and pool.host.allocate(5 * PAGE, upper_bound=5 * PAGE) is None


def test_other_allocators_have_no_host_tier():
    assert paged().host is None and contiguous().host is None

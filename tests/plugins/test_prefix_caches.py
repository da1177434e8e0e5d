"""Prefix caches under any order of use, against a plain account of what each page holds."""

import time
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.interfaces import CacheContext
from core.interfaces.plugin import Options
from plugins.prefix_cache import CostAwareOptions, SegmentedOptions
from plugins.prefix_cache.cost_aware import CostAwareEviction
from plugins.prefix_cache.exact import ExactCache
from plugins.prefix_cache.fifo import FirstInFirstOut
from plugins.prefix_cache.hash import HashCache
from plugins.prefix_cache.lfu import LeastFrequentlyUsed
from plugins.prefix_cache.lru import LeastRecentlyUsed
from plugins.prefix_cache.none import NoPrefixCache
from plugins.prefix_cache.priority import PriorityEviction
from plugins.prefix_cache.radix import RadixCache
from plugins.prefix_cache.slru import SegmentedLRU

CACHES = pytest.mark.parametrize("cache_class", [HashCache, RadixCache])


def cache_of(cache_class, page_size=2, policy=LeastRecentlyUsed, options=None):
    eviction = policy(options or Options(), CacheContext())
    return cache_class(Options(), CacheContext(page_size=page_size, eviction=eviction))


class Machine(RuleBasedStateMachine):
    """`held` maps what a page holds (salt and all tokens up to its end) to the page."""

    cache_class = HashCache

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size):
        self.size = page_size
        self.cache = cache_of(self.cache_class, page_size)
        self.held: dict[tuple[str, tuple[int, ...]], int] = {}
        self.locked = []
        self.loose = []
        self.next_page = 100

    def prefixes(self, tokens, salt):
        whole = len(tokens) // self.size * self.size
        return [(salt, tuple(tokens[:end])) for end in range(self.size, whole + 1, self.size)]

    def longest(self, tokens, salt):
        pages = []
        for prefix in self.prefixes(tokens, salt):
            if prefix not in self.held:
                break
            pages.append(self.held[prefix])
        return tuple(pages)

    tokens = st.lists(st.integers(0, 1), max_size=14)
    salts = st.sampled_from(["", "a"])

    @rule(tokens=tokens, salt=salts)
    def insert(self, tokens, salt):
        prefixes = self.prefixes(tokens, salt)
        pages = list(range(self.next_page, self.next_page + len(prefixes)))
        self.next_page += len(pages)
        insertion = self.cache.insert(tokens[: len(pages) * self.size], pages, salt)
        new = [(prefix, page) for prefix, page in zip(prefixes, pages, strict=True) if prefix not in self.held]
        assert sorted(insertion.adopted) == [page for _, page in new]
        self.held.update(new)
        assert insertion.match.pages == self.longest(tokens, salt)

    @rule(tokens=tokens, salt=salts, lock=st.booleans())
    def match(self, tokens, salt, lock):
        wanted = self.longest(tokens, salt)
        assert self.cache.peek(tokens, salt) == len(wanted) * self.size
        match = self.cache.match(tokens, salt)
        assert match.pages == wanted
        if lock:
            self.cache.lock(match)
            self.locked.append(match)
        elif wanted:
            self.loose.append(match)

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def lock_late(self, data):
        """A match may be locked later, unless its pages have gone meanwhile."""
        match = self.loose.pop(data.draw(st.integers(0, len(self.loose) - 1)))
        if set(match.pages) <= set(self.held.values()):
            self.cache.lock(match)
            self.locked.append(match)
        else:
            with pytest.raises(ValueError, match="evicted"):
                self.cache.lock(match)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data):
        self.cache.unlock(self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1))))

    @rule(n=st.integers(0, 8))
    def evict(self, n):
        kept = {page for match in self.locked for page in match.pages}
        gone = self.cache.evict(n)
        assert len(gone) == len(set(gone)) and not kept & set(gone)
        assert len(gone) == min(n, len(self.held) - len(kept))
        self.held = {prefix: page for prefix, page in self.held.items() if page not in gone}
        for salt, tokens in self.held:
            assert self.longest(tokens, salt)[-1] == self.held[salt, tokens], "a page lost what it continues"

    @invariant()
    def counted(self):
        if hasattr(self, "cache"):
            assert self.cache.n_pages == len(self.held)

    def teardown(self):
        if hasattr(self, "cache"):
            for match in self.locked:
                self.cache.unlock(match)
            assert sorted(self.cache.evict(10_000)) == sorted(self.held.values())


class RadixMachine(Machine):
    cache_class = RadixCache


for machine in (Machine, RadixMachine):
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHash = Machine.TestCase
TestRadix = RadixMachine.TestCase


@CACHES
def test_the_least_recently_used_goes_first(cache_class):
    cache = cache_of(cache_class)
    for first in range(4):
        cache.insert([first, first], [first], "")
    cache.match([1, 1], "")
    cache.match([0, 0, 5], "")
    assert [cache.evict(1)[0] for _ in range(4)] == [2, 3, 1, 0]


@CACHES
def test_a_prefix_goes_after_what_continues_it(cache_class):
    cache = cache_of(cache_class)
    cache.insert([1, 1, 2, 2, 3, 3], [10, 11, 12], "")
    cache.insert([1, 1, 2, 2, 4, 4], [0, 0, 13], "")
    assert cache.evict(2) == [12, 13]
    assert cache.evict(2) == [11, 10]


def evicted_in_turn(cache, n):
    return [cache.evict(1)[0] for _ in range(n)]


def used(cache_class, policy, options=None):
    """Entries 0 to 3 of one page each, in this order; 0 was matched three times, 2 once, then 1 twice."""
    cache = cache_of(cache_class, policy=policy, options=options)
    for first in range(4):
        cache.insert([first, first], [first], "")
    for first in (0, 0, 0, 2, 1, 1):
        cache.match([first, first], "")
    return cache


@CACHES
def test_lfu_gives_up_what_was_used_least(cache_class):
    assert evicted_in_turn(used(cache_class, LeastFrequentlyUsed), 4) == [3, 2, 1, 0]


@CACHES
def test_fifo_gives_up_what_came_first(cache_class):
    assert evicted_in_turn(used(cache_class, FirstInFirstOut), 4) == [0, 1, 2, 3]


@CACHES
def test_slru_protects_what_was_used_again(cache_class):
    once = used(cache_class, SegmentedLRU, SegmentedOptions())
    assert evicted_in_turn(once, 4) == [3, 0, 2, 1]
    twice = used(cache_class, SegmentedLRU, SegmentedOptions(protected_uses=2))
    assert evicted_in_turn(twice, 4) == [3, 2, 0, 1]


@CACHES
def test_priority_keeps_what_important_requests_use(cache_class):
    cache = cache_of(cache_class, policy=PriorityEviction)
    for first, priority in ((0, 2), (1, 0), (2, 1), (3, 0)):
        cache.prioritize(cache.insert([first, first], [first], "").match, priority)
    cache.prioritize(cache.match([0, 0], ""), 0)
    cache.prioritize(cache.match([1, 1], ""), 5)
    assert evicted_in_turn(cache, 4) == [2, 3, 0, 1]


@CACHES
def test_cost_aware_keeps_what_is_dear_to_compute(cache_class):
    cache = cache_of(cache_class, policy=CostAwareEviction, options=CostAwareOptions(attention_tokens=4))
    cache.insert([1] * 16, list(range(8)), "")
    for first in range(2, 6):
        cache.insert([first, first], [first * 10], "")
    assert evicted_in_turn(cache, 4) == [20, 30, 40, 50]


def test_one_edited_word_loses_all_with_exact_and_little_with_radix():
    prompt = list(range(40))
    edited = [*prompt[:20], 999, *prompt[21:]]
    hits = {}
    for cache_class in (ExactCache, HashCache, RadixCache):
        cache = cache_of(cache_class, page_size=4)
        cache.insert(prompt, list(range(10)), "")
        assert len(cache.match(prompt, "").pages) == 10
        hits[cache_class] = len(cache.match(edited, "").pages) * 4
    assert hits == {ExactCache: 0, HashCache: 20, RadixCache: 20}


def test_exact_matches_whole_prompts_that_were_inserted():
    cache = cache_of(ExactCache)
    cache.insert([1, 1, 2, 2, 3, 3], [0, 1, 2], "")
    assert cache.match([1, 1, 2, 2], "").pages == () == cache.match([1, 1, 2, 2, 3, 3, 4, 4], "").pages
    assert cache.match([1, 1, 2, 2, 3, 3, 9], "").pages == (0, 1, 2)
    cache.insert([1, 1, 2, 2], [8, 9], "")
    assert cache.match([1, 1, 2, 2], "").pages == (0, 1)


def test_exact_gives_up_pages_that_end_no_prompt():
    cache = cache_of(ExactCache)
    cache.insert([1, 1, 2, 2, 3, 3, 4, 4], [0, 1, 2, 3], "")
    cache.insert([1, 1, 2, 2], [8, 9], "")
    assert cache.evict(1) == [3, 2]
    assert cache.match([1, 1, 2, 2], "").pages == (0, 1)


@CACHES
def test_salts_and_key_parts_never_meet(cache_class):
    cache = cache_of(cache_class, page_size=1)
    cache.insert([1, 2], [0, 1], "a")
    assert cache.match([1, 2], "a").pages == (0, 1)
    for salt in ("", "b", "a1", "\udcf0"):
        assert cache.match([1, 2], salt).pages == ()
    assert cache.match([12], "a").pages == () and cache.match([2], "a").pages == ()


@CACHES
def test_salts_leave_nothing_behind(cache_class):
    cache = cache_of(cache_class)
    for n in range(50):
        cache.match([1, 2], f"looked for {n}")
        cache.insert([1, 2], [n], f"salt {n}")
    cache.evict(50)
    size = len(cache._nodes) if cache_class is HashCache else len(cache._root.children)
    assert size == 0


@CACHES
def test_unlock_without_lock_is_an_error(cache_class):
    cache = cache_of(cache_class)
    match = cache.insert([1, 2], [0], "").match
    with pytest.raises(ValueError, match="without a lock"):
        cache.unlock(match)


@CACHES
def test_statistics(cache_class):
    cache = cache_of(cache_class)
    cache.insert([1, 2, 3, 4], [0, 1], "")
    cache.match([1, 2, 9, 9, 9], "")
    cache.peek([1, 2], "")
    cache.evict(1)
    stats = cache.stats
    assert (stats.lookups, stats.lookup_tokens, stats.hit_tokens) == (1, 5, 2)
    assert (stats.inserted_pages, stats.evicted_pages) == (2, 1)


@CACHES
def test_bookkeeping_a_page_does_not_grow_with_the_cache(cache_class):
    def time_a_page(n_prompts):
        cache, pages = cache_of(cache_class, page_size=16), 0
        for n in range(n_prompts):
            cache.insert([n] * 16 + [7] * 16, [pages, pages + 1], "")
            pages += 2
        best = float("inf")
        for n in range(50):
            start = time.thread_time()
            cache.match([n] * 16 + [7] * 16, "")
            cache.insert([-n - 1] * 32, [pages, pages + 1], "")
            cache.evict(2)
            best = min(best, time.thread_time() - start)
        return best

    few, many = time_a_page(100), time_a_page(20_000)
    assert many < 6 * few, f"{few * 1e6:.0f} us with 200 pages, {many * 1e6:.0f} us with 40,000"


def test_the_queue_of_a_busy_cache_stays_small():
    cache = cache_of(RadixCache)
    cache.insert([1, 2], [0], "")
    for _ in range(10_000):
        cache.match([1, 2], "")
    assert len(cache.queue._heap) < 200


def test_none_keeps_nothing():
    cache = NoPrefixCache(Options(), CacheContext())
    assert cache.insert([1] * 16, [0], "").adopted == ()
    match = cache.match([1] * 16, "")
    assert match.pages == () and cache.evict(5) == [] and cache.n_pages == 0
    cache.lock(match)
    cache.unlock(match)
    with pytest.raises(ValueError, match="without a lock"):
        cache.unlock(match)


def test_what_a_page_holds_is_told_by_all_tokens_before_it():
    for cache_class in (HashCache, RadixCache):
        cache = cache_of(cache_class)
        cache.insert([1, 1, 5, 5], [0, 1], "")
        cache.insert([2, 2, 5, 5], [2, 3], "")
        assert cache.match([2, 2, 5, 5], "").pages == (2, 3)
        assert Counter(cache.evict(10)) == Counter([0, 1, 2, 3])

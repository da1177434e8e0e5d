"""Conformance of a prefix cache: what it matches is true, what is locked stays, and what it keeps is counted."""

from __future__ import annotations

import copy
import unittest
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, ClassVar

from core.interfaces import CacheContext, PrefixCache
from core.registry import PartError
from core.testing.cost import assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import Match


@dataclass(slots=True)
class Ledger:
    """A cache beside a plain account of what each of its pages holds: its salt and all tokens up to its end."""

    cache: PrefixCache
    contents: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    locks: Counter[int] = field(default_factory=Counter)
    _page: count[int] = field(default_factory=lambda: count(1000))

    def insert(self, tokens: Sequence[int], salt: str = "") -> tuple[list[int], Match]:
        """Offer fresh pages for the whole pages of `tokens`. Returns those adopted, and the match."""
        size = self.cache.page_size
        n_pages = len(tokens) // size
        pages = [next(self._page) for _ in range(n_pages)]
        tokens = tuple(tokens[: n_pages * size])
        insertion = self.cache.insert(tokens, list(pages), salt)
        strange = set(insertion.adopted) - set(pages)
        assert not strange, f"insert adopts {sorted(strange)}, which were not offered"
        for page in insertion.adopted:
            self.contents[page] = (salt, tokens[: (pages.index(page) + 1) * size])
        self.assert_true(insertion.match, tokens, salt)
        self.assert_counted()
        return list(insertion.adopted), insertion.match

    def match(self, tokens: Sequence[int], salt: str = "") -> Match:
        match = self.cache.match(tuple(tokens), salt)
        self.assert_true(match, tuple(tokens), salt)
        return match

    def evict(self, n_pages: int) -> list[int]:
        evictable = [page for page in self.contents if not self.locks[page]]
        gone = self.cache.evict(n_pages)
        assert len(set(gone)) == len(gone), f"evict returns a page twice: {gone}"
        unknown = [page for page in gone if page not in self.contents]
        assert not unknown, f"evict returns pages {unknown}, which the cache does not keep"
        locked = [page for page in gone if self.locks[page]]
        assert not locked, f"evict gives up pages {locked}, which are locked"
        wanted = min(n_pages, len(evictable))
        assert len(gone) >= wanted, f"evict({n_pages}) gives {len(gone)} pages, and {len(evictable)} are unlocked"
        for page in gone:
            del self.contents[page]
        self.assert_counted()
        return gone

    def lock(self, match: Match) -> None:
        self.cache.lock(match)
        self.locks.update(match.pages)

    def unlock(self, match: Match) -> None:
        self.cache.unlock(match)
        self.locks.subtract(match.pages)

    def assert_true(self, match: Match, tokens: tuple[int, ...], salt: str) -> None:
        size = self.cache.page_size
        assert len(match.pages) * size <= len(tokens), f"{len(match.pages)} pages matched for {len(tokens)} tokens"
        for index, page in enumerate(match.pages):
            wanted = (salt, tokens[: (index + 1) * size])
            held = self.contents.get(page)
            assert held is not None, f"page {page} is matched, and the cache does not keep it (evicted or not adopted)"
            assert held == wanted, f"page {page} holds {held} (salt, tokens), but is matched for {wanted}"

    def assert_longest(self, match: Match, tokens: Sequence[int], salt: str = "") -> None:
        size, tokens, found = self.cache.page_size, tuple(tokens), len(match.pages)
        kept = set(self.contents.values())
        longest = 0
        while (longest + 1) * size <= len(tokens) and (salt, tokens[: (longest + 1) * size]) in kept:
            longest += 1
        assert found == longest, f"{found} pages matched of {longest} that are cached for {tokens}"

    def assert_counted(self) -> None:
        kept = len(self.contents)
        assert self.cache.n_pages == kept, f"n_pages says {self.cache.n_pages}; adopted and not evicted are {kept}"


class PrefixCacheSuite(SameOutput, Suite):
    """Checks of a `prefix_cache` part. A cache that keeps nothing declares `keeps_nothing`."""

    seam: ClassVar[str] = "prefix_cache"
    eviction: ClassVar[str] = "lru"

    def ledger(self) -> Ledger:
        try:
            options = self.registry.options("prefix_cache.eviction", self.eviction, {})
            policy = self.registry.build("prefix_cache.eviction", self.eviction, options, CacheContext())
        except PartError as error:
            raise unittest.SkipTest(f"no eviction policy to build it with: {error}") from None
        return Ledger(self.build(CacheContext(page_size=self.page_size, eviction=policy)))

    def text(self, n_pages: int, start: int = 0) -> tuple[int, ...]:
        """Distinct tokens, `n_pages` whole pages of them."""
        return tuple(range(start, start + n_pages * self.page_size))

    def keeper(self) -> Ledger:
        self.skip_if("keeps_nothing", "nothing is ever matched")
        return self.ledger()

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_empty_matches_nothing(self) -> None:
        ledger = self.ledger()
        for tokens in ((), (1,), self.text(3)):
            assert ledger.match(tokens).pages == (), "an empty cache matched something"
        assert ledger.cache.n_pages == 0

    def test_l1_pages_are_counted(self) -> None:
        ledger = self.ledger()
        ledger.insert(self.text(3))
        ledger.insert(self.text(5))
        ledger.insert((*self.text(2), *self.text(2, start=500)))
        ledger.evict(2)
        ledger.evict(100)
        assert ledger.cache.n_pages == 0, f"{ledger.cache.n_pages} pages cannot be evicted though none is locked"

    def test_l1_nothing_is_adopted_twice(self) -> None:
        ledger = self.keeper()
        ledger.insert(self.text(3))
        again, match = ledger.insert(self.text(3))
        assert not again, f"pages {again} were adopted for tokens that are cached already"
        assert len(match.pages) == 3, f"insert of cached tokens gives a match of {len(match.pages)} of 3 pages"
        adopted, _ = ledger.insert(self.text(5))
        assert len(adopted) == 2, f"two pages are new, {len(adopted)} were adopted"

    def test_l1_locked_pages_stay(self) -> None:
        ledger = self.keeper()
        ledger.insert(self.text(4))
        ledger.insert(self.text(2, start=500))
        match = ledger.match(self.text(3))
        ledger.lock(match)
        ledger.evict(100)
        assert ledger.match(self.text(3)).pages == match.pages, "locked pages are no longer matched after eviction"
        ledger.unlock(match)
        ledger.evict(100)
        assert ledger.cache.n_pages == 0, f"{ledger.cache.n_pages} pages stay locked after unlock"

    def test_l1_locks_count(self) -> None:
        ledger = self.keeper()
        ledger.insert(self.text(2))
        match = ledger.match(self.text(2))
        ledger.lock(match)
        ledger.lock(match)
        ledger.unlock(match)
        ledger.evict(100)
        ledger.unlock(match)
        try:
            ledger.cache.unlock(match)
        except ValueError:
            return
        raise AssertionError("unlock of a match that is not locked must raise ValueError")

    def test_l1_inserting_keeps_locks(self) -> None:
        ledger = self.keeper()
        ledger.insert(self.text(4))
        match = ledger.match(self.text(4))
        ledger.lock(match)
        ledger.insert((*self.text(1), *self.text(2, start=500)))
        ledger.insert(self.text(6))
        ledger.evict(100)
        ledger.unlock(match)
        ledger.evict(100)
        assert ledger.cache.n_pages == 0, f"{ledger.cache.n_pages} pages stay locked after unlock"

    def test_l1_inputs_are_not_changed(self) -> None:
        ledger = self.ledger()
        tokens, pages = list(self.text(3)), [7, 8, 9]
        before = copy.deepcopy((tokens, pages))
        insertion = ledger.cache.insert(tokens, pages, "")
        ledger.cache.match(tokens, "")
        assert (tokens, pages) == before, f"inputs were changed from {before} to {(tokens, pages)}"
        tokens[:] = [0] * len(tokens)
        pages[:] = [0] * len(pages)
        found = ledger.cache.match(self.text(3), "").pages
        assert found == insertion.match.pages, "the cache keeps a list of the caller's; changing it changed a match"

    def test_l1_evicting_nothing_gives_nothing(self) -> None:
        ledger = self.ledger()
        assert ledger.cache.evict(3) == [], "an empty cache evicted something"

    def test_l1_statistics_are_true(self) -> None:
        ledger = self.ledger()
        adopted, _ = ledger.insert(self.text(3))
        hits = sum(len(ledger.match(tokens).pages) for tokens in (self.text(3), self.text(2), self.text(2, start=900)))
        gone = ledger.evict(2)
        stats = ledger.cache.stats
        assert stats.inserted_pages == len(adopted), f"inserted_pages is {stats.inserted_pages}, not {len(adopted)}"
        assert stats.evicted_pages == len(gone), f"evicted_pages is {stats.evicted_pages}, not {len(gone)}"
        assert stats.lookups == 3, f"lookups is {stats.lookups} after 3 matches"
        wanted = hits * self.page_size
        assert stats.hit_tokens == wanted, f"hit_tokens is {stats.hit_tokens}; the matches returned {wanted}"

    def test_l1_caches_are_independent(self) -> None:
        one, other = self.ledger(), self.ledger()
        one.insert(self.text(2))
        assert other.match(self.text(2)).pages == (), "a second cache matches what went into the first"

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_finds_the_longest_prefix(self) -> None:
        self.skip_if("whole_prompts_only", "a part of a cached prompt is not matched")
        ledger = self.keeper()
        ledger.insert(self.text(4))
        for tokens in (self.text(4), self.text(6), self.text(2), self.text(4)[:-1], (*self.text(3), 900, 901)):
            ledger.assert_longest(ledger.match(tokens), tokens)

    def test_l2_same_tokens_after_another_start_do_not_match(self) -> None:
        ledger = self.keeper()
        head, other, tail = self.text(1), self.text(1, start=500), self.text(2, start=900)
        ledger.insert((*head, *tail))
        ledger.insert(other)
        ledger.match((*other, *tail))
        ledger.match(tail)

    def test_l2_salts_never_meet(self) -> None:
        ledger = self.keeper()
        text = self.text(3)
        ledger.insert(text, "a")
        for salt in ("", "b", "A", "a "):
            pages = ledger.cache.match(text, salt).pages
            assert not pages, f"tokens cached under salt 'a' are matched under {salt!r}: pages {pages}"
        assert len(ledger.match(text, "a").pages) == 3, "the same salt must match"
        ledger.insert(text, "")
        assert len(ledger.match(text, "").pages) == 3, "no salt is a salt of its own, and must match itself"
        ledger.match(text, "a")

    def test_l2_tokens_are_told_apart(self) -> None:
        ledger = self.keeper()
        size = self.page_size
        for tokens in ([1, 23], [12, 3], [256, 0], [0, 256], [1, 65537], [65537, 1], [2**31 - 1, 0], [0, 2**31 - 1]):
            ledger.insert((*tokens, *[5] * size)[:size])
        for tokens in ([1, 23], [12, 3], [0, 1], [123, 0], [1, 0], [1, 1], [2**32 + 1, 0], [0, 0]):
            ledger.match((*tokens, *[5] * size)[:size])

    def test_l2_peek_is_what_match_finds(self) -> None:
        ledger = self.ledger()
        ledger.insert(self.text(4), "a")
        for tokens, salt in ((self.text(4), "a"), (self.text(6), "a"), (self.text(4), ""), (self.text(1, 500), "a")):
            peeked = ledger.cache.peek(tokens, salt)
            found = len(ledger.match(tokens, salt).pages) * self.page_size
            assert peeked == found, f"peek says {peeked} tokens, match finds {found}"

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from core.testing.hypothesis_settings import run_machine
        from core.testing.machines import PrefixCacheMachine

        run_machine(lambda: PrefixCacheMachine(self))

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        budget, power = self.declared("cost_us", self.cost_us), self.declared("growth", 1)
        small, large = self._filled(100), self._filled(1_000)
        fresh = count()

        def turn_over(cache: PrefixCache) -> None:
            n = next(fresh)
            pages = range(10**6 + 8 * n, 10**6 + 8 * n + 8)
            cache.evict(len(cache.insert(self.text(8, start=10**7 + 1000 * n), pages, "").adopted))

        for what, call in (("a match of 8 pages", self._match), ("an insert and an evict of 8 pages", turn_over)):
            few, many = (microseconds(partial(call, cache), repeats=5) for cache in (small, large))
            assert_cost(few, budget, f"{what}, 100 prefixes cached,")
            assert_growth(few, many, power, f"{what}, with 10 times the prefixes,")

    def _filled(self, prefixes: int) -> Any:
        cache = self.ledger().cache
        pages = count()
        shared = self.text(4)
        for n in range(prefixes):
            cache.insert((*shared, *self.text(4, start=1000 * (n + 1))), [next(pages) for _ in range(8)], "")
        return cache

    def _match(self, cache: PrefixCache) -> None:
        cache.match((*self.text(4), *self.text(4, start=3000)), "")

"""Conformance of an eviction policy: an order that stays the same until an entry changes."""

from __future__ import annotations

import copy
import itertools
import math
from typing import ClassVar

from core.interfaces import BuildContext, CacheContext, CacheEntry, EvictionPolicy
from core.registry import PartError
from core.testing.cost import assert_cost, microseconds
from core.testing.prefix_caches import Ledger
from core.testing.serving import SameOutput
from core.testing.suite import Suite

ENTRIES = [
    CacheEntry(created, created + idle, uses, depth_tokens=16 * depth, tokens=16, priority=priority)
    for created, idle, uses, depth, priority in itertools.product((0, 7), (0, 3, 90), (0, 1, 12), (0, 5), (-1, 0, 2))
]


class EvictionSuite(SameOutput, Suite):
    """Checks of a `prefix_cache.eviction` part."""

    seam: ClassVar[str] = "prefix_cache.eviction"
    cost_us: ClassVar[float] = 50.0

    def policy(self) -> EvictionPolicy:
        policy: EvictionPolicy = self.build(BuildContext())
        return policy

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_keys_are_tuples_of_numbers(self) -> None:
        policy = self.policy()
        keys = [policy.key(copy.deepcopy(entry)) for entry in ENTRIES]
        for key in keys:
            assert isinstance(key, tuple) and key, f"key() gave {key!r}, not a tuple of numbers"
            assert all(isinstance(x, (int, float)) and not math.isnan(x) for x in key), f"{key!r} cannot be ordered"
        lengths = {len(key) for key in keys}
        assert len(lengths) == 1, f"keys must all have one length; these have {sorted(lengths)}"

    def test_l1_keys_stay_until_the_entry_changes(self) -> None:
        policy = self.policy()
        first = [policy.key(copy.deepcopy(entry)) for entry in ENTRIES]
        again = [policy.key(copy.deepcopy(entry)) for entry in reversed(ENTRIES)][::-1]
        changed = [entry for entry, a, b in zip(ENTRIES, first, again, strict=True) if a != b]
        assert not changed, f"asked twice, the key of {changed[0]} differs"

    def test_l1_entries_are_not_changed(self) -> None:
        policy = self.policy()
        for entry in ENTRIES:
            seen = copy.deepcopy(entry)
            policy.key(seen)
            assert seen == entry, f"key() changed {entry} to {seen}"

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_tells_entries_apart(self) -> None:
        policy = self.policy()
        keys = {policy.key(copy.deepcopy(entry)) for entry in ENTRIES}
        assert len(keys) > 1, "every entry has the same key, so nothing is chosen"

    def test_l2_every_cache_works_with_it(self) -> None:
        for name in self.registry.names("prefix_cache"):
            cache = self.ledger(name)
            for start in range(0, 4000, 100):
                cache.insert(tuple(range(start, start + 3 * cache.cache.page_size)))
                cache.match(tuple(range(0, cache.cache.page_size)))
                if len(cache.contents) > 30:
                    cache.evict(5)
            cache.evict(10_000)
            assert cache.cache.n_pages == 0, f"{cache.cache.n_pages} pages of {name} cannot be evicted"

    def ledger(self, cache: str, page_size: int = 4) -> Ledger:
        context = CacheContext(page_size=page_size, eviction=self.policy())
        try:
            options = self.registry.options("prefix_cache", cache, {})
            return Ledger(self.registry.build("prefix_cache", cache, options, context))
        except PartError as error:
            raise AssertionError(f"prefix cache {cache} cannot be built with it: {error}") from error

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost(self) -> None:
        policy = self.policy()
        cost = microseconds(lambda: policy.key(ENTRIES[0]))
        assert_cost(cost, self.declared("cost_us", self.cost_us), "a key")

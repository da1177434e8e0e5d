"""Hypothesis state machines: the verbs of a seam in any order, against a model that is plain to read."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.types import DraftView

if TYPE_CHECKING:
    from core.testing.allocators import AllocatorSuite
    from core.testing.drafters import DrafterSuite
    from core.testing.prefix_caches import PrefixCacheSuite
    from core.testing.reductions import ReductionSuite, Running
    from core.testing.schedulers import SchedulerSuite

N_PAGES = 16


class AllocatorMachine(RuleBasedStateMachine):
    """Sequences that start, grow, fork and end, in a pool of 16 pages."""

    def __init__(self, suite: AllocatorSuite) -> None:
        super().__init__()
        self.suite = suite
        self.pool = suite.pool(N_PAGES)
        self.held: list[list[int]] = []

    @rule(n=st.integers(1, N_PAGES * 4), more=st.integers(0, N_PAGES * 4))
    def start(self, n: int, more: int) -> None:
        most = self.suite.tokens(N_PAGES)
        n_tokens = min(n, most)
        was_free = {page for page in range(N_PAGES) if not self.pool.references(page)}
        pages = self.pool.allocate(n_tokens, upper_bound=min(n_tokens + more, most))
        if pages is None:
            assert self.held, f"an empty pool has no room for {n_tokens} of its {most} tokens"
            return
        assert set(pages) <= was_free, f"allocate gave {sorted(set(pages) - was_free)}, which others hold"
        assert self.suite.tokens(len(pages)) >= n_tokens, f"{len(pages)} pages do not hold {n_tokens} tokens"
        self.held.append(list(pages))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(1, 24))
    def grow(self, data: st.DataObject, n: int) -> None:
        pages = self._pick(data)
        wanted = self.suite.tokens(len(pages)) + n
        further = self.pool.extend(list(pages), wanted)
        if further is None:
            return
        assert self.suite.tokens(len(pages) + len(further)) >= wanted, f"extend to {wanted} tokens gave {further}"
        pages += further

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        pages = list(self._pick(data))
        self.pool.share(pages)
        self.held.append(pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.integers(0, 4))
    def end(self, data: st.DataObject, keep: int) -> None:
        pages = self._pick(data)
        gone = pages[keep:]
        del pages[keep:]
        self.pool.free(gone)
        self.held = [pages for pages in self.held if pages]

    @rule()
    def drain(self) -> None:
        for pages in self.held:
            self.pool.free(pages)
        self.held = []

    @invariant()
    def conserved(self) -> None:
        self.suite.assert_conserved(self.pool, self.held)
        stats = self.pool.stats()
        held = (N_PAGES - self.pool.n_free) * self.pool.page_bytes
        assert stats.used + stats.reserved == held, f"{stats} does not add up to the {held} bytes held"

    def _pick(self, data: st.DataObject) -> list[int]:
        return self.held[data.draw(st.integers(0, len(self.held) - 1), "sequence")]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that arrive, are aborted and are served in any order; no rule may break, and all drain in the end."""

    CLIENT = st.sampled_from(["a", "b"])

    def __init__(self, suite: SchedulerSuite) -> None:
        super().__init__()
        self.world = suite.world(pages=20, tokens=16, running=3, drafts=2)

    @rule(prompt=st.integers(1, 40), output=st.integers(1, 20), priority=st.integers(0, 2), client=CLIENT)
    def add(self, prompt: int, output: int, priority: int, client: str) -> None:
        self.world.add(prompt, output, priority, client)

    @rule(n=st.integers(1, 5))
    def steps(self, n: int) -> None:
        for _ in range(n):
            self.world.step()

    @precondition(lambda self: self.world.waiting or self.world.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [*self.world.waiting, *self.world.running]
        self.world.remove(alive[data.draw(st.integers(0, len(alive) - 1), "sequence")])

    @rule()
    def drain(self) -> None:
        self.world.run(2000)
        left = [*self.world.waiting, *self.world.running]
        assert not left, f"{len(left)} sequences never end: {left[:3]}"

    @invariant()
    def obeys(self) -> None:
        assert not self.world.broken, "; ".join(f"{rule}: {text}" for rule, text in self.world.broken.items())

    def teardown(self) -> None:
        self.drain()


class PrefixCacheMachine(RuleBasedStateMachine):
    """Requests that share beginnings: they match and lock, insert and unlock, while memory runs short."""

    TOKENS = st.lists(st.integers(0, 1), max_size=5)
    SALT = st.sampled_from(["", "a"])

    def __init__(self, suite: PrefixCacheSuite) -> None:
        super().__init__()
        self.suite = suite
        self.ledger = suite.ledger()
        self.locked: list[Any] = []

    def tokens(self, pages: list[int]) -> tuple[int, ...]:
        """Pages of one repeated token each, so that beginnings often meet."""
        return tuple(token for token in pages for _ in range(self.suite.page_size))

    @rule(pages=TOKENS, tail=st.integers(0, 2), salt=SALT)
    def insert(self, pages: list[int], tail: int, salt: str) -> None:
        self.ledger.insert((*self.tokens(pages), *range(7, 7 + tail)), salt)

    @rule(pages=TOKENS, salt=SALT)
    def match_and_lock(self, pages: list[int], salt: str) -> None:
        tokens = self.tokens(pages)
        match = self.ledger.match(tokens, salt)
        if "whole_prompts_only" not in self.suite.card.provides:
            self.ledger.assert_longest(match, tokens, salt)
        self.ledger.lock(match)
        self.locked.append(match)

    @rule(pages=TOKENS, salt=SALT)
    def insert_and_lock(self, pages: list[int], salt: str) -> None:
        _, match = self.ledger.insert(self.tokens(pages), salt)
        self.ledger.lock(match)
        self.locked.append(match)

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.locked) - 1), "match")
        self.ledger.unlock(self.locked.pop(index))

    @rule(n=st.integers(0, 6))
    def evict(self, n: int) -> None:
        self.ledger.evict(n)

    @rule()
    def drain(self) -> None:
        for match in self.locked:
            self.ledger.unlock(match)
        self.locked = []
        self.ledger.evict(1000)
        assert self.ledger.cache.n_pages == 0, f"{self.ledger.cache.n_pages} pages stay though none is locked"

    @invariant()
    def counted(self) -> None:
        self.ledger.assert_counted()


class DrafterMachine(RuleBasedStateMachine):
    """Sequences that start, take some drafts and not others, are preempted and end."""

    def __init__(self, suite: DrafterSuite) -> None:
        super().__init__()
        self.suite = suite
        self.drafter = suite.drafter()
        self.texts: dict[str, list[int]] = {}
        self.seen: dict[str, int] = {}
        self.names = count()

    @rule(prompt=st.lists(st.integers(0, 7), min_size=1, max_size=20))
    def start(self, prompt: list[int]) -> None:
        self.texts[f"s{next(self.names)}"] = prompt

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), k=st.integers(1, 4), temperature=st.sampled_from([0.0, 1.0]))
    def step(self, data: st.DataObject, k: int, temperature: float) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.texts)), unique=True, max_size=4), "sequences")
        views = [self._view(name, k, temperature) for name in chosen]
        for name, draft in zip(chosen, self.suite.proposed(self.drafter, views), strict=True):
            assert len(draft.tokens) <= k, f"{len(draft.tokens)} tokens drafted where k is {k}"
            assert all(0 <= token < 8 for token in draft.tokens), f"drafted {draft.tokens} of a vocabulary of 8"
            kept = data.draw(st.integers(0, len(draft.tokens)), "accepted")
            self.texts[name] += [*draft.tokens[:kept], data.draw(st.integers(0, 7), "token")]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), ends=st.booleans())
    def end_or_preempt(self, data: st.DataObject, ends: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.texts)), "sequence")
        self.drafter.forget(name)
        self.seen.pop(name, None)
        if ends:
            del self.texts[name]

    def _view(self, name: str, k: int, temperature: float) -> DraftView:
        text = self.texts[name]
        new, self.seen[name] = len(text) - self.seen.get(name, 0), len(text)
        return self.suite.view(text, k, name, temperature, new)


class ReductionMachine(RuleBasedStateMachine):
    """Sequences that start, are prefilled in chunks, decode, and end or are preempted, beside each other."""

    def __init__(self, suite: ReductionSuite) -> None:
        super().__init__()
        self.suite = suite
        self.part = suite.reduction()
        self.live: dict[str, Running] = {}
        self.names = count()

    @rule(prompt=st.integers(1, 1400))
    def start(self, prompt: int) -> None:
        name = f"s{next(self.names)}"
        self.live[name] = self.suite.running(self.part, name, prompt)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), n_tokens=st.integers(1, 300), times=st.integers(1, 4))
    def step(self, data: st.DataObject, n_tokens: int, times: int) -> None:
        seq = self.live[data.draw(st.sampled_from(sorted(self.live)), "sequence")]
        for _ in range(times):
            left = seq.prompt - seq.computed
            seq.step(min(left, n_tokens) if left > 0 else 1)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)), "sequence")
        self.part.ended(name)
        del self.live[name]

"""Conformance of a scheduler: every plan obeys the contract, and everything runs in the end."""

from __future__ import annotations

import gc
import weakref
from functools import cached_property
from typing import ClassVar

from core.interfaces import BuildContext, Scheduler
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.testing.world import FakeSequence, World
from core.types import Budget


class SchedulerSuite(SameOutput, Suite):
    """Checks of a `scheduler` part. The contract's rules are judged in simulated serving, one check a rule."""

    seam: ClassVar[str] = "scheduler"

    def world(self, *, pages: int = 64, tokens: int = 32, running: int = 4, drafts: int = 0) -> World:
        context = BuildContext(page_size=4, max_model_len=pages * 4, max_running=running, token_budget=tokens)
        scheduler: Scheduler = self.build(context, max_running=running, token_budget=tokens)
        return World(scheduler, pages=pages, budget=Budget(tokens, running), drafts=drafts)

    @cached_property
    def served(self) -> World:
        """Mixed requests, more than fit at once, with drafts, cached prefixes and shortage of memory."""
        world = self.world(pages=24, drafts=3)
        world.cached = lambda seq: 8 if int(seq.id[1:]) % 3 == 0 else 0
        for n in range(40):
            world.add(prompt=1 + (n * 7) % 45, output=1 + (n * 5) % 20, priority=n % 3, client="ab"[n % 2])
        world.run(4000)
        return world

    def _holds(self, rule: str) -> None:
        broken = self.served.broken.get(rule)
        assert broken is None, broken

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_plans_running_sequences_only(self) -> None:
        self._holds("running_only")
        self._holds("live_only")

    def test_l1_plans_each_sequence_once(self) -> None:
        self._holds("once")

    def test_l1_plans_no_more_than_is_left(self) -> None:
        self._holds("tokens_left")

    def test_l1_plans_reserved_tokens_only(self) -> None:
        self._holds("reserved")

    def test_l1_stays_within_the_token_budget(self) -> None:
        self._holds("token_budget")

    def test_l1_stays_within_the_running_limit(self) -> None:
        self._holds("running_limit")

    def test_l1_uses_memory_as_agreed(self) -> None:
        for rule in ("memory_verbs", "plan_type", "queues_change_by_memory_only"):
            self._holds(rule)

    def test_l1_always_moves(self) -> None:
        self._holds("progress")

    def test_l1_everything_finishes(self) -> None:
        left = [*self.served.waiting, *self.served.running]
        assert not left, f"{len(left)} of 40 requests never end, {self.served.steps} steps on; the first is {left[0]}"

    def test_l1_an_empty_engine_plans_nothing(self) -> None:
        plan = self.world().step()
        assert plan.items == (), f"with no sequence at all it plans {plan.items}"

    def test_l1_prompts_beyond_the_budget_run_in_chunks(self) -> None:
        world = self.world(tokens=8)
        world.add(prompt=50, output=3)
        world.run(200)
        assert world.finished, f"a prompt of 50 tokens never ends with a budget of 8: {world.broken or world.running}"

    def test_l1_two_that_outgrow_memory_both_finish(self) -> None:
        world = self.world(pages=10)
        for _ in range(2):
            world.add(prompt=8, output=28)
        world.run(2000)
        assert len(world.finished) == 2, (
            f"two sequences that grow to 36 tokens each, in 40 tokens of memory: {len(world.finished)} finished, "
            f"{world.preemptions} preemptions; {next(iter(world.broken.values()), '')}"
        )

    def test_l1_nobody_starves(self) -> None:
        self.skip_if("unfair", "it may put a request off for ever")
        world = self.world(pages=24)
        for _ in range(8):
            world.add(prompt=6, output=6)
        large = world.add(prompt=60, output=8, client="large")
        for _ in range(1000):
            if large.id in world.finished:
                return
            world.step()
            if len(world.waiting) < 12:
                world.add(prompt=6, output=6, client="small")
        raise AssertionError(f"a prompt of 60 tokens waits through 1,000 steps of small arrivals: {large}")

    def test_l1_ended_sequences_are_forgotten(self) -> None:
        world = self.world(pages=400)
        ended = []
        for n in range(50):
            seq = world.add(prompt=4, output=50)
            ended.append(weakref.ref(seq))
            world.step()
            if n % 2:
                world.remove(seq)
        for seq in [*world.waiting, *world.running]:
            world.remove(seq)
        del seq
        world.step()
        assert "live_only" not in world.broken, world.broken["live_only"]
        gc.collect()
        kept = sum(ref() is not None for ref in ended)
        assert kept <= 1, f"the scheduler still holds {kept} of 50 sequences that have ended"

    def test_l1_schedulers_are_independent(self) -> None:
        one, other = self.world(), self.world()
        one.add(prompt=5, output=5)
        one.step()
        plan = other.step()
        assert plan.items == (), f"a second scheduler plans the first one's sequences: {plan.items}"

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from core.testing.hypothesis_settings import run_machine
        from core.testing.machines import SchedulerMachine

        run_machine(lambda: SchedulerMachine(self))

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        small, large = self._plan_cost(100), self._plan_cost(1_000)
        assert_cost(small, self.declared("cost_us", self.cost_us), "a plan, 16 running and 100 waiting,")
        assert_growth(small, large, self.declared("growth", 1), "a plan, with 10 times the waiting requests,")

    def _plan_cost(self, waiting: int) -> Cost:
        world = self.world(pages=16 * 64, tokens=64, running=16)
        for _ in range(16):
            world.add(prompt=4, output=200)
        for _ in range(20):
            world.step()
        for n in range(waiting):
            world.add(prompt=4 + n % 9, output=20, priority=n % 3, client=f"c{n % 7}")
        return microseconds(world.step, repeats=5, at_least_s=0.001)


__all__ = ["FakeSequence", "SchedulerSuite", "World"]

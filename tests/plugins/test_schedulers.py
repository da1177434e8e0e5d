"""Schedulers in simulated serving: every plan is judged, everything ends, and each keeps its own order."""

import time
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.interfaces import BuildContext
from core.interfaces.scheduling import BatchingOptions
from core.testing.world import World
from core.types import Budget, Queues
from plugins.scheduler.continuous import ContinuousScheduler
from plugins.scheduler.static import StaticScheduler

SCHEDULERS = {
    "static": (StaticScheduler, BatchingOptions),
    "continuous": (ContinuousScheduler, BatchingOptions),
}
ALL = pytest.mark.parametrize("name", SCHEDULERS)


def world(name="continuous", *, pages=64, tokens=32, running=4, drafts=0, **options):
    part, model = SCHEDULERS[name]
    scheduler = part(model(max_running=running, token_budget=tokens, **options), BuildContext())
    return World(scheduler, pages=pages, budget=Budget(tokens, running), drafts=drafts)


def planned(step):
    return {item.id: item.n_tokens for item in step.items}


class Serving(RuleBasedStateMachine):
    name = "continuous"

    @initialize(
        pages=st.integers(8, 40),
        tokens=st.integers(1, 40),
        running=st.integers(1, 6),
        drafts=st.integers(0, 3),
        chunked=st.booleans(),
    )
    def start(self, pages, tokens, running, drafts, chunked):
        self.world = world(
            self.name, pages=pages, tokens=tokens, running=running, drafts=drafts, chunked_prefill=chunked
        )

    @rule(
        prompt=st.integers(1, 24),
        output=st.integers(1, 8),
        priority=st.integers(0, 2),
        client=st.sampled_from("abc"),
    )
    def add(self, prompt, output, priority, client):
        self.world.add(prompt, output, priority, client)

    @precondition(lambda self: self.world.waiting or self.world.running)
    @rule(data=st.data())
    def leave(self, data):
        self.world.remove(data.draw(st.sampled_from([*self.world.waiting, *self.world.running])))

    @rule(n=st.integers(1, 6))
    def step(self, n):
        for _ in range(n):
            self.world.step()

    @invariant()
    def keeps_the_rules(self):
        if hasattr(self, "world"):
            assert not self.world.broken, self.world.broken

    def teardown(self):
        if hasattr(self, "world"):
            self.world.run(5000)
            assert not self.world.broken, self.world.broken
            assert not self.world.waiting and not self.world.running


@ALL
def test_serves_in_any_order_of_events(name):
    machine = type(name, (Serving,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


@ALL
def test_every_decode_gets_a_token_while_a_long_prompt_is_computed(name):
    served = world(name, tokens=16)
    streams = [served.add(4, 50) for _ in range(3)]
    served.step()
    long = served.add(60, 2) if name != "static" else None
    for _ in range(5):
        step = planned(served.step())
        assert all(step[seq.id] == 1 for seq in streams)
        assert sum(step.values()) <= 16
    assert name == "static" or long.id in served.started


def test_without_chunked_prefill_streams_wait_for_prompts():
    served = world(tokens=16, chunked_prefill=False)
    stream = served.add(4, 50)
    served.step()
    long = served.add(40, 2)
    stalled = [planned(served.step()) for _ in range(3)]
    assert [step.get(long.id) for step in stalled] == [16, 16, 8]
    assert not any(stream.id in step for step in stalled)
    assert stream.id in planned(served.step())


def test_a_static_batch_ends_before_the_next_begins():
    served = world("static", running=2)
    first, second, third = (served.add(4, 3 + 4 * n) for n in range(3))
    while second.id not in served.finished:
        served.step()
        assert third.id not in served.started
    served.step()
    assert served.started.keys() == {first.id, second.id, third.id}


def test_a_static_batch_is_as_large_as_memory_allows_whatever_the_token_budget():
    served = world("static", tokens=8, running=3)
    for _ in range(5):
        served.add(20, 2)
    served.step()
    assert len(served.running) == 3


def test_continuous_fills_a_place_at_once():
    served = world(running=2)
    first, _, third = (served.add(4, 3 + 4 * n) for n in range(3))
    while first.id not in served.finished:
        served.step()
    served.step()
    assert third.id in served.started


def test_continuous_admits_in_order_of_arrival_and_stops_at_the_first_that_does_not_fit():
    served = world(pages=8)
    first, large, small = served.add(12, 4), served.add(28, 2), served.add(4, 2)
    served.step()
    assert served.started.keys() == {first.id}
    served.run(100)
    assert served.started[large.id] <= served.started[small.id]


def test_a_decode_that_finds_no_memory_preempts_the_last_admitted():
    served = world(pages=6)
    first, second = served.add(8, 12), served.add(8, 12)
    while not served.preemptions:
        served.step()
        assert first in served.running
    assert second in served.waiting
    served.run(200)
    assert served.finished == [first.id, second.id]


def test_drafts_are_verified_when_budget_and_memory_allow():
    served = world(tokens=6, running=2, pages=10)
    one, other = served.add(3, 30), served.add(3, 30)
    served.step()
    one._state.num_drafts, other._state.num_drafts = 3, 3
    step = planned(served.step())
    assert step == {one.id: 4, other.id: 2}


def test_drafts_do_not_preempt():
    served = world(pages=2, tokens=64, running=2)
    one, other = served.add(4, 4), served.add(3, 4)
    one._state.max_total = other._state.max_total = 100
    served.pages = 3
    served.step()
    one._state.num_drafts = other._state.num_drafts = 6
    step = planned(served.step())
    assert step == {one.id: 1, other.id: 1} and not served.preemptions


@dataclass
class Waiting:
    id: str
    arrival: float
    num_tokens: int = 100
    num_prompt_tokens: int = 100
    num_computed: int = 0
    num_drafts: int = 0
    max_total: int = 200
    priority: int = 0
    client: str = ""


@dataclass
class Full:
    """Memory that admits nobody."""

    asked: list[str] = field(default_factory=list)

    def admit(self, seq):
        self.asked.append(seq.id)
        return False

    def reserve(self, seq, n_tokens):
        return True

    def preempt(self, seq):
        raise AssertionError("nobody needs to go")

    def cached_tokens(self, seq):
        return 0


@ALL
def test_a_step_costs_nearly_nothing_a_waiting_request(name):
    def step_time(n_waiting):
        part, model = SCHEDULERS[name]
        scheduler = part(model(), BuildContext())
        waiting = [Waiting(f"w{n}", float(n), priority=n % 3, client=f"c{n % 50}") for n in range(n_waiting)]
        running = [Waiting(f"r{n}", 0.0, num_tokens=101, num_computed=100) for n in range(8)]
        for seq in waiting:
            scheduler.added(seq)
        queues, best = Queues(waiting, running), float("inf")
        for _ in range(20):
            start = time.perf_counter()
            plan = scheduler.plan(queues, Budget(256, 16), Full())
            best = min(best, time.perf_counter() - start)
        assert len(plan.items) == 8
        return best

    few, many = step_time(10), step_time(10_000)
    assert many < 3 * few + 50e-6, f"{few * 1e6:.0f} us with 10 waiting, {many * 1e6:.0f} us with 10,000"

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
from plugins.scheduler import (
    CacheAwareOptions,
    FairOptions,
    PriorityOptions,
    ShortestFirstOptions,
    SloOptions,
)
from plugins.scheduler.cache_aware import CacheAwareScheduler
from plugins.scheduler.continuous import ContinuousScheduler
from plugins.scheduler.fair import REMEMBERED, FairScheduler
from plugins.scheduler.priority import PriorityScheduler
from plugins.scheduler.shortest_first import ShortestFirstScheduler
from plugins.scheduler.slo import SloScheduler
from plugins.scheduler.static import StaticScheduler

SCHEDULERS = {
    "static": (StaticScheduler, BatchingOptions),
    "continuous": (ContinuousScheduler, BatchingOptions),
    "priority": (PriorityScheduler, PriorityOptions),
    "shortest_first": (ShortestFirstScheduler, ShortestFirstOptions),
    "fair": (FairScheduler, FairOptions),
    "cache_aware": (CacheAwareScheduler, CacheAwareOptions),
    "slo": (SloScheduler, SloOptions),
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


def test_priority_takes_the_place_of_lower_classes():
    served = world("priority", running=2, ageing=1000)
    low = [served.add(8, 30, priority=2) for _ in range(2)]
    served.step()
    high = served.add(8, 4, priority=0)
    served.step()
    assert high.id in served.started and served.preemptions == 1 and low[1] in served.waiting
    served.run(300)
    assert served.finished[0] == high.id and len(served.finished) == 3


def test_priority_makes_room_in_memory_too():
    served = world("priority", pages=8, ageing=1000)
    low = [served.add(8, 8, priority=1) for _ in range(3)]
    served.step()
    high = served.add(20, 4, priority=0)
    served.step()
    assert high.id in served.started and low[0] in served.running and low[1] in served.waiting


def test_priority_does_not_preempt_its_own_class():
    served = world("priority", running=1, ageing=1000)
    served.add(8, 8, priority=1)
    served.step()
    served.add(8, 8, priority=1)
    served.run(5)
    assert not served.preemptions


def test_priority_ages():
    served = world("priority", running=1, ageing=5)
    old = served.add(4, 4, priority=1)
    for _ in range(40):
        served.add(4, 4, priority=0)
    served.run(500)
    assert 4 <= served.finished.index(old.id) <= 6


def test_shortest_first_and_its_bound():
    served = world("shortest_first", running=1, ageing=10)
    served.add(4, 20)
    served.step()
    long = served.add(4, 60)
    for _ in range(30):
        served.add(4, 4)
    served.run(500)
    place = served.finished.index(long.id)
    assert 4 <= place <= 1 + 60 / 10 + 1, "overtaken by more than arrived within its length of ageing"


def test_shortest_first_believes_what_the_caller_expects():
    served = world("shortest_first", running=1, ageing=1)
    served.add(4, 4)
    served.step()
    allowed = [served.add(4, 50) for _ in range(3)]
    for seq, predicted in zip(allowed, (40, 4, 20), strict=True):
        seq._state.predicted_total = 4 + predicted
    short = served.add(4, 10)
    for seq in allowed:
        served.scheduler.added(seq)
    served.run(400)
    assert served.finished[1:] == [allowed[1].id, short.id, allowed[2].id, allowed[0].id]


def test_fair_serves_clients_alike_however_much_they_ask():
    served = world("fair", running=4, pages=200)
    for _ in range(60):
        served.add(6, 8, client="greedy")
    for _ in range(6):
        served.add(6, 8, client="modest")
    while not all(seq.client == "greedy" for seq in served.waiting):
        served.step()
    done = [served.started[f"s{n}"] for n in range(60) if f"s{n}" in served.started]
    assert len(done) <= 6 + 5, "the greedy client got more than the modest one and a batch"


def test_fair_bounds_what_one_client_gets_ahead():
    served = world("fair", running=3, pages=200, tokens=24)
    scheduler = served.scheduler
    for n in range(200):
        served.add(4 + n % 9, 2 + n % 5, client="ab"[n % 2])
        served.add(20, 12, client="a")
    bound = 2 * max(20, 2 * 3)
    while served.waiting:
        served.step()
        if {"a", "b"} <= {seq.client for seq in served.waiting}:
            assert abs(scheduler._charges["a"] - scheduler._charges["b"]) <= bound


def test_fair_does_not_save_up_for_who_was_idle():
    served = world("fair", running=1)
    for _ in range(30):
        served.add(4, 4, client="busy")
    for _ in range(60):
        served.step()
    late = [served.add(4, 4, client="late") for _ in range(10)]
    started = len(served.started)
    served.run(500)
    after = sorted(served.started, key=served.started.get)[started:]
    assert [seq.id in after[:8] for seq in late].count(True) <= 5


def test_fair_forgets_clients():
    served = world("fair", running=1)
    for n in range(REMEMBERED + 200):
        served.add(1, 1, client=f"client {n}")
        served.run(3)
    assert len(served.scheduler._charges) <= REMEMBERED + 10


def test_cache_aware_prefers_cached_prefixes_and_bounds_the_wait():
    served = world("cache_aware", running=1, patience=3)
    served.cached = lambda seq: 8 if int(seq.id[1:]) % 2 else 0
    for _ in range(20):
        served.add(12, 3)
    served.run(500)
    assert served.finished[:3] == ["s1", "s3", "s5"] and served.finished.index("s0") == 3
    assert not served.waiting


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_slo_admits_first_what_can_still_be_met():
    served = world("slo", running=1, ttft_ms=10_000, grace=3)
    clock = served.scheduler.clock = Clock()
    for _ in range(5):
        served.add(4, 4)
    served.step()
    clock.now = 12.5
    served.run(40)
    assert served.finished == ["s0", "s3", "s4", "s1", "s2"]


class TimedWorld(World):
    """Each sequence in a step takes `seconds(n_tokens)`."""

    def _compute(self, seq, n_tokens):
        self.scheduler.clock.now += self.seconds(n_tokens)
        super()._compute(seq, n_tokens)


def timed(seconds, **options):
    plain = world("slo", **options)
    served = TimedWorld(plain.scheduler, pages=500, budget=plain.budget)
    served.seconds = seconds
    served.scheduler.clock = Clock()
    return served


def test_slo_knows_a_prompt_token_from_a_step_of_decodes():
    """A long prompt whose target can be met comes before a short one that has missed its own, though steps that only
    decode take much longer a token than prompts do."""
    served = timed(lambda n: 0.02 + 0.0002 * n, running=2, tokens=64, ttft_ms=2000, itl_ms=1000)
    served.add(64, 400)
    for _ in range(50):
        served.step()
    served.add(4, 4)
    long = served.add(500, 4)
    served.scheduler.clock.now = 3.5
    served.run(30)
    assert served.started.keys() >= {long.id} and served.finished[0] == long.id


def test_slo_puts_off_a_prompt_that_is_too_long_to_be_met():
    served = timed(lambda n: 0.01 * n, running=1, tokens=64, ttft_ms=3000)
    served.add(200, 2)
    served.run(10)
    served.add(900, 2)
    short = served.add(20, 2)
    served.run(60)
    assert served.finished[1] == short.id and len(served.finished) == 3


def test_slo_counts_what_met_its_targets():
    pace = [0.01]
    served = timed(lambda n: pace[0] * n, running=1, ttft_ms=1000, itl_ms=50)
    for prompt, slow in ((10, 0.01), (300, 0.01), (10, 0.01), (10, 0.06)):
        served.add(prompt, 5)
        pace[0] = 0.01
        while not served.running or served.running[0].remaining > 1:
            served.step()
        pace[0] = slow
        served.run(50)
    counts = served.scheduler.stats()
    assert counts == {"ended": 4, "met_ttft": 2, "met_itl": 3, "met_targets": 1}
    served.remove(served.add(4, 4))
    assert served.scheduler.stats() == {**counts, "ended": 5}


def test_slo_lets_nobody_wait_for_ever():
    served = world("slo", running=1, ttft_ms=10_000, grace=3)
    clock = served.scheduler.clock = Clock()
    for _ in range(5):
        served.add(4, 4)
    clock.now = 41.5
    served.run(40)
    assert served.finished[:2] == ["s0", "s1"]


def test_slo_cuts_steps_to_the_target_between_tokens():
    served = world("slo", tokens=32, itl_ms=10)
    clock = served.scheduler.clock = Clock()
    stream = served.add(2, 100)
    sizes = []
    for step in range(40):
        plan = planned(served.step())
        sizes.append(sum(plan.values()))
        clock.now += 0.001 * sizes[-1]
        if step == 5:
            served.add(100, 5)
        assert stream.id in plan
    assert max(sizes[7:12]) == 10


@dataclass
class Waiting:
    id: str
    arrival: float
    num_tokens: int = 100
    num_prompt_tokens: int = 100
    num_computed: int = 0
    num_drafts: int = 0
    max_total: int = 200
    predicted_total: int = 200
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
            start = time.thread_time()
            plan = scheduler.plan(queues, Budget(256, 16), Full())
            best = min(best, time.thread_time() - start)
        assert len(plan.items) == 8
        return best

    few, many = step_time(10), step_time(10_000)
    assert many < 3 * few + 50e-6, f"{few * 1e6:.0f} us with 10 waiting, {many * 1e6:.0f} us with 10,000"

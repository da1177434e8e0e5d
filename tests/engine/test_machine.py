"""Requests come, go, fork, are aborted and preempted in any order: pages are conserved and greedy output stays."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.registry import Registry
from core.types import InvalidRequest
from tests.engine.toy import NULL, VOCAB, ToyModel, generate, outputs, request, toy_engine

STEM = [(7 * i) % VOCAB for i in range(24)]
MODELS = [ToyModel((None, None)), ToyModel((6, None))]


@cache
def _alone(model: int, prompt: tuple[int, ...]) -> list[int]:
    return generate(toy_engine(MODELS[model], **NULL, kv_tokens=2048), [prompt], max_tokens=20)[0]


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        model=st.sampled_from([0, 1]),
        allocator=st.sampled_from(Registry().names("kv_allocator")),
        scheduler=st.sampled_from(Registry().names("scheduler")),
        preemption=st.sampled_from(["swap", "recompute"]),
        cache=st.sampled_from(Registry().names("prefix_cache")),
        eviction=st.sampled_from(Registry().names("prefix_cache.eviction")),
        kv=st.sampled_from(["none", "none", "int8", "int4"]),
        reduction=st.one_of(st.just("none"), st.sampled_from(Registry().names("context_reduction"))),
        drafter=st.sampled_from(["none", "ngram"]),
        page_size=st.sampled_from([1, 4, 16]),
        budget=st.sampled_from([3, 16]),
        kv_tokens=st.sampled_from([96, 160, 400]),
    )
    def start(self, model: int, reduction: str, preemption: str, kv: str, **parts: Any) -> None:
        self.model = model
        self.lossless = reduction == kv == "none"
        small = {"sink_window": {"sinks": 1, "window": 8}, "h2o": {"recent": 6, "heavy": 4}, "snapkv": {"budget": 8}}
        options = {"context_reduction": small.get(reduction, {}), "scheduler": {"preemption": preemption}}
        parts["kv_tokens"] = {
            "none": parts["kv_tokens"],
            "int8": parts["kv_tokens"] // 3,
            "int4": parts["kv_tokens"] // 4 + 13 * parts["page_size"],  # what its tails take, whatever the pages
        }[kv]
        self.engine = toy_engine(
            MODELS[model], reduction=reduction, kv=kv, options=options, **parts, max_model_len=64
        )
        self.live: dict[str, tuple[tuple[int, ...], int, str]] = {}
        self.events: list = []
        self.aborted: set[str] = set()

    @rule(
        shared=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 3]),
        salt=st.sampled_from(["", "a"]),
        priority=st.integers(0, 2),
    )
    def add(self, shared: int, tail: list[int], max_tokens: int, n: int, salt: str, priority: int) -> None:
        prompt, client = STEM[:shared] + tail, "ab"[priority % 2]
        item = request(prompt, max_tokens=max_tokens, n=n, salt=salt, priority=priority, client=client)
        try:
            self.engine.add(item)
        except InvalidRequest as error:
            assert "pages" in str(error)
            return
        self.live[item.id] = (item.prompt, max_tokens, salt)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.abort(id)
        self.engine.abort(id)
        self.aborted.add(id)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.events += self.engine.step()
            self.engine.check()

    @precondition(lambda self: len(self.engine.running))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(list(self.engine.running)))
        self.engine.preempt(seq)
        self.engine.scheduler.added(seq)  # as a scheduler that preempts tells itself

    @rule()
    def flush(self) -> None:
        self.engine.memory.flush()

    @invariant()
    def pages_are_conserved(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert not self.engine.has_work
        assert not [event.error for event in self.events if event.error]
        for (id, _), tokens in outputs(self.events).items():
            prompt, max_tokens, _ = self.live[id]
            expected = _alone(self.model, prompt)[:max_tokens] if self.lossless else tokens
            assert id in self.aborted or len(tokens) == max_tokens
            assert tokens == (expected[: len(tokens)] if id in self.aborted else expected)
        self._all_is_free()

    def _all_is_free(self) -> None:
        for group in self.engine.stats()["kv"].values():
            assert group["held"] == group.get("host_held", 0) == 0
        self.engine.memory.flush()
        for group in self.engine.stats()["kv"].values():
            assert group["free"] == group["pages"] and group.get("host_cached", 0) == 0


@pytest.mark.parametrize("examples", [40])
def test_any_order_of_events(examples: int) -> None:
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )

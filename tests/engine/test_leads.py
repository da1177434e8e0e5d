"""What several sequences begin with is computed once, also while the first of them is still computing it."""

from __future__ import annotations

from functools import cache

import pytest

from core.types import PartFault
from tests.engine.toy import NULL, VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

STEM = [(5 * i + 3) % VOCAB for i in range(24)]
TAILS = [[1, 2], [3], [4, 5, 6], [7, 8, 9, 10, 11], [12], [13, 14]]
PROMPTS = [STEM + tail for tail in TAILS]
MODELS = {"full": (None, None), "mixed": (8, None), "window": (8, 8)}
MANY = {"kv_tokens": 1024, "max_model_len": 128}


@cache
def _alone(kind="full"):
    return [generate(toy_engine(ToyModel(MODELS[kind]), **NULL, **MANY), [p], max_tokens=10)[0] for p in PROMPTS]


def _computed(engine, prompts, **params):
    found = generate(engine, prompts, **params)
    return found, engine.stats()["computed_tokens"]


@pytest.mark.parametrize("scheduler", ["static", "continuous", "fair", "cache_aware"])
@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("budget", [5, 16, 64])
def test_a_new_prefix_of_many_is_computed_once(scheduler, prefix_cache, budget):
    engine = toy_engine(scheduler=scheduler, cache=prefix_cache, budget=budget, running=8, **MANY)
    found, computed = _computed(engine, PROMPTS, max_tokens=1)
    assert computed == len(STEM) + sum(map(len, TAILS))
    assert found == [tokens[:1] for tokens in _alone()]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("budget", [3, 7, 30, 200])
@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_sharing_changes_nothing(kind, budget, allocator):
    parts = {"cache": "radix", "budget": budget, "allocator": allocator, "drafter": "ngram"}
    engine = toy_engine(ToyModel(MODELS[kind]), **parts, **MANY)
    assert generate(engine, PROMPTS, max_tokens=10) == _alone(kind)
    assert generate(engine, PROMPTS[::-1], max_tokens=10) == _alone(kind)[::-1]


def test_without_a_cache_each_computes_its_own():
    _, computed = _computed(toy_engine(cache="none", budget=64, **MANY), PROMPTS, max_tokens=1)
    assert computed == sum(map(len, PROMPTS))


def test_exact_shares_whole_prompts_only():
    engine = toy_engine(cache="exact", budget=64, **MANY)
    _, computed = _computed(engine, [PROMPTS[0], PROMPTS[3]], max_tokens=1)
    assert computed == len(PROMPTS[0]) + len(PROMPTS[3])
    _, computed = _computed(toy_engine(cache="exact", budget=64, **MANY), [PROMPTS[0]] * 3, max_tokens=1)
    assert computed == len(PROMPTS[0]) + 2 * (len(PROMPTS[0]) % 4)


def test_salts_do_not_share():
    engine = toy_engine(cache="radix", budget=64, **MANY)
    for salt in ("a", "b"):
        engine.add(request(PROMPTS[0], salt=salt, max_tokens=1))
    drain(engine)
    assert engine.stats()["computed_tokens"] == 2 * len(PROMPTS[0])


def test_a_prefix_is_shared_while_it_is_being_prefilled():
    engine = toy_engine(cache="radix", budget=8, **MANY)
    engine.add(request(STEM + TAILS[0], id="first", max_tokens=4))
    events = engine.step()
    assert engine.running[0].num_computed == 8
    engine.add(request(STEM + TAILS[1], id="second", max_tokens=4))
    events += drain(engine)
    assert engine.stats()["computed_tokens"] == len(STEM) + len(TAILS[0]) + len(TAILS[1]) + 2 * 3
    found = outputs(events)
    assert [found["first", 0], found["second", 0]] == [tokens[:4] for tokens in _alone()[:2]]


@pytest.mark.parametrize("end", ["abort", "preempt"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_who_followed_computes_alone_when_the_leader_goes(end, steps):
    engine = toy_engine(cache="radix", budget=9, **MANY)
    items = [request(prompt, max_tokens=10) for prompt in PROMPTS[:4]]
    for item in items:
        engine.add(item)
    events = []
    for _ in range(steps):
        events += engine.step()
    while not engine.memory.leads.followers(engine.running[0]) and len(engine.running) < 4:
        engine.admit(engine.waiting[0])
    engine.check()
    if end == "abort":
        engine.abort(items[0].id)
    else:
        engine.preempt(engine.running[0])
    engine.check()
    found = outputs(events + drain(engine))
    for number, item in enumerate(items):
        if number or end == "preempt":
            assert found[item.id, 0] == _alone()[number]
    assert engine.stats()["kv"]["full"]["held"] == 0


def test_a_leader_that_fails_takes_none_with_it():
    engine = toy_engine(cache="radix", budget=64, **MANY)
    items = [request(prompt, max_tokens=10) for prompt in PROMPTS[:3]]
    for item in items:
        engine.add(item)
    run = engine.runner.run

    def failing(batch, rows):
        if batch.query_starts[1] == len(PROMPTS[0]) and batch.kv_lens[0] == len(PROMPTS[0]):
            raise PartFault("the first one does not compute")
        return run(batch, rows)

    engine.runner.run = failing
    events = drain(engine)
    errors = {event.id for event in events if event.error}
    assert errors == {items[0].id}
    assert [outputs(events)[item.id, 0] for item in items[1:]] == _alone()[1:3]

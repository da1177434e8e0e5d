"""Two tiers of memory: what is preempted or idle is copied out, and copied in before it is used."""

from __future__ import annotations

import pytest
import torch

from tests.engine.toy import VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

PROMPTS = [[(3 * i + 11 * n) % VOCAB for i in range(30)] for n in range(6)]
MODELS = {"full": (None, None), "mixed": (8, None), "window": (8, 8)}


def _engine(kind="full", host_ratio=4.0, preemption="swap", **parts):
    parts = {"kv_tokens": 200, "budget": 16, "max_model_len": 96, **parts}
    options = {"kv_allocator": {"host_ratio": host_ratio}, "scheduler": {"preemption": preemption}}
    if parts.get("allocator", "tiered") != "tiered":
        del options["kv_allocator"]
    return toy_engine(ToyModel(MODELS[kind]), allocator=parts.pop("allocator", "tiered"), options=options, **parts)


def _preempted(engine, prompts):
    """Greedy tokens of all prompts, while now and then the last one admitted is preempted."""
    items = [request(prompt, max_tokens=50) for prompt in prompts]
    for item in items:
        engine.add(item)
    events = []
    for step in range(60):
        events += engine.step()
        if step % 7 == 6 and engine.running:
            engine.preempt(engine.running[-1])
            engine.check()
    found = outputs(events + drain(engine))
    return [found[item.id, 0] for item in items]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("cache", ["none", "radix"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_swapping_changes_nothing(kind, cache, drafter):
    expected = generate(_engine(kind, kv_tokens=2048), PROMPTS, max_tokens=50)
    engine = _engine(kind, cache=cache, drafter=drafter)
    assert _preempted(engine, PROMPTS) == expected
    assert engine.stats()["swaps"] > 0


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int4"])
def test_stored_formats_move_as_they_are(kv):
    """Also int4, whose last page lies partly elsewhere: it is computed again."""
    engine = _engine(kv=kv, kv_tokens=1024)
    expected = generate(engine, PROMPTS[:4], max_tokens=50)
    assert _preempted(engine, PROMPTS[:4]) == expected
    assert engine.stats()["swaps"] > 0


def test_swapping_saves_what_recomputing_costs():
    computed = {}
    for preemption in ("swap", "recompute"):
        engine = _engine(preemption=preemption)
        generate(engine, PROMPTS, max_tokens=50)
        computed[preemption] = engine.stats()["computed_tokens"]
        assert (engine.stats()["swaps"] > 0) == (preemption == "swap")
    assert computed["swap"] == sum(map(len, PROMPTS)) + len(PROMPTS) * 49 < computed["recompute"]


def test_a_full_host_tier_falls_back_to_computing_again():
    engine = _engine(host_ratio=0.3)
    expected = generate(_engine(kv_tokens=2048), PROMPTS, max_tokens=50)
    assert generate(engine, PROMPTS, max_tokens=50) == expected
    assert 0 < engine.stats()["swaps"] < engine.stats()["preemptions"]


def test_a_swapped_sequence_lies_in_host_memory_only():
    engine = _engine(cache="none")
    engine.add(request(PROMPTS[0], id="a", max_tokens=20))
    events = []
    while not engine.running or engine.running[0].num_computed < 33:
        events += engine.step()
    seq = engine.running[0]
    held = [engine.memory.groups[0].pool.layers[0].storage["k"][seq.tables[0].pages].clone()]
    engine.preempt(seq)
    group = engine.stats()["kv"]["full"]
    assert (group["held"], group["host_held"]) == (0, 9) and group["host_used_bytes"] > 0
    for layer in engine.memory.groups[0].pool.layers.values():
        for tensor in layer.storage.values():
            tensor.fill_(float("nan"))
    assert engine.memory.cached_tokens(seq) == 33
    assert engine.admit(seq)
    again = engine.memory.groups[0].pool.layers[0].storage["k"][seq.tables[0].pages[:9]]
    torch.testing.assert_close(again.flatten(0, 1)[:33], held[0][:9].flatten(0, 1)[:33])
    assert outputs(events + drain(engine))["a", 0] == generate(_engine(), [PROMPTS[0]], max_tokens=20)[0]
    assert engine.stats()["kv"]["full"]["host_held"] == 0


def test_ending_one_that_is_swapped_out_frees_its_pages():
    engine = _engine()
    engine.add(request(PROMPTS[0], id="a", max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.preempt(engine.running[0])
    engine.abort("a")
    drain(engine)
    assert engine.stats()["kv"]["full"]["host_held"] == 0
    engine.check()


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_an_idle_conversation_comes_back_from_the_host(cache):
    def follow_up(allocator):
        engine = _engine(allocator=allocator, cache=cache, kv_tokens=120)
        answer = generate(engine, [PROMPTS[0]], max_tokens=20)[0]
        for other in PROMPTS[1:]:
            generate(engine, [other], max_tokens=20)
        before = engine.stats()["computed_tokens"]
        found = generate(engine, [[*PROMPTS[0], *answer, 1, 2, 3]], max_tokens=8)
        return found, engine.stats()["computed_tokens"] - before

    two_tiers, one = follow_up("tiered"), follow_up("paged")
    assert two_tiers[0] == one[0]
    assert one[1] == 53 + 7 and two_tiers[1] <= 53 - 48 + 7


def test_a_salt_keeps_its_pages_to_itself_in_the_host_too():
    engine = _engine(cache="radix", kv_tokens=120)
    for number, salt in enumerate(("a", "b", "a", "b", "a")):
        engine.add(request(PROMPTS[0], id=f"{number}", salt=salt, max_tokens=1))
        generate(engine, PROMPTS[1:4], max_tokens=20)
    engine.memory.flush()
    engine.add(request(PROMPTS[0], id="after", salt="a", max_tokens=1))
    assert [event.cached_tokens for event in drain(engine)] == [0]

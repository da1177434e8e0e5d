"""Two tiers of memory: what is preempted or idle is copied out, and copied in before it is used."""

from __future__ import annotations

import pytest
import torch

from core.copies import copies_of
from core.kv import Pool
from core.serve.engine_metrics import EngineMetrics
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


def _idle_conversation():
    """An engine whose first conversation has gone to the host tier, and what that conversation goes on with."""
    engine = _engine(cache="radix", kv_tokens=120)
    answer = generate(engine, [PROMPTS[0]], max_tokens=20)[0]
    for other in PROMPTS[1:]:
        generate(engine, [other], max_tokens=20)
    return engine, [*PROMPTS[0], *answer, 1, 2, 3]


def test_a_scheduler_is_told_of_idle_pages_and_callers_of_what_they_saved():
    engine, follow_up = _idle_conversation()
    assert not engine.memory.cache.match(follow_up, "").pages
    engine.add(request(follow_up, id="again", max_tokens=2))
    told = engine.memory.cached_tokens(engine.waiting[0])
    events = drain(engine)
    assert told == events[0].cached_tokens == 48
    assert engine.stats()["cached_tokens"] >= 48


def test_host_figures_add_up():
    engine, follow_up = _idle_conversation()
    before = engine.stats()["kv"]["full"]
    assert before["host_total_bytes"] == before["host_pages"] * before["total_bytes"] // before["pages"]
    assert before["host_used_bytes"] * before["host_pages"] == before["host_total_bytes"] * before["host_cached"] > 0
    assert before["host_pages_out"] >= before["host_cached"] and before["host_pages_in"] == 0
    generate(engine, [follow_up], max_tokens=2)
    assert engine.stats()["kv"]["full"]["host_pages_in"] == 12


@pytest.mark.parametrize("cache", ["none", "radix"])
def test_no_page_is_read_or_written_before_its_copy_is_waited_for(cache):
    engine = _engine(cache=cache, kv_tokens=160)
    expected = generate(_engine(kv_tokens=2048), PROMPTS, max_tokens=50)
    open_copies = []
    copies, pool, kernel = engine.memory.tier.copies, engine.memory.groups[0].pool, engine.runner.kernel
    copy, wait, duplicate, prepare = copies.copy, copies.wait, pool.copy, kernel.prepare

    def copying(*where):
        open_copies.append(where)
        copy(*where)

    def waiting():
        open_copies.clear()
        wait()

    def settled(call):
        def checked(*args):
            assert not open_copies
            return call(*args)

        return checked

    copies.copy, copies.wait = copying, waiting
    pool.copy, kernel.prepare = settled(duplicate), settled(prepare)
    assert _preempted(engine, PROMPTS) == expected
    assert engine.stats()["swaps"] > 0


@pytest.mark.parametrize("kv", ["none", "int8"])
def test_pages_are_copied_run_by_run(kv):
    memory = _engine(kv=kv, kv_tokens=64).memory
    device, host = memory.groups[0].pool, memory.tier.host[0].pool
    for layer in device.layers.values():
        for tensor in layer.storage.values():
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 97)
    device.copy_to([3, 4, 5, 9, 1], host, [7, 8, 9, 0, 1])
    for number, layer in device.layers.items():
        for name, tensor in layer.storage.items():
            there = host.layers[number].storage[name]
            assert torch.equal(there[[7, 8, 9, 0, 1]], tensor[[3, 4, 5, 9, 1]])
            assert not there[[2, 3, 4, 5, 6]].float().any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_copies_to_pinned_memory_and_back():
    pool = _engine().memory.groups[0].pool
    device = Pool(pool.group, 0, 64, 4, pool.quantizer, torch.float32, "cuda")
    host = Pool(pool.group, 0, 64, 4, pool.quantizer, torch.float32, pinned=True)
    copies = copies_of(device)
    assert host.layers[0].storage["k"].is_pinned()
    for round in range(20):
        stored = device.layers[0].storage["k"]
        stored.fill_(round)
        copies.copy(device, range(32), host, range(32, 64))
        copies.wait()
        stored.fill_(-1)
        copies.copy(host, range(32, 64), device, range(32))
        copies.wait()
        assert bool((stored[:32] == round).all()) and bool((stored[32:] == -1).all())


def test_the_host_tier_and_goodput_are_exported():
    engine = _engine(cache="radix", kv_tokens=120, scheduler="slo")
    for prompt in PROMPTS:
        generate(engine, [prompt], max_tokens=20)
    stats = engine.stats()
    lines = EngineMetrics().text(stats).decode().splitlines()
    host = stats["kv"]["full"]
    assert f'partwise_kv_pages{{group="full",state="host_cached"}} {float(host["host_cached"])}' in lines
    assert f'partwise_kv_bytes{{group="full",state="host_used"}} {float(host["host_used_bytes"])}' in lines
    moved = 'partwise_kv_host_pages_copied_total{direction="out",group="full"}'
    assert f"{moved} {float(host['host_pages_out'])}" in lines and host["host_pages_out"] > 0
    assert 'partwise_scheduler_total{count="ended"} 6.0' in lines
    assert stats["scheduler"]["met_targets"] <= stats["scheduler"]["ended"] == len(PROMPTS)

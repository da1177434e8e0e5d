"""Context reduction while sequences run: pages are freed for real, and nobody else's."""

from __future__ import annotations

import pytest
import torch

from tests.engine.toy import VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

PROMPTS = [[(3 * i + 11 * n) % VOCAB for i in range(40)] for n in range(5)]
REDUCTIONS = {
    "sink_window": {"sinks": 4, "window": 16},
    "h2o": {"recent": 12, "heavy": 8},
    "snapkv": {"budget": 16, "window": 4, "pooled": 3},
}
MODELS = {"full": (None, None), "mixed": (8, None)}


def _engine(reduction, kind="full", options=None, **parts):
    given = {"context_reduction": REDUCTIONS[reduction] if options is None else options}
    parts = {"budget": 16, "kv_tokens": 600, **parts}
    return toy_engine(ToyModel(MODELS[kind]), reduction=reduction, options=given, **parts)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("allocator", ["paged", "contiguous", "paged_per_head"])
def test_what_is_forgotten_is_freed(reduction, kind, allocator):
    engine = _engine(reduction, kind, allocator=allocator)
    engine.add(request(PROMPTS[0], max_tokens=60))
    most = {"sink_window": 4 + 16 + 8, "h2o": 12 + 8 + 8, "snapkv": 16 + 60 + 4}[reduction]
    full = [index for index, group in enumerate(engine.memory.groups) if group.window is None]
    n_tokens = 0
    while engine.has_work:
        engine.step()
        engine.check()
        for seq in engine.running:
            n_tokens = max(n_tokens, seq.num_computed)
            for index in full if seq.num_output else ():
                table = seq.tables[index]
                assert seq.num_computed - table.start <= most
                assert len(table) * 4 + table.start >= seq.num_computed
                held = engine.memory.groups[index].n_held
                assert held == len(table)
                if allocator != "contiguous":
                    assert held * 4 <= most + 4
    assert n_tokens == 98
    assert all(group["held"] == 0 for group in engine.stats()["kv"].values())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_more_run_at_once_in_the_same_bytes(reduction):
    def most_running(name):
        engine = _engine(name, options=REDUCTIONS.get(name, {}), kv_tokens=160, budget=32)
        for prompt in PROMPTS:
            engine.add(request(prompt, max_tokens=24))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, sum(seq.num_output > 4 for seq in engine.running))
        return most

    assert most_running(reduction) > most_running("none")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_room_for_all_nothing_changes(reduction):
    roomy = {
        "sink_window": {"window": 1000}, "h2o": {"recent": 1000}, "snapkv": {"budget": 1000},
    }[reduction]  # fmt: skip
    expected = generate(toy_engine(), PROMPTS[:2], max_tokens=20)
    assert generate(_engine(reduction, options=roomy), PROMPTS[:2], max_tokens=20) == expected


def test_a_window_and_sinks_are_what_attention_reads():
    """Layer by layer, against attention written out over the tokens that are kept."""
    engine = _engine("sink_window")
    engine.add(request(PROMPTS[0][:20], max_tokens=30))
    seen = []
    forward = engine.runner.kernel.forward

    def spying(q, kv, layer, batch, prepared):
        out = forward(q, kv, layer, batch, prepared)
        if layer.index == 0 and batch.num_rows == 1 and len(q) == 1:
            k, v = kv.rows(batch, 0)
            heads = q.view(1, layer.kv_heads, -1, layer.key_dim)
            scores = torch.einsum("nhgd,shd->hgs", heads, k) * layer.scale
            wanted = torch.einsum("hgs,shd->hgd", scores.softmax(-1), v).reshape(1, layer.q_heads, -1)
            torch.testing.assert_close(out, wanted, atol=1e-5, rtol=1e-4)
            seen.append(len(k))
        return out

    engine.runner.kernel.forward = spying
    drain(engine)
    assert seen and max(seen) <= 4 + 16 + 4


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_prefix_cache_beside_it_serves_only_what_is_whole(reduction, cache):
    engine = _engine(reduction, cache=cache, budget=64)
    plain = toy_engine(cache="none")
    for prompt in PROMPTS[:3]:
        answer = generate(engine, [prompt], max_tokens=20)[0]
        generate(engine, [[*prompt, *answer]], max_tokens=4)
    for page in engine.memory.cached.pages:
        assert engine.memory.groups[0].references[page] == 1
    stored = {}
    for prompt in PROMPTS[:3]:
        match = engine.memory.cache.match(prompt, "")
        assert len(match.pages) <= len(prompt) // 4
        plain.add(request(prompt, id=f"{prompt[0]}", max_tokens=20))
        while not plain.running or plain.running[0].num_computed < len(prompt):
            plain.step()
        for page, right in zip(match.pages, plain.running[0].tables[0].pages, strict=False):
            for layer in (0, 1):
                here = engine.memory.groups[0].pool.layers[layer].storage["k"][page]
                there = plain.memory.groups[0].pool.layers[layer].storage["k"][right]
                stored[prompt[0], page, layer] = torch.allclose(here, there, atol=1e-4)
        drain(plain)
    assert all(stored.values())
    engine.memory.flush()
    assert engine.stats()["kv"]["full"]["free"] == engine.stats()["kv"]["full"]["pages"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("allocator", ["paged", "tiered"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_preempted_aborted_and_drafted_alike(reduction, allocator, drafter):
    engine = _engine(reduction, allocator=allocator, drafter=drafter, cache="radix", kv_tokens=240)
    items = [request(prompt, max_tokens=30) for prompt in [*PROMPTS, *PROMPTS[:2]]]
    for item in items:
        engine.add(item)
    events = []
    for step in range(60):
        events += engine.step()
        engine.check()
        if step % 6 == 5 and engine.running:
            engine.preempt(engine.running[step % len(engine.running)])
            engine.check()
    engine.abort(items[-1].id)
    found = outputs(events + drain(engine))
    assert not [event.error for event in events if event.error]
    assert all(len(found[item.id, 0]) == 30 for item in items[:-1])
    assert getattr(engine.reduction, "_mass", {}) == {}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_swapping_brings_a_reduced_context_back_as_it_was(reduction):
    expected = generate(_engine(reduction), [PROMPTS[0]], max_tokens=30)[0]
    engine = _engine(reduction, allocator="tiered")
    engine.add(request(PROMPTS[0], id="a", max_tokens=30))
    events = []
    for step in range(14):
        events += engine.step()
        if step > 5 and engine.running:
            engine.preempt(engine.running[0])
    assert engine.stats()["swaps"] > 3
    assert outputs(events + drain(engine))["a", 0] == expected


def test_a_reduction_that_names_the_last_page_ends_the_request_only():
    engine = _engine("sink_window")
    engine.reduction.forget = lambda view: [view.n_pages - 1]
    engine.add(request(PROMPTS[0]))
    events = drain(engine)
    assert "context_reduction 'sink_window'" in events[-1].error and "before the last" in events[-1].error

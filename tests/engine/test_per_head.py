"""A KV group for each KV head: the same output, and pages that each head frees for itself."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from core.heads import checked_groups, slices
from core.interfaces.context_reduction import attention_mass
from core.kv import Pool
from core.types import KVGroup, PartFault
from tests.engine.toy import HEADS, KV_HEADS, VOCAB, ToyModel, drain, generate, request, toy_engine

PROMPTS = [random.Random(n).choices(range(VOCAB), k=40) for n in range(4)]
MODELS = {"full": (None, None), "mixed": (8, None), "window": (8, 8)}
H2O = {"recent": 8, "heavy": 8}


def _engine(kind: str = "full", allocator: str = "paged_per_head", **parts):
    model = ToyModel(MODELS[kind])
    model.layers = [replace(spec, scale=3.0) for spec in model.layers]  # sharp attention, so that heads differ
    options = {"context_reduction": H2O if parts.get("reduction") == "h2o" else {}}
    return toy_engine(model, allocator=allocator, options=options, **parts)


def test_each_head_has_pages_of_its_own_and_a_window_keeps_its_heads_together():
    names = {kind: [pages.pool.group.name for pages in _engine(kind).memory.groups] for kind in MODELS}
    assert names == {
        "full": ["full.head0", "full.head1"],
        "mixed": ["full.head0", "full.head1", "window_8"],
        "window": ["window_8"],
    }
    split, whole = _engine("mixed"), _engine("mixed", "paged")
    assert sum(pages.pool.nbytes for pages in split.memory.groups) <= 512 * 2 * KV_HEADS * 8 * 2 * 4
    token = [sum(g["total_bytes"] / g["pages"] for g in e.stats()["kv"].values()) for e in (split, whole)]
    assert token[0] == token[1]


@pytest.mark.parametrize(
    ("kernel", "kv"),
    [*itertools.product(["eager", "sdpa"], ["none", "int8", "fp8_e4m3", "int4"]), ("cpu_paged", "none")],
)
def test_output_is_that_of_whole_layers(kernel: str, kv: str):
    found = [
        generate(_engine("mixed", allocator, kernel=kernel, kv=kv, cache="radix", kv_tokens=1024), PROMPTS)
        for allocator in ("paged", "paged_per_head")
    ]
    assert found[0] == found[1]


def test_heads_hold_different_pages_and_free_them_while_running():
    engine = _engine(reduction="h2o", budget=64)
    engine.add(request(PROMPTS[1], max_tokens=60))
    forgotten: list[list[int]] = [[], []]
    forget = engine.memory.forget

    def watching(seq, view, places):
        forgotten[view.group] += [(view.num_computed, place) for place in places]
        before = engine.memory.groups[view.group].n_held
        other = engine.memory.groups[1 - view.group].n_held
        forget(seq, view, places)
        assert engine.memory.groups[view.group].n_held == before - len(places)
        assert engine.memory.groups[1 - view.group].n_held == other

    engine.memory.forget = watching
    most = 0
    while engine.has_work:
        engine.step()
        engine.check()
        if engine.running:
            most = max(most, *(len(table) for table in engine.running[0].tables))
    assert len({step for step, _ in forgotten[0]}) > 5
    assert forgotten[0] != forgotten[1]
    assert most <= (8 + 8) // 4 + 2


def _mass_kept(allocator: str) -> tuple[float, int]:
    """The least share of a head's own attention that falls on what h2o leaves it of a prompt, and the bytes held."""
    engine = _engine(allocator=allocator, reduction="h2o", budget=64, kv_tokens=400)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    observe = engine.reduction.observe

    def watching(id, q, keys, layer):
        first = layer.group if layer.kv_heads == 1 else 0
        shared = layer.q_heads // layer.kv_heads
        for head in range(layer.kv_heads):
            one = replace(layer, q_heads=shared, kv_heads=1)
            mass = attention_mass(q[:, head * shared : (head + 1) * shared], keys[:, head : head + 1], one)
            seen[layer.index, first + head] = mass
        observe(id, q, keys, layer)

    engine.reduction.observe = watching
    left: dict[int, list[int]] = {}
    forget = engine.memory.forget

    def noting(seq, view, places):
        left[view.group] = [page for page in range(view.n_pages) if page not in places]
        forget(seq, view, places)

    engine.memory.forget = noting
    engine.add(request(PROMPTS[1], max_tokens=8))
    engine.step()
    held = sum(g["used_bytes"] + g["reserved_bytes"] for g in engine.stats()["kv"].values())
    by_head = []
    for head in range(KV_HEADS):
        mass = sum(seen[layer, head] for layer in (0, 1)).view(-1, 4).sum(1)
        by_head.append(float(mass[left[head if len(left) > 1 else 0]].sum() / mass.sum()))
    return min(by_head), held


def test_at_the_same_bytes_each_head_keeps_more_of_what_it_attends_to():
    alone, together = _mass_kept("paged_per_head"), _mass_kept("paged")
    assert alone[1] == together[1]
    assert alone[0] > together[0]


def test_more_fit_in_the_pages_that_heads_free():
    def most_running(reduction):
        engine = _engine(reduction=reduction, kv_tokens=160, budget=32)
        for prompt in PROMPTS:
            engine.add(request(prompt, max_tokens=24))
        most = 0
        while engine.has_work:
            engine.step()
            engine.check()
            most = max(most, sum(seq.num_output > 4 for seq in engine.running))
        return most

    assert most_running("h2o") > most_running("none")


@pytest.mark.parametrize("cache", ["exact", "hash", "radix"])
def test_a_cached_prefix_comes_with_the_pages_of_every_head(cache: str):
    engine = _engine("mixed", cache=cache)
    expected = generate(_engine("mixed", "paged"), [PROMPTS[0]])
    assert [generate(engine, [PROMPTS[0]]) for _ in range(3)] == [expected] * 3
    stats = engine.stats()
    assert stats["prefix_cache"]["hit_tokens"] > 0
    assert stats["kv"]["full.head0"]["cached"] == stats["kv"]["full.head1"]["cached"] > 0
    engine.memory.flush()
    assert all(group["free"] == group["pages"] for group in engine.stats()["kv"].values())


def test_one_that_computed_beside_a_cached_twin_uses_its_pages_for_every_head():
    engine = _engine(cache="radix", kv_tokens=200)
    for _ in range(2):
        engine.add(request(PROMPTS[0][:17], max_tokens=12, prompt_logprobs=1))
    for _ in range(6):
        engine.step()
    first, second = engine.running
    for group in range(2):
        assert list(first.tables[group].pages[:4]) == list(second.tables[group].pages[:4])
    drain(engine)


def test_a_kernel_that_fuses_steps_runs_layers_one_by_one():
    class Fusing:
        fused = 0

        def pieces(self):
            Fusing.fused += 1
            return object()

    model = ToyModel()
    model.pieces = Fusing().pieces
    for allocator, expected in (("paged", True), ("paged_per_head", False)):
        engine = toy_engine(model, allocator=allocator)
        engine.runner.kernel.fuse = lambda pieces, kv: lambda batch: None
        assert (engine.runner._fuse() is not None) == expected


def test_slices_take_their_own_heads():
    model = ToyModel((None,))
    split = [replace(model.groups[0], name=str(head), kv_heads=1, first_head=head) for head in (1, 0)]
    quantizer = toy_engine(model).memory.groups[0].pool.quantizer
    spec = replace(model.layers[0], sinks=torch.arange(HEADS))
    parts = slices([spec], [Pool(group, index, 2, 4, quantizer, torch.float32) for index, group in enumerate(split)])[0]
    q, k = torch.arange(HEADS).view(1, -1, 1), torch.arange(KV_HEADS).view(1, -1, 1)
    taken = [part.of(q, k, None) for part in parts]
    assert [part.spec.group for part in parts] == [1, 0]
    assert [t[0].flatten().tolist() for t in taken] == [part.spec.sinks.tolist() for part in parts] == [[0, 1], [2, 3]]
    assert [t[1].flatten().tolist() for t in taken] == [[0], [1]]


FULL, WINDOW = KVGroup("full", (0,), 2, 8, 8), KVGroup("window", (1,), 2, 8, 8, window=8)


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([FULL], "head 0 of layer 1 in one KV group"),
        ([FULL, WINDOW, replace(FULL, name="again", kv_heads=1)], "head 0 of layer 0 in one"),
        ([FULL, replace(WINDOW, window=4)], "kept as the attention structure says"),
        ([replace(FULL, kv_heads=1), replace(FULL, kv_heads=1, first_head=1), WINDOW], "one name: full, full, window"),
        ([WINDOW, FULL], "with a window before one without"),
    ],
)
def test_groups_that_lose_or_repeat_a_head_are_told(groups: Sequence[KVGroup], told: str):
    with pytest.raises(PartFault, match=told):
        checked_groups(groups, [FULL, WINDOW], "the allocator")

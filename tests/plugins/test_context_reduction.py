"""What context reductions forget, and that attention over what is left is right in every kernel."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interfaces import BuildContext
from core.interfaces.context_reduction import ContextView, attention_mass
from core.interfaces.plugin import Options
from core.testing.paged import Row, make_case
from core.types import LayerSpec
from plugins.attention.eager import EagerKernel
from plugins.attention.sdpa import SdpaKernel
from plugins.context_reduction import HeavyHitterOptions, SinkWindowOptions, SnapOptions
from plugins.context_reduction.heavy_hitters import HeavyHitters
from plugins.context_reduction.sink_window import SinkWindow
from plugins.context_reduction.snap import Snap
from plugins.quantizer.kv_none import PlainKV

PAGE = 4
LAYER = LayerSpec(0, 0, q_heads=2, kv_heads=1, key_dim=8, value_dim=8, scale=1.0)


def view(kept, computed=None, prompt=None, id="a"):
    computed = kept if computed is None else computed
    return ContextView(id, 0, kept, computed, prompt or computed, PAGE)


def keys_and_query(loud, n_keys, n_queries=1):
    """Keys of which those at `loud` draw all attention."""
    keys = torch.zeros(n_keys, 1, 8)
    keys[:, 0, 0] = -1
    keys[loud, 0, 0] = 1
    q = torch.zeros(n_queries, 2, 8)
    q[..., 0] = 20
    return q, keys


class Sequence:
    """A sequence that forgets as it goes: the positions its pages hold."""

    def __init__(self, part):
        self.part = part
        self.positions = []

    def step(self, n=1, loud=()):
        start = len(self.positions)
        last = self.positions[-1] + 1 if self.positions else 0
        self.positions += range(last, last + n)
        if self.part.observes != "never":
            places = [place for place, position in enumerate(self.positions) if position in loud]
            self.part.observe("a", *keys_and_query(places, start + n, n), LAYER)
        places = list(self.part.forget(view(len(self.positions), last + n)))
        n_pages = -(-len(self.positions) // PAGE)
        assert places == sorted(set(places)) and all(0 <= place < n_pages - 1 for place in places)
        gone = {place * PAGE + offset for place in places for offset in range(PAGE)}
        self.positions = [position for at, position in enumerate(self.positions) if at not in gone]
        return places


@settings(max_examples=40, deadline=None)
@given(sinks=st.integers(0, 9), window=st.integers(1, 20), prompt=st.integers(1, 40))
def test_sink_window_keeps_the_first_and_the_last(sinks, window, prompt):
    seq = Sequence(SinkWindow(SinkWindowOptions(sinks=sinks, window=window), BuildContext()))
    seq.step(prompt)
    for n in range(60):
        seq.step()
        total = prompt + n + 1
        assert set(range(min(sinks, total))) <= set(seq.positions)
        assert set(range(max(0, total - window), total)) <= set(seq.positions)
        assert len(seq.positions) <= sinks + window + 2 * PAGE


def test_heavy_hitters_keep_what_is_attended_to():
    seq = Sequence(HeavyHitters(HeavyHitterOptions(recent=8, heavy=8), BuildContext()))
    loud = {5, 18}
    seq.step(24, loud)
    for _ in range(30):
        seq.step(1, loud)
        assert loud <= set(seq.positions) and len(seq.positions) <= 8 + 8 + 2 * PAGE
    assert set(range(54 - 8, 54)) <= set(seq.positions)


def test_heavy_hitters_change_their_mind():
    seq = Sequence(HeavyHitters(HeavyHitterOptions(recent=32, heavy=4), BuildContext()))
    seq.step(4, {0})
    for _ in range(120):
        seq.step(1, {17})
    assert 17 in seq.positions and 0 not in seq.positions


def test_snap_cuts_the_prompt_once():
    seq = Sequence(Snap(SnapOptions(budget=16, window=4, pooled=1), BuildContext()))
    seq.step(40, {6, 22})
    assert {6, 22, 36, 37, 38, 39} <= set(seq.positions) and len(seq.positions) == 16
    part, before = seq.part, list(seq.positions)
    for kept in range(17, 60):
        assert not part.forget(view(kept, 24 + kept, 40))
    assert seq.positions == before


def test_a_short_prompt_is_left_alone():
    for part in (
        Snap(SnapOptions(budget=16), BuildContext()),
        HeavyHitters(HeavyHitterOptions(recent=16, heavy=0), BuildContext()),
        SinkWindow(SinkWindowOptions(window=16), BuildContext()),
    ):
        assert not Sequence(part).step(15, {3})


@pytest.mark.parametrize("part", [HeavyHitters, Snap])
def test_scores_go_with_their_sequence(part):
    options = {HeavyHitters: HeavyHitterOptions, Snap: SnapOptions}[part]()
    reduction = part(options, BuildContext())
    for id in ("a", "b"):
        reduction.observe(id, *keys_and_query([0], 5), LAYER)
    reduction.ended("a")
    reduction.ended("never seen")
    assert [key[0] for key in reduction._mass] == ["b"]


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_mass_is_the_sum_of_attention_weights(softcap, sinks):
    layer = LayerSpec(0, 0, 4, 2, 8, 8, scale=0.4, softcap=softcap, sinks=torch.randn(4) if sinks else None)
    q, keys = torch.randn(3, 4, 8), torch.randn(7, 2, 8)
    wanted = torch.zeros(7, dtype=torch.float64)
    for query in range(3):
        for head in range(4):
            scores = [float(q[query, head].double() @ keys[s, head // 2].double()) * 0.4 for s in range(5 + query)]
            if softcap:
                scores = [softcap * math.tanh(s / softcap) for s in scores]
            total = sum(map(math.exp, scores)) + (math.exp(layer.sinks[head]) if sinks else 0)
            wanted[: len(scores)] += torch.tensor([math.exp(s) / total for s in scores])
    torch.testing.assert_close(attention_mass(q, keys, layer).double(), wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", [EagerKernel, SdpaKernel])
def test_kernels_read_a_table_that_lost_pages_from_its_middle(kernel):
    rows = [Row(1, 22), Row(3, 15), Row(12, 33)]
    dropped = [(1, 2), (0,), (2, 4)]
    context = BuildContext(page_size=PAGE)
    case = make_case(rows, PlainKV(Options(), context), page_size=PAGE, q_heads=4, kv_heads=2)
    group = case.batch.groups[0]
    for row, places in enumerate(dropped):
        kept = [place for place in range(group.num_pages[row]) if place not in places]
        group.page_table[row, : len(kept)] = group.page_table[row, kept]
        group.num_pages[row] = len(kept)
        group.first_slots[row] = None
        group.kv_starts[row] = group.kv_start[row] = len(places) * PAGE
        slots = torch.tensor([p * PAGE + o for p in kept for o in range(PAGE) if p * PAGE + o < rows[row].length])
        case.keys[row], case.values[row] = case.keys[row][slots], case.values[row][slots]
    part = kernel(Options(), context)
    found = part.forward(case.q, case.kv, case.layer, case.batch, part.prepare(case.batch, [case.layer]))
    torch.testing.assert_close(found.double(), case.expected(), atol=3e-5, rtol=1e-4)

"""Kernels against attention computed the long way, over ragged batches and every kind of layer; and KV groups."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interfaces import BuildContext, LayerShape
from core.interfaces.plugin import Options
from core.testing.paged import Row, make_case
from plugins.attention.eager import EagerKernel
from plugins.attention.native import NativeStructure
from plugins.attention.sdpa import BATCHED_QUERIES, VIEWED_TOKENS, SdpaKernel
from plugins.quantizer.kv_none import PlainKV

KERNELS = pytest.mark.parametrize("kernel", [EagerKernel, SdpaKernel])


def compute(kernel, case, page_size):
    part = kernel(Options(), BuildContext(page_size=page_size))
    with torch.inference_mode():
        prepared = part.prepare(case.batch, [case.layer])
        return part.forward(case.q, case.kv, case.layer, case.batch, prepared)


def case_of(rows, page_size, **layer):
    return make_case(rows, PlainKV(Options(), BuildContext(page_size=page_size)), page_size=page_size, **layer)


@st.composite
def rows_and_layers(draw):
    page_size = draw(st.sampled_from([1, 4, 16]))
    window = draw(st.none() | st.integers(1, 40))
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 60))
        queries = draw(st.integers(1, min(length, 2 * BATCHED_QUERIES)))
        passed = 0 if window is None else max(0, length - queries - window + 1)
        rows.append(Row(queries, length, draw(st.integers(0, passed // page_size)) * page_size))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    key_dim = draw(st.sampled_from([8, 16]))
    latent = draw(st.booleans())
    layer = {
        "window": window,
        "kv_heads": kv_heads,
        "q_heads": kv_heads * draw(st.integers(1, 4)),
        "key_dim": key_dim,
        "value_dim": draw(st.sampled_from([8, key_dim])),
        "value_in_key": latent,
        "softcap": draw(st.none() | st.just(2.0)),
        "sinks": draw(st.booleans()),
        "neighbours": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
    }
    return rows, page_size, layer


@KERNELS
@settings(max_examples=60, deadline=None)
@given(drawn=rows_and_layers())
def test_equals_the_long_way(kernel, drawn):
    rows, page_size, layer = drawn
    case = case_of(rows, page_size, **layer)
    torch.testing.assert_close(compute(kernel, case, page_size).double(), case.expected(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("neighbours", [False, True])
def test_sdpa_reads_long_and_short_contexts_in_one_step(neighbours):
    rows = [Row(1, VIEWED_TOKENS + 30), Row(1, 5), Row(1, 40), Row(1, 300), Row(12, 90), Row(2, 9)]
    case = case_of(rows, 4, q_heads=6, kv_heads=2, neighbours=neighbours)
    torch.testing.assert_close(compute(SdpaKernel, case, 4).double(), case.expected(), atol=3e-5, rtol=1e-4)


@KERNELS
def test_a_row_of_nan_stays_alone(kernel):
    rows = [Row(1, 7), Row(1, 21), Row(3, 9)]
    case = case_of(rows, 4)
    clean = compute(kernel, case, 4)
    broken = case.batch.groups[0].page_table[0, 0]
    for stored in case.kv.storage.values():
        stored[broken] = float("nan")
    found = compute(kernel, case, 4)
    assert found[0].isnan().any()
    torch.testing.assert_close(found[1:], clean[1:])


@KERNELS
def test_half_precision(kernel):
    case = case_of([Row(1, 33), Row(5, 12), Row(1, 30), Row(20, 20)], 16, q_heads=4, kv_heads=2)
    wanted = case.expected()
    case.q = case.q.bfloat16()
    case.kv.storage = {name: stored.bfloat16() for name, stored in case.kv.storage.items()}
    case.kv._flat = {name: stored.flatten(0, 1) for name, stored in case.kv.storage.items()}
    found = compute(kernel, case, 16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, atol=3e-2, rtol=3e-2)


@dataclass
class Shapes:
    layers: tuple[LayerShape, ...]


def groups_of(*shapes):
    return NativeStructure(Options(), BuildContext()).kv_groups(Shapes(shapes))


def test_windows_are_a_group_after_what_sees_everything():
    sliding, full = LayerShape(4, 1, 256, 256, window=512), LayerShape(4, 1, 256, 256)
    groups = groups_of(sliding, sliding, full, sliding)
    assert [(group.window, group.layers) for group in groups] == [(None, (2,)), (512, (0, 1, 3))]


def test_query_heads_do_not_split_a_group():
    assert len(groups_of(LayerShape(4, 2, 64, 64), LayerShape(8, 2, 64, 64))) == 1


def test_each_shape_of_cache_has_a_group_and_a_name():
    groups = groups_of(
        LayerShape(8, 2, 64, 64),
        LayerShape(8, 4, 64, 64),
        LayerShape(8, 1, 576, 512, value_in_key=True),
        LayerShape(8, 2, 64, 64, window=8),
    )
    assert len({group.name for group in groups}) == 4
    assert sorted(layer for group in groups for layer in group.layers) == [0, 1, 2, 3]
    assert [group.value_in_key for group in groups] == [False, False, True, False]


def test_a_model_of_windows_only():
    assert [group.window for group in groups_of(LayerShape(4, 4, 8, 8, window=16))] == [16]

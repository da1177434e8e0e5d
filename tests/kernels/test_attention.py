import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import cpu
from kernels.reference.attention import paged_attention as reference
from tests.kernels.paged import fill, slots_of

TOLERANCE = {"fp32": 2e-5, "bf16": 2e-5, "int8": 2e-3}


def compare(context, q, format, isa, **options):
    b = context.batch
    got = cpu.paged_attention(q, context.cache, b, isa=isa, **options)
    want = reference(q.double(), context.keys, context.values, b.page_table, b.query_start, b.kv_len, **options)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[format], rtol=TOLERANCE[format])


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(
    "heads, dims, page_size, queries, lens",
    [
        ((9, 3), (64, 64), 16, [1, 1, 5, 130, 1], [256, 1, 70, 200, 1000]),
        ((8, 1), (40, 24), 32, [1, 33, 5], [256, 33, 70]),
        ((4, 4), (128, 128), 16, [1, 17], [65, 17]),
        ((16, 1), (144, 128), 64, [1, 3], [130, 3]),
    ],
)
def test_ragged_batches(isa, format, heads, dims, page_size, queries, lens):
    context = fill(format, queries, lens, page_size=page_size, n_heads=heads[1], dk=dims[0], dv=dims[1], isa=isa)
    compare(context, torch.randn(sum(queries), heads[0], dims[0]), format, isa, scale=dims[0] ** -0.5)


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_window_softcap_and_sinks(isa, format):
    context = fill(format, [1, 40, 5], [256, 40, 70], page_size=16, n_heads=2, dk=32, dv=32, isa=isa)
    q = torch.randn(46, 6, 32)
    compare(context, q, format, isa, scale=0.3, window=50, softcap=20.0, sinks=torch.randn(6))
    compare(context, q, format, isa, scale=0.3, window=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.tuples(st.integers(1, 150), st.integers(0, 20)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 5, 16, 48]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (14, 2)]),
    dims=st.sampled_from([(36, 20), (64, 64), (33, 50)]),
    window=st.sampled_from([None, 1, 17, 64]),
    format=st.sampled_from(["fp32", "bf16", "int8"]),
)
def test_any_shape(isa, lens, page_size, heads, dims, window, format):
    if format == "int8":
        page_size = 16
    totals = [n for n, _ in lens]
    queries = [min(q, n) for n, q in lens]
    context = fill(format, queries, totals, page_size=page_size, n_heads=heads[1], dk=dims[0], dv=dims[1], isa=isa)
    compare(context, torch.randn(sum(queries), heads[0], dims[0]), format, isa, scale=0.2, window=window)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
def test_same_bits_for_any_threads_chunks_and_neighbours(isa, format):
    n = 600
    context = fill(format, [n], [n], page_size=16, n_heads=3, dk=64, dv=64, isa=isa)
    q, table = torch.randn(n, 9, 64), context.batch.page_table

    def attend(chunks, threads):
        cpu.set_num_threads(threads)
        outs, at = [], 0
        for chunk in chunks:
            at += chunk
            batch = cpu.Ragged(
                table, torch.tensor([0, chunk], dtype=torch.int32), torch.tensor([at], dtype=torch.int32)
            )
            outs.append(cpu.paged_attention(q[at - chunk : at], context.cache, batch, scale=0.125, isa=isa))
        return torch.cat(outs)

    whole = attend([n], 1)
    for chunks, threads in [([n], 2), ([n], 5), ([1] * n, 2), ([5] * 120, 1), ([16, 64, 120, 400], 3)]:
        assert torch.equal(attend(chunks, threads), whole)
    batch = cpu.Ragged(
        table.repeat(2, 1), torch.tensor([0, 1, 301], dtype=torch.int32), torch.tensor([500, n], dtype=torch.int32)
    )
    both = cpu.paged_attention(torch.cat([q[499:500], q[300:]]), context.cache, batch, scale=0.125, isa=isa)
    assert torch.equal(both, torch.cat([whole[499:500], whole[300:]]))


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_first_pages_freed_by_a_window(isa, format):
    """The row of the page table starts later, the result is the same bits."""
    context = fill(format, [3], [200], page_size=16, n_heads=2, dk=64, dv=64, isa=isa)
    q, b = torch.randn(3, 4, 64), context.batch
    whole = cpu.paged_attention(q, context.cache, b, scale=0.1, window=40, isa=isa)
    late = cpu.Ragged(b.page_table[:, 9:].contiguous(), b.query_start, b.kv_len, torch.tensor([144], dtype=torch.int32))
    assert torch.equal(cpu.paged_attention(q, context.cache, late, scale=0.1, window=40, isa=isa), whole)


def test_values_inside_keys(isa):
    """Multi-head latent attention: one latent, whose first part is the value."""
    context = fill("fp32", [2, 20], [90, 20], page_size=16, n_heads=1, dk=96, dv=64, isa=isa)
    latent = cpu.KVCache("fp32", 16, 1, 96, 64, context.cache.k)
    context.cache, context.values = latent, context.keys[..., :64]
    compare(context, torch.randn(22, 8, 96), "fp32", isa, scale=0.1)


def test_pages_with_strides_of_a_larger_pool(isa):
    context = fill("fp32", [7], [60], page_size=16, n_heads=2, dk=32, dv=32, isa=isa)
    n = context.cache.k.shape[0]
    pool = torch.full((n, 3, 2, 16, 2, 40), float("nan"))
    pool[:, 1, 0, :, :, :32], pool[:, 1, 1, :, :, :32] = context.cache.k, context.cache.v
    context.cache = cpu.KVCache("fp32", 16, 2, 32, 32, pool[:, 1, 0, :, :, :32], pool[:, 1, 1, :, :, :32])
    compare(context, torch.randn(7, 4, 32), "fp32", isa, scale=0.2)


def test_large_scores_do_not_overflow(isa):
    context = fill("fp32", [4], [100], page_size=16, n_heads=1, dk=64, dv=64, isa=isa)
    compare(context, torch.randn(4, 1, 64) * 1000, "fp32", isa, scale=1.0)


def test_what_does_not_fit_is_said():
    cache = cpu.KVCache.allocate("fp32", 2, 16, 2, 32, 32)
    batch = cpu.Ragged(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([1], dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        cpu.paged_attention(torch.randn(1, 3, 32), cache, batch, scale=1.0)
    with pytest.raises(ValueError, match="q must be a 1x4x32"):
        cpu.paged_attention(torch.randn(1, 4, 16), cache, batch, scale=1.0)
    with pytest.raises(ValueError, match=r"page_table must be .* torch\.int32"):
        cpu.Ragged(torch.zeros(1, 1), batch.query_start, batch.kv_len)
    with pytest.raises(ValueError, match="multiple of 16"):
        cpu.kv_fields("int8", 8, 2, 32, 32)


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_nan_comes_out_and_stays_in_its_head_and_sequence(isa, format, queries):
    context = fill(format, [queries, queries], [90, 70], page_size=16, n_heads=2, dk=36, dv=20, isa=isa)
    q = torch.randn(2 * queries, 4, 36)
    clean = cpu.paged_attention(q, context.cache, context.batch, scale=0.2, isa=isa)
    q[0, 1, 35] = float("nan")
    got = cpu.paged_attention(q, context.cache, context.batch, scale=0.2, isa=isa)
    assert got[0, 1].isnan().all()
    got[0, 1] = clean[0, 1]
    assert torch.equal(got, clean)
    slot = slots_of(context.batch.page_table[1], torch.tensor([3]), 16)
    broken = torch.randn(1, 2, 20)
    broken[0, 0, 19] = float("nan")
    cpu.kv_write(context.cache, torch.randn(1, 2, 36), broken, slot, isa=isa)
    got = cpu.paged_attention(q, context.cache, context.batch, scale=0.2, isa=isa)
    assert got[queries:, :2, 19].isnan().all()
    assert not got[queries:, 2:].isnan().any()
    assert torch.equal(got[1:queries], clean[1:queries])

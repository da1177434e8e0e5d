"""Stored keys and values: error bounds number by number, bytes, and what happens to pages in the making."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interfaces import BuildContext
from core.interfaces.plugin import Options
from core.kv import Pool, page_bytes, shared_bytes
from core.types import KVGroup
from plugins.quantizer.kv_int4 import Int4KV
from plugins.quantizer.kv_none import PlainKV
from plugins.quantizer.kv_scaled import Fp8KV, Int8KV

GROUP = KVGroup("full", (0,), kv_heads=2, key_dim=32, value_dim=64)
LATENT = KVGroup("latent", (0,), kv_heads=1, key_dim=40, value_dim=32, value_in_key=True)
PAGE = 8


def pool_of(part, group=GROUP, n_pages=12, dtype=torch.float32, running=2):
    quantizer = part(Options(), BuildContext(page_size=PAGE, max_running=running))
    return quantizer, Pool(group, 0, n_pages, PAGE, quantizer, dtype)


def tokens(n, seed=0, group=GROUP, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(n, group.kv_heads, group.key_dim, generator=generator) * scale
    k[..., 3] += 20 * scale
    v = torch.randn(n, group.kv_heads, group.value_dim, generator=generator) * scale
    return k, v


def slots(pages, first, n):
    return torch.tensor([pages[i // PAGE] * PAGE + i % PAGE for i in range(first, first + n)])


def write_in_pieces(quantizer, storage, k, v, pages, sizes):
    first = 0
    for size in [*sizes, len(k)]:
        size = min(size, len(k) - first)
        if size:
            quantizer.write(storage, k[first : first + size], v[first : first + size], slots(pages, first, size))
        first += size


PIECES = st.lists(st.integers(1, 2 * PAGE), max_size=6)
COUNTS = st.integers(1, 3 * PAGE)


@settings(max_examples=30, deadline=None)
@given(n=COUNTS, sizes=PIECES, seed=st.integers(0, 5), scale=st.sampled_from([1e-2, 1.0, 1e3]))
def test_int8_is_off_by_half_a_scale(n, sizes, seed, scale):
    quantizer, pool = pool_of(Int8KV)
    k, v = tokens(n, seed, scale=scale)
    write_in_pieces(quantizer, pool.layers[0].storage, k, v, [5, 0, 7], sizes)
    for found, wanted in zip(quantizer.read(pool.layers[0].storage, torch.tensor([5, 0, 7]), n), (k, v), strict=True):
        bound = wanted.abs().amax(-1, keepdim=True) / 253.9
        assert bool(((found - wanted).abs() <= bound).all())


@settings(max_examples=30, deadline=None)
@given(n=COUNTS, seed=st.integers(0, 5), scale=st.sampled_from([1e-2, 1.0, 1e3]))
def test_fp8_is_off_by_a_sixteenth(n, seed, scale):
    quantizer, pool = pool_of(Fp8KV)
    k, v = tokens(n, seed, scale=scale)
    quantizer.write(pool.layers[0].storage, k, v, slots([5, 0, 7], 0, n))
    for found, wanted in zip(quantizer.read(pool.layers[0].storage, torch.tensor([5, 0, 7]), n), (k, v), strict=True):
        bound = wanted.abs() / 15.9 + wanted.abs().amax(-1, keepdim=True) / 448 / 1000
        assert bool(((found - wanted).abs() <= bound).all())


def int4_bounds(k, v):
    """Half a 15th of what each number shares its scale with, and float16's error of the minimum."""
    pages = torch.split(k, PAGE)
    key_range = torch.cat([(p.amax(0) - p.amin(0)).expand_as(p) for p in pages])
    shared = v.reshape(*v.shape[:2], -1, 32)
    value_range = (shared.amax(-1, keepdim=True) - shared.amin(-1, keepdim=True)).expand_as(shared).reshape(v.shape)
    slack = [x.abs().amax() / 1000 for x in (k, v)]
    return key_range / 29 + slack[0], value_range / 29 + slack[1]


@settings(max_examples=60, deadline=None)
@given(n=COUNTS, sizes=PIECES, seed=st.integers(0, 5))
def test_int4_is_off_by_half_a_scale_and_exact_in_the_tail(n, sizes, seed):
    quantizer, pool = pool_of(Int4KV)
    k, v = tokens(n, seed)
    write_in_pieces(quantizer, pool.layers[0].storage, k, v, [5, 0, 7, 9], sizes)
    keys, values = quantizer.read(pool.layers[0].storage, torch.tensor([5, 0, 7]), n)
    key_bound, value_bound = int4_bounds(k, v)
    assert bool(((keys - k).abs() <= key_bound).all())
    assert bool(((values - v).abs() <= value_bound).all())
    tail = n % PAGE
    assert tail == 0 or torch.equal(keys[-tail:], k[-tail:])


def test_int4_rounds_a_page_once_however_it_was_written():
    k, v = tokens(2 * PAGE)
    found = []
    for sizes in ([], [1] * 2 * PAGE, [3, 1, 9]):
        quantizer, pool = pool_of(Int4KV)
        write_in_pieces(quantizer, pool.layers[0].storage, k, v, [2, 4], sizes)
        found.append(quantizer.read(pool.layers[0].storage, torch.tensor([2, 4]), 2 * PAGE)[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_int4_copies_of_a_page_in_the_making_part():
    quantizer, pool = pool_of(Int4KV)
    storage = pool.layers[0].storage
    k, v = tokens(PAGE)
    other, _ = tokens(PAGE, seed=9)
    quantizer.write(storage, k[:5], v[:5], slots([1], 0, 5))
    pool.copy(1, 6)
    # The page copied from is filled in the same write as the copy is gone on with.
    quantizer.write(
        storage,
        torch.cat((k[5:], other[5:7])),
        torch.cat((v[5:], v[5:7])),
        torch.cat((slots([1], 5, 3), slots([6], 5, 2))),
    )
    keys, _ = quantizer.read(storage, torch.tensor([6]), 7)
    assert torch.equal(keys, torch.cat((k[:5], other[5:7])))
    full, _ = quantizer.read(storage, torch.tensor([1]), PAGE)
    assert bool(((full - k).abs() <= int4_bounds(k, v)[0]).all())


def test_int4_short_of_tails_stays_within_two_roundings():
    quantizer, pool = pool_of(Int4KV, n_pages=40, running=1)
    storage = pool.layers[0].storage
    n_tails = len(storage["ticket"])
    rows = [tokens(PAGE, seed=page) for page in range(n_tails + 6)]
    for offset in range(PAGE):
        for page, (k, v) in enumerate(rows):
            quantizer.write(storage, k[offset : offset + 1], v[offset : offset + 1], slots([page], offset, 1))
    for page, (k, v) in enumerate(rows):
        keys, _ = quantizer.read(storage, torch.tensor([page]), PAGE)
        worst = (keys - k).abs() / int4_bounds(k, v)[0]
        assert float(worst.max()) < PAGE, f"page {page}"


def test_int4_uses_pages_and_tails_again():
    quantizer, pool = pool_of(Int4KV, running=1)
    storage = pool.layers[0].storage
    for round in range(30):
        k, v = tokens(2 * PAGE - 3, seed=round)
        pages = [round % 12, (round + 5) % 12]
        write_in_pieces(quantizer, storage, k, v, pages, [1 + round % 5] * 20)
        keys, _ = quantizer.read(storage, torch.tensor(pages), len(k))
        assert bool(((keys - k).abs() <= int4_bounds(k, v)[0]).all())


@pytest.mark.parametrize("part", [PlainKV, Int8KV, Fp8KV, Int4KV])
def test_a_latent_stores_keys_alone(part):
    quantizer, pool = pool_of(part, LATENT)
    assert not any(field.name.startswith("v") for field in pool.format.fields)
    k, _ = tokens(PAGE + 2, group=LATENT)
    layer = pool.layers[0]
    layer.write(k, None, slots([3, 1], 0, len(k)))
    keys, values = quantizer.read(layer.storage, torch.tensor([3, 1]), len(k))
    assert torch.equal(keys, values)
    torch.testing.assert_close(keys, k, atol=3.0, rtol=0.1)


@pytest.mark.parametrize("part", [PlainKV, Int8KV, Fp8KV, Int4KV])
def test_read_gives_the_models_dtype(part):
    quantizer, pool = pool_of(part, dtype=torch.bfloat16)
    k, v = (x.bfloat16() for x in tokens(3))
    quantizer.write(pool.layers[0].storage, k, v, slots([1], 0, 3))
    assert {x.dtype for x in quantizer.read(pool.layers[0].storage, torch.tensor([1]), 3)} == {torch.bfloat16}


def test_bytes_a_token():
    def bits(part, page_size):
        quantizer = part(Options(), BuildContext(page_size=page_size))
        format = quantizer.format(GROUP, page_size, torch.float32)
        return 8 * page_bytes(GROUP, format, page_size) / page_size / (2 * (32 + 64))

    assert bits(PlainKV, 16) == 32
    assert bits(Int8KV, 16) == bits(Fp8KV, 16) == 8 + 32 * 4 / 192
    assert bits(Int4KV, 32) == pytest.approx(5, abs=0.05)


def test_tails_are_counted_apart_from_pages():
    _, pool = pool_of(Int4KV)
    format = pool.format
    assert pool.nbytes == 12 * page_bytes(GROUP, format, PAGE) + shared_bytes(GROUP, format)
    assert shared_bytes(GROUP, format) >= 4 * PAGE * 2 * 32 * 4


def test_odd_heads_and_tiny_pages_are_refused():
    with pytest.raises(ValueError, match="33 keys"):
        pool_of(Int4KV, KVGroup("full", (0,), 1, 33, 32))
    assert "page_size" in Int4KV.unfit(Options(), BuildContext(page_size=1))[0]

import pytest
import torch

from kernels import cpu
from kernels.reference.rows import rope
from tests.kernels.paged import poisoned

ERROR = {"fp32": 0.0, "bf16": 2**-8, "int8": 1 / 253}


@pytest.mark.parametrize("format", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("dk, dv, page_size", [(64, 64, 16), (40, 24, 32), (33, 17, 16)])
def test_write_and_read_back(isa, format, dk, dv, page_size):
    cache = poisoned(format, 6, page_size, 3, dk, dv)
    k, v = torch.randn(40, 3, dk), torch.randn(40, 3, dv)
    slots = torch.randperm(6 * page_size)[:40]
    cpu.kv_write(cache, k, v, slots, isa=isa)
    keys, values = (x.flatten(0, 1)[slots] for x in cpu.kv_read(cache, torch.arange(6)))
    for got, want in ((keys, k), (values, v)):
        most = want.abs().amax(-1, keepdim=True) if format == "int8" else want.abs()
        assert ((got - want).abs() <= ERROR[format] * most).all()


@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_only_the_given_slots_change(isa, format):
    cache = cpu.KVCache.allocate(format, 4, 16, 2, 32, 32)
    everything = torch.arange(64)
    cpu.kv_write(cache, torch.randn(64, 2, 32), torch.randn(64, 2, 32), everything, isa=isa)
    before = [x.flatten(0, 1).clone() for x in cpu.kv_read(cache, torch.arange(4))]
    slots = torch.tensor([3, -1, 40])
    cpu.kv_write(cache, torch.randn(3, 2, 32), torch.randn(3, 2, 32), slots, isa=isa)
    after = [x.flatten(0, 1) for x in cpu.kv_read(cache, torch.arange(4))]
    changed = [(a != b).flatten(1).any(1).nonzero().flatten().tolist() for a, b in zip(before, after, strict=True)]
    assert changed == [[3, 40], [3, 40]]


@pytest.mark.parametrize("rot", [64, 24])
def test_rope_write(isa, rot):
    cache = poisoned("fp32", 4, 16, 2, 64, 48)
    cos, sin = torch.randn(100, rot // 2), torch.randn(100, rot // 2)
    qkv = torch.randn(9, 6 * 64 + 2 * 64 + 2 * 48)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(qkv.split([384, 128, 96], 1), (64, 64, 48), strict=True))
    positions, slots = torch.randint(0, 100, (9,)), torch.randperm(64)[:9]
    want_q, want_k, want_v = rope(q, positions, cos, sin), rope(k, positions, cos, sin), v.clone()
    cpu.rope_write(cache, q, k, v, slots, positions, cos, sin, isa=isa)
    keys, values = (x.flatten(0, 1)[slots] for x in cpu.kv_read(cache, torch.arange(4)))
    torch.testing.assert_close(q, want_q)
    torch.testing.assert_close(keys, want_k)
    assert torch.equal(values, want_v)


def test_int8_bytes():
    """A token of 64 + 64 numbers a head costs 132 bytes."""
    fields = cpu.kv_fields("int8", 16, 3, 64, 64)
    held = sum(torch.Size(f.shape).numel() * f.dtype.itemsize for f in fields)
    assert held == 16 * 3 * 132


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e4, 0.0])
def test_int8_of_extreme_numbers_stays_finite(isa, scale):
    cache = cpu.KVCache.allocate("int8", 1, 16, 1, 32, 32)
    k = torch.randn(16, 1, 32) * scale
    cpu.kv_write(cache, k, k, torch.arange(16), isa=isa)
    keys, values = cpu.kv_read(cache, torch.arange(1))
    assert torch.isfinite(keys).all()
    assert (keys[0] - k).abs().max() <= max(k.abs().max() / 250, 1e-5)
    assert torch.equal(keys, values)

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import cpu
from kernels.reference.linear import linear as reference
from kernels.reference.rows import gate, rms_norm

KINDS = ["fp32", "int8", "q8_0", "q4_1", "q4_0"]


def make(kind: str, n: int, k: int, bias: bool = False) -> tuple[cpu.PackedLinear, torch.Tensor]:
    """A packed matrix, and the numbers it stands for, computed here from the codes."""
    b = torch.randn(n) if bias else None
    if kind == "fp32":
        w = torch.randn(n, k)
        return cpu.pack_fp32(w, b), w
    if kind == "int8":
        codes, scale = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.rand(n) / 100
        return cpu.pack_int8(codes, scale, b), codes * scale[:, None]
    scale, minimum = torch.rand(n, k // 32).half(), torch.randn(n, k // 32).half()
    wide, least = (x.float().repeat_interleave(32, 1) for x in (scale, minimum))
    if kind == "q8_0":
        codes = torch.randint(-128, 128, (n, k)).to(torch.int8)
        return cpu.pack_q8_0(codes, scale, b), codes * wide
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    if kind == "q4_1":
        return cpu.pack_q4_1(codes, scale, minimum, b), codes * wide + least
    return cpu.pack_q4_0(codes, scale, b), (codes.float() - 8) * wide


def close(got, want):
    assert (got.double() - want.double()).abs().max() <= 3e-6 * want.abs().max() + 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, n, k", [(1, 576, 576), (3, 50, 96), (16, 192, 4128), (29, 33, 64), (130, 64, 1536)])
def test_products(isa, kind, rows, n, k):
    packed, weight = make(kind, n, k, bias=True)
    x = torch.randn(rows, k)
    close(cpu.linear(x, packed, isa=isa), reference(x, weight, kind, packed.bias))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.integers(1, 100),
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
)
def test_any_shape(isa, rows, n, k, kind, bias):
    k = k if kind in ("fp32", "int8") else -(-k // 32) * 32
    packed, weight = make(kind, n, k, bias)
    x = torch.randn(rows, k)
    close(cpu.linear(x, packed, isa=isa), reference(x, weight, kind, packed.bias))


def test_the_largest_codes_do_not_overflow(isa):
    """Every product at its extreme, over more inputs than 32 bits could sum at once."""
    k = 8192
    packed = cpu.pack_int8(torch.full((16, k), 127, dtype=torch.int8), torch.ones(16))
    assert cpu.linear(torch.ones(1, k), packed, isa=isa)[0, 0] == pytest.approx(127 * k)
    nibbles = cpu.pack_q4_1(torch.full((16, k), 15, dtype=torch.uint8), *torch.ones(2, 16, k // 32).half())
    assert cpu.linear(-torch.ones(1, k), nibbles, isa=isa)[0, 0] == pytest.approx(-16 * k)


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_for_any_batch_and_threads(isa, kind):
    packed, _ = make(kind, 100, 256)
    x = torch.randn(130, 256)
    cpu.set_num_threads(1)
    one_by_one = torch.cat([cpu.linear(row[None], packed, isa=isa) for row in x])
    for threads in (1, 2, 3):
        cpu.set_num_threads(threads)
        for rows in (130, 64, 17, 5):
            assert torch.equal(cpu.linear(x[:rows], packed, isa=isa), one_by_one[:rows])


@pytest.mark.parametrize("kind", ["int8", "q4_1"])
def test_work_before_and_after(isa, kind):
    packed, _ = make(kind, 48, 96)
    x, both, norm, residual = torch.randn(7, 96), torch.randn(7, 192), torch.rand(96), torch.randn(7, 48)
    close(cpu.linear(x, packed, norm=norm, eps=1e-6, isa=isa), cpu.linear(rms_norm(x, norm, 1e-6), packed, isa=isa))
    for act in ("silu", "gelu"):
        close(cpu.linear(both, packed, gate=act, isa=isa), cpu.linear(cpu.gate(both, act, isa=isa), packed, isa=isa))
    want = residual + cpu.linear(x, packed, isa=isa)
    stream = residual.clone()
    assert cpu.linear(x, packed, add_to=stream, isa=isa) is stream
    assert torch.equal(stream, want)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_and_gather(isa, kind):
    packed, weight = make(kind, 50, 96)
    torch.testing.assert_close(cpu.dequantize(packed, isa=isa), weight.float(), rtol=1e-6, atol=1e-6)
    rows = torch.tensor([[3, 49], [0, 3]])
    torch.testing.assert_close(cpu.gather_rows(packed, rows, isa=isa), weight[rows].float(), rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"\[0, 50\)"):
        cpu.gather_rows(packed, torch.tensor([50]), isa=isa)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_gguf_blocks_are_kept_exactly(isa, name):
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(torch.randn(37, 128).numpy(), kind)
    want = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    packed = cpu.blocks_from_gguf([torch.from_numpy(raw)], name)
    assert torch.equal(cpu.dequantize(packed, isa=isa), want)
    assert packed.nbytes == -(-37 // 16) * 16 * raw.shape[1]


def by_codes(raw: torch.Tensor, name: str, bias: torch.Tensor) -> cpu.PackedLinear:
    """A GGUF tensor [n, bytes of a row] packed by way of its codes and factors."""
    n, size = raw.shape[0], {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[name]
    blocks = raw.view(n, -1, size)
    scale = blocks[..., :2].contiguous().view(torch.float16).view(n, -1)
    if name == "Q8_0":
        return cpu.pack_q8_0(blocks[..., 2:].contiguous().view(n, -1).view(torch.int8), scale, bias)
    body = blocks[..., size - 16 :]
    codes = torch.cat([body & 15, body >> 4], -1).view(n, -1)
    if name == "Q4_0":
        return cpu.pack_q4_0(codes, scale, bias)
    return cpu.pack_q4_1(codes, scale, blocks[..., 2:4].contiguous().view(torch.float16).view(n, -1), bias)


@settings(max_examples=40, deadline=None)
@given(
    heights=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    groups=st.integers(1, 5),
    name=st.sampled_from(["Q4_0", "Q4_1", "Q8_0"]),
    threads=st.integers(1, 3),
)
def test_gguf_blocks_are_stacked(heights, groups, name, threads):
    cpu.set_num_threads(threads)
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[name]
    raw = [torch.randint(0, 256, (n, groups * size), dtype=torch.uint8) for n in heights]
    bias = torch.randn(sum(heights))
    got, want = cpu.blocks_from_gguf(raw, name, bias), by_codes(torch.cat(raw), name, bias)
    assert torch.equal(got.data, want.data) and torch.equal(got.bias, want.bias)
    assert (got.kind, got.n, got.k, got.data.data_ptr() % 64) == (want.kind, want.n, want.k, 0)


@pytest.mark.parametrize("name, size", [("Q4_0", 18), ("Q4_1", 20), ("Q8_0", 34)])
@pytest.mark.parametrize("n", [16, 80])
def test_gguf_blocks_are_woven(name, size, n):
    gate_rows, up_rows = torch.randint(0, 256, (2, n, 3 * size), dtype=torch.uint8)
    bias = torch.randn(2, n)
    want = cpu.interleave(by_codes(gate_rows, name, bias[0]), by_codes(up_rows, name, bias[1]))
    got = cpu.blocks_from_gguf([gate_rows, up_rows], name, bias.view(-1), woven=True)
    assert torch.equal(got.data, want.data) and torch.equal(got.bias, want.bias)
    with pytest.raises(ValueError, match="are woven"):
        cpu.blocks_from_gguf([gate_rows, up_rows[1:]], name, woven=True)


def test_weights_lie_behind_each_other():
    """Whether packed under inference_mode or not."""
    with torch.inference_mode():
        first = make("q4_0", 160, 64)[0]
    second = make("q4_0", 160, 64)[0]
    between = second.data.data_ptr() - first.data.data_ptr()
    assert between == first.nbytes or between < 0 or between >= 64 << 20


@pytest.mark.parametrize("quantize, error", [(cpu.quantize_int8, 1 / 254), (cpu.quantize_int4, 1 / 14)])
def test_rounding_to_nearest(quantize, error):
    weight = torch.randn(40, 70)
    weight[3] = 0
    got = cpu.dequantize(quantize(weight))
    assert ((got - weight).abs() <= weight.abs().amax(1, keepdim=True) * (error * 1.001) + 1e-6).all()


@pytest.mark.parametrize("kind", KINDS)
def test_joined_matrices(isa, kind):
    parts = [make(kind, n, 64, bias=True) for n in (32, 16, 21)]
    x = torch.randn(5, 64)
    joined = cpu.concatenate([p for p, _ in parts])
    assert torch.equal(cpu.linear(x, joined, isa=isa), torch.cat([cpu.linear(x, p, isa=isa) for p, _ in parts], 1))
    gate_part, up_part = make(kind, 32, 64)[0], make(kind, 32, 64, bias=True)[0]
    woven = cpu.linear(x, cpu.interleave(gate_part, up_part), isa=isa).view(5, 2, 2, 16)
    assert torch.equal(woven[:, :, 0].flatten(1), cpu.linear(x, gate_part, isa=isa))
    assert torch.equal(woven[:, :, 1].flatten(1), cpu.linear(x, up_part, isa=isa))


def test_what_does_not_fit_is_said():
    packed = make("int8", 32, 64)[0]
    with pytest.raises(ValueError, match=r"x must be a \?x64"):
        cpu.linear(torch.randn(2, 63), packed)
    with pytest.raises(ValueError, match="multiple of 16"):
        cpu.concatenate([make("int8", 20, 64)[0], packed])
    with pytest.raises(ValueError, match="one kind"):
        cpu.concatenate([packed, make("q4_0", 32, 64)[0]])
    with pytest.raises(ValueError, match="gate and up must be alike"):
        cpu.interleave(packed, make("int8", 16, 64)[0])
    with pytest.raises(ValueError, match="groups of 32"):
        cpu.pack_q4_0(torch.zeros(16, 40, dtype=torch.uint8), torch.zeros(16, 1).half())


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_gate(isa, act, n):
    x = torch.randn(3, 2 * n) * 5
    torch.testing.assert_close(cpu.gate(x, act, isa=isa), gate(x, act), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 16, 576, 37])
def test_rms_norm(isa, n):
    x, add, weight = torch.randn(5, n), torch.randn(5, n), torch.randn(n)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5, isa=isa), rms_norm(x, weight, 1e-5))
    want = x + add
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5, add=add, isa=isa), rms_norm(want, weight, 1e-5))
    assert torch.equal(x, want)


@pytest.mark.parametrize("planes", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_comes_out_of_its_own_row_alone(isa, kind, planes):
    packed = replace(make(kind, 48, 96)[0], planes=planes)
    x = torch.randn(5, 96)
    clean = cpu.linear(x, packed, isa=isa)
    for at in (0, 40, 95):
        broken = x.clone()
        broken[2, at] = float("nan")
        got = cpu.linear(broken, packed, isa=isa)
        assert got[2].isnan().all()
        got[2] = clean[2]
        assert torch.equal(got, clean)
    padded = replace(make(kind, 48, 96)[0], planes=planes) if kind not in ("fp32", "int8") else make(kind, 48, 70)[0]
    row = torch.zeros(1, padded.k)
    row[0, -1] = float("nan")
    assert cpu.linear(row, padded, isa=isa).isnan().all()

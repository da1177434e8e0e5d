"""Products with weights packed as int8 or 4-bit codes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import check, pointer
from kernels.cpu.regions import room

Kind = Literal["fp32", "int8", "q8_0", "q4_1", "q4_0"]
BLOCK = 16
"""Rows of a packed block."""
GROUP = 32
"""Inputs that share a scale in the q8_0, q4_1 and q4_0 kinds; inputs are padded to a multiple in all kinds."""

_KINDS: tuple[Kind, ...] = ("fp32", "int8", "q8_0", "q4_1", "q4_0")
_GGUF: dict[str, tuple[Kind, int]] = {"Q4_0": ("q4_0", 18), "Q4_1": ("q4_1", 20), "Q8_0": ("q8_0", 34)}
"""The kind of each GGUF block, and its bytes."""


@dataclass(eq=False)
class PackedLinear:
    """A weight matrix [n, k] in blocks of 16 rows.

    Attributes:
        kind: `fp32`; `int8` (one fp32 scale a row); `q8_0`, `q4_1`, `q4_0` (groups of 32 inputs with half-precision
            scale, `q4_1` with a minimum too, as in the GGUF blocks of these names, whose numbers they keep exactly).
        data: uint8 [blocks, bytes of a block].
        scale: fp32 [16 * blocks] for `int8`, else None.
        bias: fp32 [n] or None.
        planes: how often inputs are rounded, each time what the last rounding left, with the products added up: 1 is
            fastest, 2 to 3 come to fp32's own precision (15 and 22 bits, or 28 where the first rounding has 14).
    """

    kind: Kind
    n: int
    k: int
    data: Tensor
    scale: Tensor | None = None
    bias: Tensor | None = None
    planes: int = 1
    struct: library.Linear = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.bias is not None:
            check("bias", self.bias, (self.n,), torch.float32)
        self.struct = library.Linear(
            _KINDS.index(self.kind),
            self.n,
            self.k,
            self.planes,
            pointer(self.data),
            pointer(self.scale),
            pointer(self.bias),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.bias) if t is not None)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    padded: Tensor = torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return padded


def _pairs(codes: Tensor) -> Tensor:
    """int8 [n, k] to [n / 16, k / 2, 16, 2]."""
    n, k = codes.shape
    return codes.view(n // BLOCK, BLOCK, k // 2, 2).transpose(1, 2).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    """uint8 [n, k] of 0..15 to bytes [n / 16, k / 32, 4, 16, 4]: input i low, input i + 16 high."""
    n, k = codes.shape
    low, high = codes.view(n // BLOCK, BLOCK, k // GROUP, 2, 4, 4).permute(3, 0, 2, 4, 1, 5).unbind()
    return (low | (high << 4)).contiguous()


def _bytes(x: Tensor, *shape: int) -> Tensor:
    return x.contiguous().view(torch.uint8).view(*shape, -1)


def _stored(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Parts uint8 [blocks, ...] joined along a dimension, in memory for weights: [blocks, bytes of a block]."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.cat(list(parts), dim, out=room(*shape)).view(shape[0], -1)


def _factors(x: Tensor) -> Tensor:
    """half [n, groups] to [n / 16, groups, 16]."""
    n, groups = x.shape
    return x.view(n // BLOCK, BLOCK, groups).transpose(1, 2)


def pack_fp32(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs a floating [n, k] without loss."""
    n, k = weight.shape
    w = _pad(weight.float(), BLOCK, GROUP)
    data = room(w.shape[0] // BLOCK, BLOCK * w.shape[1] * 4)
    data.view(torch.float32).view(len(data), -1, BLOCK).copy_(w.view(len(data), BLOCK, -1).transpose(1, 2))
    return PackedLinear("fp32", n, k, data, None, bias)


def pack_int8(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `scale[row] * codes`: codes int8 [n, k], scale fp32 [n]."""
    n, k = codes.shape
    check("codes", codes, (n, k), torch.int8, contiguous=False)
    check("scale", scale, (n,), torch.float32)
    data = _pairs(_pad(codes, BLOCK, GROUP))
    padded = torch.nn.functional.pad(scale, (0, -n % BLOCK))
    return PackedLinear("int8", n, k, _stored([_bytes(data, len(data))], 0), padded, bias)


def quantize_int8(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Rounds a floating [n, k] to int8 with one scale a row, symmetric."""
    w = weight.float()
    scale = w.abs().amax(1) / 127
    codes = torch.round(w / scale.clamp_min(1e-30)[:, None]).to(torch.int8)
    return pack_int8(codes, scale, bias)


def pack_q8_0(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `scale[row, group] * codes`: codes int8 [n, k], scale fp16 [n, k / 32]; k a multiple of 32."""
    n, k = _check_groups(codes, torch.int8, scale)
    codes, scale = _pad(codes, BLOCK, 1), _pad(scale, BLOCK, 1)
    blocks, groups = codes.shape[0] // BLOCK, k // GROUP
    parts = [_bytes(_pairs(codes), blocks, groups), _bytes(_factors(scale), blocks, groups)]
    return PackedLinear("q8_0", n, k, _stored(parts, 2), None, bias)


def pack_q4_1(codes: Tensor, scale: Tensor, minimum: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `scale * codes + minimum`: codes uint8 [n, k] of 0..15, scale and minimum fp16 [n, k / 32]."""
    n, k = _check_groups(codes, torch.uint8, scale)
    _check_groups(codes, torch.uint8, minimum)
    codes, scale, minimum = _pad(codes, BLOCK, 1), _pad(scale, BLOCK, 1), _pad(minimum, BLOCK, 1)
    blocks, groups = codes.shape[0] // BLOCK, k // GROUP
    parts = [_bytes(x, blocks, groups) for x in (_nibbles(codes), _factors(scale), _factors(minimum))]
    return PackedLinear("q4_1", n, k, _stored(parts, 2), None, bias)


def pack_q4_0(codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Packs `scale * (codes - 8)`: codes uint8 [n, k] of 0..15, scale fp16 [n, k / 32]."""
    n, k = _check_groups(codes, torch.uint8, scale)
    codes, scale = _pad(codes, BLOCK, 1), _pad(scale, BLOCK, 1)
    blocks, groups = codes.shape[0] // BLOCK, k // GROUP
    parts = [_bytes(x, blocks, groups) for x in (_nibbles(codes), _factors(scale))]
    return PackedLinear("q4_0", n, k, _stored(parts, 2), None, bias)


def quantize_int4(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """Rounds a floating [n, k] to symmetric 4-bit codes (-7..7) in groups of 32 inputs."""
    n, k = weight.shape
    w = _pad(weight.float(), 1, GROUP)
    groups = w.view(n, -1, GROUP)
    scale = (groups.abs().amax(2) / 7).clamp_min(6e-8).half()
    codes = torch.round(groups / scale.float()[..., None]).clamp(-7, 7) + 8
    packed = pack_q4_0(codes.to(torch.uint8).view(n, -1), scale, bias)
    return PackedLinear("q4_0", n, k, packed.data, None, bias)


def _check_groups(codes: Tensor, dtype: torch.dtype, factors: Tensor) -> tuple[int, int]:
    n, k = codes.shape
    check("codes", codes, (n, k), dtype)
    if k % GROUP:
        raise ValueError(f"rows of {k} inputs cannot be cut into groups of {GROUP}")
    check("scale or minimum", factors, (n, k // GROUP), torch.float16)
    return n, k


def blocks_from_gguf(
    raw: Sequence[Tensor], name: Literal["Q4_0", "Q4_1", "Q8_0"], bias: Tensor | None = None, *, woven: bool = False
) -> PackedLinear:
    """Packs the rows of GGUF tensors, stacked, without changing a number.

    Args:
        raw: each uint8 [n_i, bytes of a row] as stored: blocks of 32 inputs, a half-precision scale (Q4_1: and a
            minimum), then 16 bytes (input i low, input i + 16 high) or, for Q8_0, 32 codes.
        bias: fp32 [sum of n_i], in the order of the stack.
        woven: of two tensors with the same multiple of 16 rows, 16 rows of each in turn (as `interleave`).

    Raises:
        ValueError: rows of another length, or tensors that do not weave.
    """
    kind, size = _GGUF[name]
    heights, row_bytes = [part.shape[0] for part in raw], raw[0].shape[-1]
    for part in raw:
        check("raw", part, (None, row_bytes), torch.uint8)
    if row_bytes % size:
        raise ValueError(f"a {name} row is a multiple of {size} bytes, not {row_bytes}")
    if woven and (len(heights) != 2 or heights[0] != heights[1] or heights[0] % BLOCK):
        raise ValueError(f"only two matrices of one multiple of {BLOCK} rows are woven, not those of {heights} rows")
    n, groups = sum(heights), row_bytes // size
    data = room(-(-n // BLOCK), groups * size * BLOCK)
    data[n // BLOCK :] = 0
    first = 0
    for part, height in zip(raw, heights, strict=True):
        library.load().pw_pack(
            pointer(part),
            height,
            groups,
            first,
            len(raw) if woven else 1,
            _KINDS.index(kind),
            pointer(data),
            library.num_threads(),
        )
        first += BLOCK if woven else height
    if woven and bias is not None:
        bias = bias.view(2, -1, BLOCK).transpose(0, 1).reshape(-1)
    return PackedLinear(kind, n, groups * GROUP, data, None, bias)


def dequantize(weight: PackedLinear, *, isa: str | None = None) -> Tensor:
    """fp32 [n, k]: the numbers that the packed weight stands for."""
    return gather_rows(weight, torch.arange(weight.n), isa=isa)


def gather_rows(weight: PackedLinear, rows: Tensor, *, isa: str | None = None) -> Tensor:
    """Rows of the matrix as fp32 [len(rows), k]: an embedding lookup in a packed table.

    Args:
        rows: int64, any shape; every entry in [0, n).
    """
    flat = check("rows", rows.reshape(-1).contiguous(), (None,), torch.int64)
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < weight.n:
        raise ValueError(f"row numbers must lie in [0, {weight.n})")
    out = torch.empty(len(flat), weight.k)
    library.load(isa).pw_gather(ctypes.byref(weight.struct), pointer(flat), len(flat), pointer(out))
    return out.view(*rows.shape, weight.k)


def concatenate(weights: list[PackedLinear]) -> PackedLinear:
    """One matrix with the rows of all, in order: several products of the same input in one call.

    Raises:
        ValueError: different kinds or inputs, or a matrix other than the last with rows no multiple of 16.
    """
    first = weights[0]
    if any(w.kind != first.kind or w.k != first.k for w in weights):
        raise ValueError(f"only weights of one kind and input width join: {[(w.kind, w.k) for w in weights]}")
    if any(w.n % BLOCK for w in weights[:-1]):
        raise ValueError(f"rows before the last matrix must be a multiple of {BLOCK}: {[w.n for w in weights]}")
    biases = [torch.zeros(w.n) if w.bias is None else w.bias for w in weights]
    bias = None if all(w.bias is None for w in weights) else torch.cat(biases)
    scales = [w.scale for w in weights if w.scale is not None]
    return PackedLinear(
        first.kind,
        sum(w.n for w in weights),
        first.k,
        _stored([w.data for w in weights], 0),
        torch.cat(scales) if scales else None,
        bias,
    )


def interleave(gate: PackedLinear, up: PackedLinear) -> PackedLinear:
    """Blocks of `gate` and `up` in turn, which `step` needs to apply the gate as soon as both are known.

    Raises:
        ValueError: different kinds or shapes, or rows no multiple of 16.
    """
    if (gate.kind, gate.n, gate.k) != (up.kind, up.n, up.k) or gate.n % BLOCK:
        raise ValueError(
            f"gate and up must be alike, with rows a multiple of {BLOCK}: {gate.kind} {gate.n}x{gate.k} and "
            f"{up.kind} {up.n}x{up.k}"
        )

    def weave(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        if a is None and b is None:
            return None
        a = torch.zeros(gate.n) if a is None else a
        b = torch.zeros(gate.n) if b is None else b
        return torch.stack([a.view(gate.n // BLOCK, -1), b.view(gate.n // BLOCK, -1)], 1).reshape(-1)

    data = _stored([gate.data, up.data], 1).view(2 * len(gate.data), -1)
    return PackedLinear(gate.kind, 2 * gate.n, gate.k, data, weave(gate.scale, up.scale), weave(gate.bias, up.bias))


def linear(
    x: Tensor,
    weight: PackedLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    gate: Literal["silu", "gelu"] | None = None,
    add_to: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, with what comes before and after it in a decoder layer done on the way.

    int8 and q8_0 weights meet activations rounded to 14 bits with a scale a token; q4_1 and q4_0 weights meet 8 bits
    with a scale for each 32 inputs; fp32 weights meet fp32. Sums are exact integers, so the result of a token is the
    same bits whatever the batch or the number of threads.

    Args:
        x: fp32 [..., k], or [..., 2 k] with `gate`.
        norm: fp32 [k]: `x` goes through an rms-norm with this weight first.
        gate: `act(x[..., :k]) * x[..., k:]` comes first ("gelu" in its tanh form).
        add_to: fp32 [..., n]: the product is added to it in place (a residual), and it is returned.

    Returns:
        fp32 [..., n].
    """
    wide = weight.k if gate is None else 2 * weight.k
    if norm is not None and gate is not None:
        raise ValueError("norm and gate cannot both come before a product")
    rows = x.reshape(-1, x.shape[-1])
    check("x", rows, (None, wide), torch.float32, contiguous=False)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if norm is not None:
        check("norm", norm, (weight.k,), torch.float32)
    shape = (*x.shape[:-1], weight.n)
    y = torch.empty(shape) if add_to is None else check("add_to", add_to, shape, torch.float32)
    before = 1 if norm is not None else {None: 0, "silu": 2, "gelu": 3}[gate]
    library.load(isa).pw_linear_forward(
        pointer(rows),
        rows.stride(0),
        rows.shape[0],
        ctypes.byref(weight.struct),
        before,
        pointer(norm),
        eps,
        int(add_to is not None),
        pointer(y),
        weight.n,
        library.num_threads(),
    )
    return y

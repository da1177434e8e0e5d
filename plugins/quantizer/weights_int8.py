"""Weights in 8 bits, multiplied as integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.interfaces.model import StoredWeight
from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import Embedding, Linear, WeightQuantizer
from kernels.cpu.linear import pack_int8
from kernels.cpu.modules import Product, Table, unavailable, weave

PLANE = 64
"""Activations are whole numbers of at most PLANE * (PLANE - 1), split into two 7-bit planes. Seven bits, and the
weights as the left factor, keep processors without dot-product instructions from saturating: they add two products of
an unsigned byte (weight + 128) and a signed one in 16 bits, and 2 * 255 * 64 fits."""
ROWS_AT_ONCE = 8192
"""Rows quantized at a time, to bound what is held in floating point meanwhile."""


class Int8Linear:
    """y = s_w * (W @ round(x / s_x)) * s_x with W int8 [out, in], a scale for each output channel and one for each
    token. The sums are exact integers, so a row's result depends on nothing but the row."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.scales = scales
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        n_rows = x.shape[0]
        planes, scale = split(x.float())
        sums = torch._int_mm(self.weight, planes.t()).float()
        whole = torch.add(sums[:, n_rows:], sums[:, :n_rows], alpha=PLANE)
        out = whole.mul_(self.scales[:, None]).t().contiguous().mul_(scale)
        return (out if self.bias is None else out.add_(self.bias)).to(x.dtype)


class Int8Embedding:
    """Rows of a token table int8 [vocab, hidden] with a scale each."""

    def __init__(self, table: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.table = table
        self.scales = scales
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.scales.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return (self.table[tokens].float() * self.scales[tokens, None]).to(self.dtype)


class Int8Weights(WeightQuantizer):
    """Symmetric, by output channel: s = max|w| / 127, so each weight is off by at most s / 2.

    The per-channel and per-token scheme is that of LLM.int8() (Dettmers et al., 2022) without its outlier columns;
    finer activations take their place. Products run in the compiled CPU kernels, with activations of 14 bits, where
    those work, else through torch; the stored codes are the same. A tied head shares the token table.
    """

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._compiled = not unavailable()

    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        widths = {weight.shape[-1] for weight in weights}
        # Torch's integer product is wrong for a width of one.
        if len(widths) > 1 or min(widths) < 2 or any(len(weight.shape) != 2 for weight in weights):
            shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
            raise ValueError(
                f"{name}: int8 weights must be matrices of one width, at least 2, not {shapes}; "
                "set quantizer.weights=none"
            )
        quantized = [quantize(weight.dense()) for weight in weights]
        table = torch.cat([rows for rows, _ in quantized]) if len(quantized) > 1 else quantized[0][0]
        scales = torch.cat([scale for _, scale in quantized])
        bias = None if bias is None else bias.float()
        if not self._runs_compiled(table):
            return Int8Linear(table, scales, bias)
        order = weave([len(rows) for rows, _ in quantized])
        if order is not None:
            table, scales, bias = table[order], scales[order], None if bias is None else bias[order]
        return Product(pack_int8(table, scales, bias), woven=order is not None)

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding:
        table, scales = quantize(weight.dense())
        return (
            Table(pack_int8(table, scales), dtype)
            if self._runs_compiled(table)
            else Int8Embedding(table, scales, dtype)
        )

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        if isinstance(embedding, Table):
            return Product(embedding.packed)
        return Int8Linear(embedding.table, embedding.scales, None) if isinstance(embedding, Int8Embedding) else None

    def _runs_compiled(self, table: Tensor) -> bool:
        return self._compiled and table.device.type == "cpu"


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] as int8 of the same shape and float32 scales [out]. ValueError: it holds no finite number."""
    table = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], device=weight.device)
    for begin in range(0, weight.shape[0], ROWS_AT_ONCE):
        rows = weight[begin : begin + ROWS_AT_ONCE].float()
        scale = rows.abs().amax(dim=1) / 127
        if not bool(torch.isfinite(scale).all()):
            raise ValueError("a weight is NaN or infinite; the checkpoint is damaged")
        scales[begin : begin + ROWS_AT_ONCE] = scale
        table[begin : begin + ROWS_AT_ONCE] = torch.round(rows / _nonzero(scale)[:, None]).to(torch.int8)
    return table, scales


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows x [T, in] as planes int8 [2T, in], the high ones first, and scales [T, 1]: x = s * (PLANE * high + low)."""
    scale = x.abs().amax(dim=1, keepdim=True) / (PLANE * (PLANE - 1))
    whole = torch.round(x / _nonzero(scale))
    high = torch.round(whole / PLANE)
    return torch.cat((high, whole - PLANE * high)).to(torch.int8), scale


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, torch.ones_like(scale))

"""Products with quantized weights as the compiled kernels define them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def round_activations(x: Tensor, bits: Literal[14, 8]) -> Tensor:
    """fp32 [T, k] through the codes: 14 bits with a scale a row, or 8 bits with a scale (of 22 bits) for 32 inputs."""
    top, width = (8191, x.shape[-1]) if bits == 14 else (127, 32)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % width))
    groups = padded.view(*x.shape[:-1], -1, width)
    most = groups.abs().amax(-1, keepdim=True)
    codes = torch.round(groups * torch.where(most > 0, torch.tensor(float(top)) / most, 0.0))
    scale = most / float(top)
    if bits == 8:
        scale = (scale.view(torch.int32) & ~3).view(torch.float32)
    rounded: Tensor = (codes * scale).flatten(-2)
    return rounded[..., : x.shape[-1]]


def linear(x: Tensor, weight: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` in double precision after rounding x as the kind wants.

    Args:
        x: [T, k].
        weight: [n, k], the numbers the codes stand for.
        kind: as in `kernels.cpu.linear.PackedLinear`.
    """
    if kind != "fp32":
        x = round_activations(x, 14 if kind in ("int8", "q8_0") else 8)
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()

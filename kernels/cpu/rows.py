"""Norm and gating of rows. The same work fused into a product: `kernels.cpu.linear.linear`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import check, pointer


def rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-5, *, add: Tensor | None = None, isa: str | None = None
) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Args:
        x: fp32 [..., n], contiguous.
        weight: fp32 [n].
        add: fp32 like x: `x += add` in place first (the residual stream).
    """
    n = x.shape[-1]
    check("x", x, tuple(x.shape), torch.float32)
    check("weight", weight, (n,), torch.float32)
    if add is not None:
        check("add", add, tuple(x.shape), torch.float32)
    y = torch.empty_like(x)
    library.load(isa).pw_rms_norm(
        pointer(x), n, pointer(add), n, pointer(weight), eps, x.numel() // max(n, 1), n, pointer(y)
    )
    return y


def gate(x: Tensor, act: Literal["silu", "gelu"] = "silu", *, isa: str | None = None) -> Tensor:
    """`act(x[..., :n]) * x[..., n:]` of fp32 [..., 2 n]; "gelu" is its tanh form."""
    check("x", x, tuple(x.shape), torch.float32)
    n = x.shape[-1] // 2
    y = torch.empty(*x.shape[:-1], n)
    library.load(isa).pw_gate(pointer(x), 2 * n, y.numel() // max(n, 1), n, int(act == "gelu"), pointer(y))
    return y

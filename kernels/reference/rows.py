"""Norm, gating and rope of rows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def gate(x: Tensor, act: Literal["silu", "gelu"]) -> Tensor:
    """`act(first half) * second half` of the last dimension."""
    a, b = x.chunk(2, -1)
    return (torch.nn.functional.silu(a) if act == "silu" else torch.nn.functional.gelu(a, approximate="tanh")) * b


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the two halves of the first `2 * cos.shape[1]` numbers of each head against each other.

    Args:
        x: [T, H, D].
        positions: integers [T].
        cos, sin: [n_positions, rot / 2].
    """
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)

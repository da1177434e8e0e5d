"""Rotary position embedding (Su et al., RoFormer) and the ways to stretch it.

A token's rotation depends on its own position and on the length the model is served with, never on the batch, the
chunk or the sequence it belongs to, so that cached keys stay valid under chunking, preemption and prefix sharing.
Where transformers looks at the sequence's length this means:

- dynamic: up to `max_positions` they are equal; beyond, a token at position p gets the base of a sequence of p + 1
  tokens, which is what transformers computes when it decodes one token at a time.
- longrope: the long factors are used everywhere when more than the original length may be served, else the short ones.
  transformers switches when a sequence crosses the original length, and recomputes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from core.models.config import RopeConfig
from core.types import PartwiseError


class Rope:
    """Cosines and sines of one kind of rotation."""

    def __init__(self, config: RopeConfig, head_dim: int, served: int, device: str) -> None:
        if config.kind not in SCALINGS:
            raise PartwiseError(f"rope scaling {config.kind!r} is not known; known are {', '.join(SCALINGS)}")
        frequencies, self.scale = SCALINGS[config.kind](config, served)
        self.frequencies = frequencies.to(device)
        self.dim, self.head_dim, self.served = config.dim, head_dim, served
        self.dynamic = config if config.kind == "dynamic" else None

    def tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """int64 [T] -> cosines and signed sines [T, 1, dim], as `rotate` wants them."""
        places = positions.float()[:, None]
        frequencies = _dynamic_frequencies(self.dynamic, places) if self.dynamic else self.frequencies
        angles = places * frequencies
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]

    def half_tables(self) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines fp32 [served, dim / 2] of every position; None where they are not fixed."""
        if self.dynamic:
            return None
        angles = torch.arange(self.served, device=self.frequencies.device).float()[:, None] * self.frequencies
        return (angles.cos() * self.scale).contiguous(), (angles.sin() * self.scale).contiguous()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first numbers of each head of x [T, heads, D], as many as the tables have."""
    cos, sin = tables
    dim = cos.shape[-1]
    half = dim // 2
    if dim == x.shape[-1]:
        return (x * cos).addcmul_(torch.cat((x[..., half:], x[..., :half]), -1), sin)
    turned = x[..., :dim] * cos
    turned.addcmul_(torch.cat((x[..., half:dim], x[..., :half]), -1), sin)
    return torch.cat((turned, x[..., dim:]), -1)


def _plain(config: RopeConfig) -> Tensor:
    exponents = torch.arange(0, config.dim, 2).float() / config.dim
    return torch.reciprocal(torch.pow(config.theta, exponents))


def _default(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    return _plain(config), 1.0


def _linear(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    return _plain(config) / config.get("factor"), 1.0


def _factors(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    """A divisor for each frequency, as GGUF files store llama3's scaling."""
    return _plain(config) / torch.tensor(config.get("factors")), 1.0


def _dynamic_frequencies(config: RopeConfig, places: Tensor) -> Tensor:
    """NTK-aware scaling by length (Emozilla): a larger base once a position is beyond the model's length."""
    factor, longest, dim = config.get("factor"), config.max_positions, config.dim
    lengths = (places + 1).clamp(min=longest)
    base = config.theta * (factor * lengths / longest - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device=places.device).float() / dim
    return torch.reciprocal(torch.pow(base, exponents))


def _llama3(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between blended."""
    plain, factor = _plain(config), config.get("factor")
    low, high = config.get("low_freq_factor"), config.get("high_freq_factor")
    turns = config.get("original_max_position_embeddings", config.max_positions) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - keep) + plain * keep, 1.0


def _yarn(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): frequencies that turn often are kept, slow ones interpolated, with a ramp between."""
    original = config.get("original_max_position_embeddings", config.max_positions)
    factor = config.get("factor", config.max_positions / original)
    dim, plain = config.dim, _plain(config)

    def bound(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = bound(config.get("beta_fast", 32)), bound(config.get("beta_slow", 1))
    if config.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _yarn_scale(config, factor)


def _yarn_scale(config: RopeConfig, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = config.get("attention_factor")
    if given is not None:
        return float(given)
    one, all_dim = config.get("mscale"), config.get("mscale_all_dim")
    return mscale(one) / mscale(all_dim) if one and all_dim else mscale(1)


def _longrope(config: RopeConfig, served: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a divisor for each frequency, one set for short and one for long serving."""
    original = config.get("original_max_position_embeddings", config.max_positions)
    factor = config.get("factor", config.max_positions / original)
    factors = torch.tensor(config.get("long_factor" if served > original else "short_factor"))
    scale = config.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return _plain(config) / factors, scale


SCALINGS: dict[str, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
"""Each way to stretch, from the config and the length served to frequencies [dim / 2] and a factor on cos and sin."""

"""Keys and values in one byte a number, with a scale for each token and head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import KVQuantizer
from core.types import KVField, KVFormat, KVGroup


class ScaledKV(KVQuantizer):
    """Fields k [Hkv, D] and v [Hkv, Dv] of one byte a number, and k_scale and v_scale [Hkv] in float32, each for a
    token. A latent group has k alone, and reads it as its values. A subclass says how numbers become bytes."""

    name: str
    dtype: torch.dtype
    largest: float

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._model_dtype = torch.float32

    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        self._model_dtype = dtype
        widths = {"k": group.key_dim} if group.value_in_key else {"k": group.key_dim, "v": group.value_dim}
        fields = [
            field
            for name, width in widths.items()
            for field in (
                KVField(name, self.dtype, (group.kv_heads, width)),
                KVField(f"{name}_scale", torch.float32, (group.kv_heads,)),
            )
        ]
        return KVFormat(self.name, tuple(fields))

    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        for name, rows in (("k", k), ("v", v)):
            if name in storage:
                rows = rows.float()
                scale = rows.abs().amax(dim=-1) / self.largest
                codes = self.encode(rows / torch.where(scale > 0, scale, 1.0)[..., None])
                _bytes(storage[name]).flatten(0, 1).index_copy_(0, slots, _bytes(codes))
                storage[f"{name}_scale"].flatten(0, 1).index_copy_(0, slots, scale)

    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        keys = self._decoded(storage, "k", pages, n_tokens)
        return keys, self._decoded(storage, "v", pages, n_tokens) if "v" in storage else keys

    @abstractmethod
    def encode(self, scaled: Tensor) -> Tensor:
        """Numbers of at most `largest` as `dtype`, the nearest that it has."""

    def _decoded(self, storage: Mapping[str, Tensor], name: str, pages: Tensor, n_tokens: int) -> Tensor:
        codes = _bytes(storage[name]).index_select(0, pages).flatten(0, 1)[:n_tokens].view(self.dtype)
        scale = storage[f"{name}_scale"].index_select(0, pages).flatten(0, 1)[:n_tokens]
        return (codes.float() * scale[..., None]).to(self._model_dtype)


class Int8KV(ScaledKV):
    """Symmetric: each number is off by at most half its scale, max|x| / 254."""

    name = "int8"
    dtype = torch.int8
    largest = 127.0

    def encode(self, scaled: Tensor) -> Tensor:
        return torch.round(scaled).to(torch.int8)


class Fp8KV(ScaledKV):
    """The 8-bit float of four exponent and three mantissa bits: each number is off by at most 1/16 of itself, or for
    tiny ones by max|x| / 448 / 2**10."""

    name = "fp8_e4m3"
    dtype = torch.float8_e4m3fn
    largest = 448.0

    def encode(self, scaled: Tensor) -> Tensor:
        return scaled.to(torch.float8_e4m3fn)


def _bytes(stored: Tensor) -> Tensor:
    """The same bytes without their meaning: torch cannot index 8-bit floats everywhere."""
    return stored.view(torch.uint8)

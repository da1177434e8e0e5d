"""Keys and values in 8 bits, laid out for the compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import KVQuantizer
from core.types import KVField, KVFormat, KVGroup
from kernels.cpu.kv import GROUP, KVCache, kv_fields, kv_read, kv_write
from kernels.cpu.modules import unavailable
from kernels.reference.kv import write_int8

Storage = Mapping[str, Tensor]


class PackedInt8KV(KVQuantizer):
    """Symmetric, with a half-precision scale for each token and head: each number is off by at most half its scale,
    max|x| / 254, and half a 1024th of itself. 16 tokens lie side by side (kernels.cpu.kv.kv_fields).

    Written by the compiled kernels where they work, else through torch; every attention kernel can read it.
    """

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._compiled = not unavailable()
        self._model_dtype = torch.float32

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        if context.page_size % GROUP == 0:
            return ()
        return (f"{GROUP} tokens lie side by side, so kv_allocator.page_size must be a multiple of {GROUP}",)

    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        if group.value_in_key or group.key_dim % GROUP or group.value_dim % GROUP:
            kept = "a latent" if group.value_in_key else f"heads of {group.key_dim} keys and {group.value_dim} values"
            raise ValueError(
                f"int8_cpu stores keys and values apart, {GROUP} numbers at a time, and this model keeps {kept}; "
                "set quantizer.kv=int8"
            )
        self._model_dtype = dtype
        found = kv_fields("int8", page_size, group.kv_heads, group.key_dim, group.value_dim)
        return KVFormat("int8_cpu", tuple(KVField(f.name, f.dtype, f.shape, per="page") for f in found))

    def write(self, storage: Storage, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if self._compiled:
            kv_write(_cache(storage), _rows(k), _rows(v), slots)
        else:
            write_int8(storage, k, v, slots)

    def read(self, storage: Storage, pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        keys, values = (x.flatten(0, 1)[:n_tokens].to(self._model_dtype) for x in kv_read(_cache(storage), pages))
        return keys, values


def _cache(storage: Storage) -> KVCache:
    heads, page_size = storage["k_scale"].shape[1:]
    key_dim, value_dim = 2 * storage["k"].shape[3], GROUP * storage["v"].shape[3]
    return KVCache("int8", page_size, heads, key_dim, value_dim, **storage)


def _rows(x: Tensor) -> Tensor:
    """[T, H, D] in fp32 with the heads of a token side by side, as the kernel takes it."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()

"""Keys and values as they are, in the model's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from core.interfaces.quantizer import KVQuantizer
from core.types import KVField, KVFormat, KVGroup


class PlainKV(KVQuantizer):
    """Fields k [Hkv, D] and v [Hkv, Dv] for each token; a latent group has k alone, and reads it as its values."""

    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        fields = [KVField("k", dtype, (group.kv_heads, group.key_dim))]
        if not group.value_in_key:
            fields.append(KVField("v", dtype, (group.kv_heads, group.value_dim)))
        return KVFormat("none", tuple(fields))

    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        for name, rows in (("k", k), ("v", v)):
            if name in storage:
                storage[name].flatten(0, 1).index_copy_(0, slots, rows.to(storage[name].dtype))

    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        keys = storage["k"].index_select(0, pages).flatten(0, 1)[:n_tokens]
        if "v" not in storage:
            return keys, keys
        return keys, storage["v"].index_select(0, pages).flatten(0, 1)[:n_tokens]

"""Weights in the blocks of their own file, multiplied by compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from core.interfaces.model import StoredWeight
from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import Embedding, Linear, WeightQuantizer
from kernels.cpu.linear import PackedLinear, blocks_from_gguf, pack_fp32
from kernels.cpu.modules import Product, Table, unavailable, weave

Block = Literal["Q4_0", "Q4_1", "Q8_0"]
KEPT = {name.lower(): name for name in get_args(Block)}
"""Storages whose blocks the kernels multiply as they are, with the names that the kernels know them by."""


class NativeWeights(WeightQuantizer):
    """Keeps the GGUF blocks Q4_0, Q4_1 and Q8_0; everything else, and a stack of unlike storages, is packed in fp32.

    No weight changes. Inputs of a product over blocks are rounded: to 8 bits with a scale for each 32 over 4-bit
    blocks, to 14 bits with a scale a token over Q8_0. A tied head shares the token table.
    """

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        reason = unavailable()
        return (f"{reason}; quantizer.weights=none keeps the same weights in the model's dtype",) if reason else ()

    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        order = weave([weight.shape[0] for weight in weights])
        return Product(_packed(weights, bias, order), woven=order is not None)

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding:
        return Table(_packed([weight], None, None), dtype)

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        return Product(embedding.packed) if isinstance(embedding, Table) else None


def _packed(weights: Sequence[StoredWeight], bias: Tensor | None, order: Tensor | None) -> PackedLinear:
    kinds = {weight.storage for weight in weights}
    kept: Block | None = KEPT.get(next(iter(kinds))) if len(kinds) == 1 else None  # type: ignore[assignment]
    stacked = torch.cat([weight.raw() if kept else weight.dense().float() for weight in weights])
    bias = None if bias is None else bias.float()
    if order is not None:
        stacked, bias = stacked[order], None if bias is None else bias[order]
    return blocks_from_gguf(stacked, kept, bias) if kept else pack_fp32(stacked, bias)

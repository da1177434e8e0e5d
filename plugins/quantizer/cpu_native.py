"""Weights in the blocks of their own file, multiplied by compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from core.interfaces.model import StoredWeight
from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import Embedding, Linear, WeightQuantizer
from kernels.cpu.linear import PackedLinear, blocks_from_gguf, pack_fp32
from kernels.cpu.modules import Product, Table, unavailable, weave

Block = Literal["Q4_0", "Q4_1", "Q8_0"]
KEPT: dict[str, Block] = {"q4_0": "Q4_0", "q4_1": "Q4_1", "q8_0": "Q8_0"}
"""Storages whose blocks the kernels multiply as they are, with the names that the kernels know them by."""
EXACT: dict[Block, int] = {"Q4_0": 3, "Q4_1": 3, "Q8_0": 2}
"""How often inputs are rounded, each time what the last rounding left, until nothing is left that fp32 could hold."""


class NativeWeights(WeightQuantizer):
    """Keeps the GGUF blocks Q4_0, Q4_1 and Q8_0; everything else, and a stack of unlike storages, is packed in fp32.

    No weight changes. A tied head shares the token table.
    """

    planes: Mapping[Block, int] = EXACT

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        reason = unavailable()
        return (f"{reason}; quantizer.weights=none keeps the same weights in the model's dtype",) if reason else ()

    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        order = weave([weight.shape[0] for weight in weights])
        bias = None if bias is None else bias.float()
        return Product(self._packed(weights, bias, order), woven=order is not None)

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding:
        return Table(self._packed([weight]), dtype)

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        return Product(embedding.packed) if isinstance(embedding, Table) else None

    def _packed(
        self, weights: Sequence[StoredWeight], bias: Tensor | None = None, order: Tensor | None = None
    ) -> PackedLinear:
        storages = {weight.storage for weight in weights}
        block = KEPT.get(storages.pop()) if len(storages) == 1 else None
        if block:
            packed = blocks_from_gguf([weight.raw() for weight in weights], block, bias, woven=order is not None)
            return replace(packed, planes=self.planes[block])
        stacked = torch.cat([weight.dense().float() for weight in weights])
        if order is None:
            return pack_fp32(stacked, bias)
        return pack_fp32(stacked[order], None if bias is None else bias[order])


class RoundedNativeWeights(NativeWeights):
    """The same weights; inputs are rounded once, to 8 bits over 4-bit blocks and to 14 over Q8_0."""

    planes: Mapping[Block, int] = dict.fromkeys(EXACT, 1)

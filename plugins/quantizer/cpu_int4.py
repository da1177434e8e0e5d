"""Weights in 4 bits, multiplied by compiled CPU kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from core.interfaces.model import StoredWeight
from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import Embedding, Linear, WeightQuantizer
from kernels.cpu.linear import quantize_int4, quantize_int8
from kernels.cpu.modules import Product, Table, unavailable, weave

HEAD = "head.weight"
LARGEST = 7 * 65504.0
"""Scales are kept in half precision."""


class Int4Weights(WeightQuantizer):
    """Rounds to the nearest of 15 steps, symmetric, with a scale for each 32 inputs; inputs are rounded to 8 bits
    alike. The token table and the head, which errors in 4 bits reach unsoftened, take 8 bits with a scale a row."""

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        reason = unavailable()
        return (f"{reason}; quantizer.weights=int8 runs without them",) if reason else ()

    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        order = weave([weight.shape[0] for weight in weights])
        stacked = torch.cat([weight.dense().float() for weight in weights])
        if not float(stacked.abs().max()) <= LARGEST:
            raise ValueError(
                f"{name}: a weight is beyond {LARGEST:,.0f} or not a number, which int4 cannot hold; set "
                "quantizer.weights=none if the checkpoint is not damaged"
            )
        bias = None if bias is None else bias.float()
        if order is not None:
            stacked, bias = stacked[order], None if bias is None else bias[order]
        quantize = quantize_int8 if name == HEAD else quantize_int4
        return Product(quantize(stacked, bias), woven=order is not None)

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding:
        return Table(quantize_int8(weight.dense()), dtype)

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        return Product(embedding.packed) if isinstance(embedding, Table) else None

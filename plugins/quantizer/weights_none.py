"""Weights as they are, in the model's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.model import StoredWeight
from core.interfaces.quantizer import Embedding, Linear, WeightQuantizer


class DenseLinear:
    """A product with weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class DenseEmbedding:
    """Rows of a table [vocab, hidden]."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)


class DenseWeights(WeightQuantizer):
    """Stacks what is fused, and keeps a tied output head as the token table itself."""

    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        dense = [weight.dense().to(dtype) for weight in weights]
        weight = dense[0] if len(dense) == 1 else torch.cat(dense)
        return DenseLinear(weight, None if bias is None else bias.to(dtype))

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding:
        return DenseEmbedding(weight.dense().to(dtype))

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        return DenseLinear(embedding.table, None) if isinstance(embedding, DenseEmbedding) else None

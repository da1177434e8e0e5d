"""The quantizer seam: how numbers are stored. Weights and cached keys and values have a slot each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from core.interfaces.model import StoredWeight
from core.interfaces.plugin import Options, Part
from core.types import KVFormat, KVGroup

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Linear(Protocol):
    """A matrix product with weights as they are stored."""

    @property
    def nbytes(self) -> int:
        """What the weights hold in this process, scales and bias included."""
    @property
    def out_features(self) -> int: ...
    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]. A row's result does not depend on the rows beside it."""


class Embedding(Protocol):
    """Rows of a table as it is stored."""

    @property
    def nbytes(self) -> int: ...
    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens int64 [T] -> [T, hidden]"""


class WeightQuantizer(Part[Options], ABC):
    """Turns a checkpoint's matrices into products over its own storage."""

    @abstractmethod
    def linear(self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """One product over `weights` [out_i, in] stacked along out (fused QKV, gate and up). `name` is the canonical
        name of the first. ValueError: a shape or storage that it cannot take, with what to do."""

    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> Embedding | None:
        """The token table in this format, or None to keep it as the core would."""
        return None

    def tied_head(self, name: str, embedding: Embedding, dtype: torch.dtype) -> Linear | None:
        """The output head over the table `embedding` has stored already, or None to store it on its own."""
        return None


class KVQuantizer(Part[Options], ABC):
    """How keys and values lie in the pool. The pool is allocated in the format, so its size is what is saved."""

    @abstractmethod
    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        """The fields of one layer of `group`."""

    @abstractmethod
    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Encode k [T, Hkv, D] and v [T, Hkv, Dv] into `slots` int64 [T] (page * page_size + offset). Tokens of a
        page arrive in order, over one or many calls; a page may be copied whole between calls."""

    @abstractmethod
    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Decode the first `n_tokens` of `pages` int64 [M]: k [n, Hkv, D], v [n, Hkv, Dv], in the model's dtype."""

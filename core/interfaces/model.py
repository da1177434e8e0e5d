"""A model's shape and its stored weights, as structures and weight quantizers see them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps: see core.types.KVGroup for the meaning of each number."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    value_in_key: bool = False


class ModelConfig(Protocol):
    """The part of a model's description that structures read."""

    @property
    def layers(self) -> tuple[LayerShape, ...]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


class StoredWeight(Protocol):
    """One tensor as a checkpoint holds it, opened when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def storage(self) -> str:
        """`f32`, `bf16`, `f16`, or a block format by its GGUF name in lower case, such as `q4_1`."""
    def dense(self) -> Tensor:
        """The numbers in the model's dtype; rows in this weight's order."""
    def raw(self) -> Tensor:
        """The stored bytes, uint8 [rows, bytes a row], for block formats; rows in this weight's order."""


class Weights(Mapping[str, StoredWeight]):
    """A checkpoint: canonical names to stored tensors."""

    def __init__(self, tensors: Mapping[str, StoredWeight]) -> None:
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> StoredWeight:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

"""The attention seam: what a layer keeps of its context (structure), and how it is read (kernel)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from core.interfaces.plugin import Options, Part
from core.types import Batch, KVFormat, KVGroup, LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from core.interfaces.model import ModelConfig, Weights


class KVView(Protocol):
    """One layer's cache, as a kernel sees it. The core has written this step's keys and values before the kernel
    runs, so a row's context is all in its pages."""

    @property
    def format(self) -> KVFormat: ...
    @property
    def storage(self) -> dict[str, Tensor]:
        """The pool's own tensors by field name; pages first (see KVField)."""
    def rows(self, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        """Keys [S, Hkv, D] and values [S, Hkv, Dv] of one row from its `kv_start` on, in the model's dtype. A view
        of the pool when the row's pages are neighbours and the format stores plain numbers; do not write to it."""


class AttentionKernel(Part[Options], ABC):
    """Computes attention of a ragged batch over paged keys and values. One instance serves all layers."""

    formats: Sequence[str] = ("none",)
    """KV formats it reads; with "*" it reads any, through `KVView.rows`."""

    def prepare(self, batch: Batch, layers: Sequence[LayerSpec]) -> Any:
        """Once a step: what all layers can share (masks, split sizes). Goes to every `forward`."""
        return None

    @abstractmethod
    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        """q [T, Hq, D] -> [T, Hq, Dv]; causal, with the layer's window, soft cap and sinks. Does not change q."""


class AttentionStructure(Part[Options], ABC):
    """What is kept of the context: the checkpoint's own heads, or a conversion of them."""

    def convert(self, config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        """Rewrite a checkpoint to this structure. The default keeps it."""
        return config, weights

    @abstractmethod
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        """Layers by the cache they share, each layer in exactly one group."""

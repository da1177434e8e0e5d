"""The pieces of a decoder, offered to a kernel that can run a whole step in one go.

A kernel looks at what its neighbours are (each product's own storage, each layer's cache) and takes the step over, or
declines, and then layers are run one by one, as they are where a layer's heads lie in several KV groups. Nothing but
speed may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from core.interfaces.attention import KVView
from core.interfaces.quantizer import Embedding, Linear
from core.types import Batch, LayerSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerPieces:
    """Norm, attention, residual, norm, gated MLP, residual.

    `qkv` gives all query heads, then key heads, then value heads; `gate_up` gives the gates, then the values they
    gate. Norm weights are fp32 [hidden], or [key_dim] for `q_norm` and `k_norm`, as they multiply; None: no such norm.
    `cos`, `sin`: fp32 [positions, rotated / 2], for heads that rotate as two halves.
    """

    spec: LayerSpec
    attn_norm: Tensor
    qkv: Linear
    o: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    activation: str
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attn_post_norm: Tensor | None = None
    mlp_post_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderPieces:
    """A whole model of such layers. Embeddings are multiplied by `embed_scale`; logits pass `cap * tanh(x / cap)`."""

    embedding: Embedding
    layers: tuple[LayerPieces, ...]
    final_norm: Tensor
    norm_eps: float
    head: Linear
    embed_scale: float = 1.0
    logit_softcap: float | None = None


class FusedStep(Protocol):
    """A step taken over: writes keys and values, reads them, and gives what the layers one by one would."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Final hidden states, normed, [T, hidden], and float32 logits of `batch.logit_rows` [R, V]."""


@runtime_checkable
class Fusable(Protocol):
    """What a model offers to a kernel that fuses."""

    def pieces(self) -> DecoderPieces | None:
        """None: it has something that the pieces cannot say."""


@runtime_checkable
class Fuser(Protocol):
    """What an attention kernel may offer beside AttentionKernel's methods."""

    def fuse(self, pieces: DecoderPieces, kv: Mapping[int, KVView]) -> FusedStep | None:
        """Take over the step of this model over these caches, by layer; None: it cannot."""

"""The decoder: one class for every family, told apart by ModelConfig alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from core.interfaces.fusing import DecoderPieces, LayerPieces
from core.interfaces.quantizer import Embedding, Linear
from core.models.config import ModelConfig
from core.models.layers import (
    GatedMLP,
    HeadAttention,
    LatentAttention,
    Parts,
    RMSNorm,
    Tables,
    build_mlp,
    build_norm,
)
from core.models.rope import Rope
from core.types import Attend, Batch, LayerSpec


class DenseEmbedding:
    """The token table in the model's dtype."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)


class DenseHead:
    """The output head over a dense token table."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def out_features(self) -> int:
        return self.table.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table)


class Layer:
    """Attention and MLP with the norms around them, both added to the residual stream."""

    def __init__(self, parts: Parts, config: ModelConfig, spec: LayerSpec) -> None:
        name, detail = f"layers.{spec.index}", config.details[spec.index]
        self.rope = detail.rope
        self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm = (
            build_norm(parts, f"{name}.{norm}", config, config.norms)
            for norm in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
        )
        attention = LatentAttention if config.mla else HeadAttention
        self.attention = attention(parts, config, spec)
        self.mlp = build_mlp(parts, name, detail.mlp)
        self.activation = detail.mlp.activation

    def __call__(self, x: Tensor, tables: Sequence[Tables], attend: Attend) -> Tensor:
        x = x + self.attn_post_norm(self.attention(self.attn_norm(x), tables[self.rope], attend))
        return x + self.mlp_post_norm(self.mlp(self.mlp_norm(x)))

    def pieces(self, tables: tuple[Tensor, Tensor] | None) -> LayerPieces | None:
        attention, mlp = self.attention, self.mlp
        if (
            tables is None
            or not isinstance(attention, HeadAttention)
            or attention.over_all
            or not isinstance(mlp, GatedMLP)
            or not isinstance(self.attn_norm, RMSNorm)
            or not isinstance(self.mlp_norm, RMSNorm)
        ):
            return None
        q_norm, k_norm = attention.head_norms()
        return LayerPieces(
            spec=attention.spec,
            attn_norm=self.attn_norm.weight,
            qkv=attention.qkv,
            o=attention.o,
            mlp_norm=self.mlp_norm.weight,
            gate_up=mlp.gate_up,
            down=mlp.down,
            activation=self.activation,
            cos=tables[0],
            sin=tables[1],
            q_norm=q_norm,
            k_norm=k_norm,
            attn_post_norm=_weight(self.attn_post_norm),
            mlp_post_norm=_weight(self.mlp_post_norm),
        )


def _weight(norm: Callable[[Tensor], Tensor]) -> Tensor | None:
    return norm.weight if isinstance(norm, RMSNorm) else None


class Decoder:
    """Tokens to hidden states, and hidden states to logits. `served`: the longest sequence, in tokens."""

    def __init__(self, parts: Parts, config: ModelConfig, specs: Sequence[LayerSpec], served: int) -> None:
        self.config, self.dtype = config, parts.dtype
        self.embed, self.head = self._ends(parts)
        self.embed_scale = torch.tensor(config.embed_scale, dtype=parts.dtype).item()
        dims = [config.mla.rope_dim if config.mla else spec.key_dim for spec in specs]
        self.ropes = [
            Rope(rope, dims[[d.rope for d in config.details].index(i)], served, parts.device)
            for i, rope in enumerate(config.ropes)
        ]
        self.layers = [Layer(parts, config, spec) for spec in specs]
        self.norm = build_norm(parts, "norm", config, ("norm",))

    def _ends(self, parts: Parts) -> tuple[Embedding, Linear]:
        config, weight = self.config, parts.weights["embed.weight"]
        embedding = parts.quantizer.embedding("embed.weight", weight, parts.dtype)
        embed = embedding or DenseEmbedding(weight.dense())
        parts.nbytes += embed.nbytes
        if not config.tied_head:
            return embed, parts.linear("head")
        head = parts.quantizer.tied_head("head.weight", embed, parts.dtype) if embedding else None
        if head is None and isinstance(embed, DenseEmbedding):
            return embed, DenseHead(embed.table)
        if head is None:
            head = parts.quantizer.linear("head.weight", [weight], None, parts.dtype)
            parts.nbytes += head.nbytes
        return embed, head

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """Final hidden states [T, hidden], normed."""
        tables = [rope.tables(batch.positions, self.dtype) for rope in self.ropes]
        x = self.embed(batch.tokens)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        for layer in self.layers:
            x = layer(x, tables, attend)
        return self.norm(x)

    def pieces(self) -> DecoderPieces | None:
        """What a kernel may fuse; None where a layer has something that LayerPieces cannot say."""
        tables = [rope.half_tables() for rope in self.ropes]
        layers = [layer.pieces(tables[layer.rope]) for layer in self.layers]
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(layers) or not isinstance(self.norm, RMSNorm):
            return None
        config = self.config
        return DecoderPieces(
            embedding=self.embed,
            layers=tuple(found),
            final_norm=self.norm.weight,
            norm_eps=config.norm_eps,
            head=self.head,
            embed_scale=self.embed_scale,
            logit_softcap=config.logit_softcap,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> float32 [R, V]"""
        scores = self.head(hidden).float()
        cap = self.config.logit_softcap
        return scores if cap is None else torch.tanh(scores / cap) * cap

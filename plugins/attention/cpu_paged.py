"""Paged attention by compiled CPU kernels, and whole steps where the weights are packed for them too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from core.interfaces.attention import AttentionKernel, KVView
from core.interfaces.fusing import DecoderPieces, FusedStep, LayerPieces
from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import Linear
from core.types import Batch, LayerSpec
from kernels.cpu.attention import Ragged, paged_attention
from kernels.cpu.kv import KVCache, KVFormatName
from kernels.cpu.linear import PackedLinear
from kernels.cpu.modules import Product, Table, unavailable
from kernels.cpu.step import Decoder, DecoderLayer

GATES: dict[str, Literal["silu", "gelu"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_tanh": "gelu",
}
PLAIN: dict[torch.dtype, KVFormatName] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class PagedCPUKernel(AttentionKernel):
    """Reads pages where they lie; heads that share a key head read it once. Results have the same bits for any number
    of threads, any chunks and any neighbours. The threads are torch's (engine.threads).

    Where every product is packed for these kernels, it takes the whole step over (`fuse`).
    """

    formats: Sequence[str] = ("none", "int8_cpu")

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._caches: dict[tuple[int, int], KVCache] = {}

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        reason = unavailable()
        if not reason and context.dtype == "float16":
            reason = "it computes in float32 or bfloat16, and engine.dtype is float16"
        return (f"{reason}; attention.kernel=sdpa does",) if reason else ()

    def prepare(self, batch: Batch, layers: Sequence[LayerSpec]) -> list[Ragged]:
        return ragged(batch)

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        queries = q.float()
        if queries.stride(2) != 1 or queries.stride(1) != layer.key_dim:
            queries = queries.contiguous()
        out = paged_attention(
            queries,
            self._cache(kv, layer),
            prepared[layer.group],
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap or 0.0,
            sinks=_sinks(layer),
        )
        return out.to(q.dtype)

    def fuse(self, pieces: DecoderPieces, kv: Mapping[int, KVView]) -> FusedStep | None:
        layers = [_layer(layer) for layer in pieces.layers]
        head, embedding = _packed(pieces.head), pieces.embedding
        found = [layer for layer in layers if layer is not None]
        if len(found) < len(layers) or head is None or any(layer.spec.value_in_key for layer in pieces.layers):
            return None
        caches = [self._cache(kv[layer.spec.index], layer.spec) for layer in pieces.layers]
        if embedding(torch.zeros(1, dtype=torch.int64)).dtype != torch.float32:
            return None  # a model in another type rounds between its products, and a step does not
        table = embedding.packed if isinstance(embedding, Table) else None
        decoder = Decoder(
            found,
            caches,
            final_norm=pieces.final_norm,
            head=head,
            embed=table,
            eps=pieces.norm_eps,
            embed_scale=pieces.embed_scale,
            logit_softcap=pieces.logit_softcap or 0.0,
        )
        return Step(decoder, pieces, from_ids=table is not None)

    def _cache(self, kv: KVView, layer: LayerSpec) -> KVCache:
        cache = self._caches.get((layer.index, layer.group))
        if cache is None or cache.k is not kv.storage["k"]:
            cache = self._caches[layer.index, layer.group] = _cache(kv, layer)
        return cache


class Step:
    """A step of the whole model in one call."""

    def __init__(self, decoder: Decoder, pieces: DecoderPieces, from_ids: bool) -> None:
        self._decoder = decoder
        self._embedding = None if from_ids else pieces.embedding

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = torch.empty(len(batch.tokens), self._decoder.hidden)
        embeddings = None if self._embedding is None else self._embedding(batch.tokens).float().contiguous()
        logits = self._decoder.step(
            batch.tokens if embeddings is None else None,
            ragged(batch),
            batch.logit_rows,
            embeddings=embeddings,
            hidden=hidden,
        )
        return hidden, logits


def ragged(batch: Batch) -> list[Ragged]:
    """The batch as the kernels take it, by KV group."""
    return [Ragged(g.page_table, batch.query_start, batch.kv_len, g.kv_start) for g in batch.groups]


def _cache(kv: KVView, layer: LayerSpec) -> KVCache:
    """ValueError: numbers of a type that the kernels do not read."""
    stored = kv.storage
    kind = "int8" if kv.format.name == "int8_cpu" else PLAIN.get(stored["k"].dtype)
    if kind is None:
        raise ValueError(
            f"cpu_paged reads keys and values in float32, bfloat16 or int8_cpu, not {stored['k'].dtype}; set "
            "engine.dtype=float32 or attention.kernel=sdpa"
        )
    page_size = stored["k_scale"].shape[2] if kind == "int8" else stored["k"].shape[1]
    return KVCache(kind, page_size, layer.kv_heads, layer.key_dim, layer.value_dim, **stored)


def _layer(layer: LayerPieces) -> DecoderLayer | None:
    spec = layer.spec
    qkv, o, down = _packed(layer.qkv), _packed(layer.o), _packed(layer.down)
    gate_up = _packed(layer.gate_up, woven=True)
    if qkv is None or o is None or gate_up is None or down is None or layer.activation not in GATES:
        return None
    return DecoderLayer(
        qkv=qkv,
        o=o,
        gate_up=gate_up,
        down=down,
        attn_norm=layer.attn_norm,
        ffn_norm=layer.mlp_norm,
        n_q_heads=spec.q_heads,
        cos=layer.cos,
        sin=layer.sin,
        scale=spec.scale,
        window=spec.window,
        softcap=spec.softcap or 0.0,
        sinks=_sinks(spec),
        post_attn_norm=layer.attn_post_norm,
        post_ffn_norm=layer.mlp_post_norm,
        q_norm=layer.q_norm,
        k_norm=layer.k_norm,
        gate=GATES[layer.activation],
        group=spec.group,
    )


def _packed(linear: Linear, woven: bool = False) -> PackedLinear | None:
    return linear.packed if isinstance(linear, Product) and linear.woven == woven else None


def _sinks(layer: LayerSpec) -> Tensor | None:
    return None if layer.sinks is None else layer.sinks.float().contiguous()

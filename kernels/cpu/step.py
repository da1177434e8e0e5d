"""A whole step of a llama-like decoder in one call: for small batches the calls of single operations cost more
than their work."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.attention import Ragged
from kernels.cpu.kv import KVCache
from kernels.cpu.library import check, pointer
from kernels.cpu.linear import PackedLinear

_MAX_PLANS = 16
_GATES = {"silu": 2, "gelu": 3}


@dataclass(eq=False)
class DecoderLayer:
    """One layer: norm, attention, residual, norm, gated feed-forward, residual.

    Attributes:
        qkv: rows of all query heads, then key heads, then value heads (`linear.concatenate`).
        gate_up: `linear.interleave(gate, up)`.
        attn_norm, ffn_norm: fp32 [hidden].
        n_q_heads: query heads; the key heads are the cache's.
        cos, sin: fp32 [positions, rot / 2] as for `kv.rope_write`.
        scale: of the scores.
        window, softcap, sinks: as for `attention.paged_attention`.
        post_attn_norm, post_ffn_norm: fp32 [hidden], applied to what is added to the residual stream.
        q_norm, k_norm: fp32 [key_dim], rms-norm of each head before the rotation.
        gate: activation of the gate; "gelu" in its tanh form.
        group: which entry of the step's batches (KV group) the layer's pages belong to.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attn_norm: Tensor
    ffn_norm: Tensor
    n_q_heads: int
    cos: Tensor
    sin: Tensor
    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_ffn_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    gate: Literal["silu", "gelu"] = "silu"
    group: int = 0


class Decoder:
    """Layers with their caches, built once; `step` then runs them all in one call.

    Args:
        layers: in order; the weights may be of different kinds.
        caches: one for each layer, with values of their own.
        final_norm: fp32 [hidden].
        head: [vocabulary, hidden].
        embed: [vocabulary, hidden], any kind; may be `head`. None: the step is given embeddings.
        embed_scale: the embeddings are multiplied by it.
        logit_softcap: `cap * tanh(logit / cap)`; 0 for none.

    Raises:
        ValueError: shapes that do not fit together; the message names the layer.
    """

    def __init__(
        self,
        layers: list[DecoderLayer],
        caches: list[KVCache],
        *,
        final_norm: Tensor,
        head: PackedLinear,
        embed: PackedLinear | None = None,
        eps: float = 1e-5,
        embed_scale: float = 1.0,
        logit_softcap: float = 0.0,
        isa: str | None = None,
    ) -> None:
        self.hidden = head.k
        self.vocabulary = head.n
        self.n_groups = 1 + max(layer.group for layer in layers)
        self._kept = (layers, caches, final_norm, head, embed)
        self._caches = caches
        self._has_embed = embed is not None
        self._library = library.load(isa)
        check("final_norm", final_norm, (self.hidden,), torch.float32)
        plans: dict[tuple[int, ...], int] = {}
        structs = []
        for i, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            _check_layer(i, layer, cache, self.hidden)
            key = (layer.group, layer.window or 0, layer.n_q_heads, cache.n_heads, cache.value_dim)
            structs.append(_layer_struct(layer, cache, plans.setdefault(key, len(plans))))
        if len(plans) > _MAX_PLANS:
            raise ValueError(f"the layers attend in {len(plans)} different ways; one step can hold {_MAX_PLANS}")
        self._layers = (library.Layer * len(structs))(*structs)
        self._model = library.Model(
            len(structs),
            self.hidden,
            eps,
            embed_scale,
            logit_softcap,
            self._layers,
            pointer(final_norm),
            (embed or head).struct,
            head.struct,
        )

    def step(
        self,
        ids: Tensor | None,
        batches: list[Ragged],
        rows: Tensor,
        *,
        embeddings: Tensor | None = None,
        logits: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Runs the tokens through all layers, writes their keys and values, and returns logits.

        Args:
            ids: int64 [T], every one below the vocabulary's size; or None with `embeddings`.
            batches: one for each KV group, with the same `query_start` and `kv_len`; their page tables must hold the
                pages of this step's tokens already.
            rows: int64 [R], the tokens of the step whose logits are wanted.
            embeddings: fp32 [T, hidden] in place of ids.
            logits: fp32 [R, vocabulary] to write to.
            hidden: fp32 [T, hidden]: filled with what leaves the last norm.

        Returns:
            fp32 [R, vocabulary].
        """
        if len(batches) != self.n_groups:
            raise ValueError(f"the layers are in {self.n_groups} KV groups, and the step has {len(batches)} batches")
        source = embeddings if ids is None else ids
        if source is None or (ids is not None and not self._has_embed):
            raise ValueError("a step needs ids and an embedding table, or embeddings")
        n_tokens = source.shape[0]
        if ids is not None:
            check("ids", ids, (n_tokens,), torch.int64)
        else:
            check("embeddings", source, (n_tokens, self.hidden), torch.float32)
        check("rows", rows, (None,), torch.int64)
        if logits is None:
            logits = torch.empty(len(rows), self.vocabulary)
        check("logits", logits, (len(rows), self.vocabulary), torch.float32)
        if hidden is not None:
            check("hidden", hidden, (n_tokens, self.hidden), torch.float32)
        groups = (library.Group * len(batches))(
            *[library.Group(pointer(b.page_table), b.page_table.stride(0), pointer(b.starts)) for b in batches]
        )
        first = batches[0]
        batch = library.Batch(
            n_tokens,
            first.kv_len.shape[0],
            len(rows),
            pointer(ids),
            None if ids is not None else pointer(embeddings),
            pointer(first.query_start),
            pointer(first.kv_len),
            groups,
            pointer(rows),
            pointer(logits),
            pointer(hidden),
        )
        self._library.pw_step(ctypes.byref(self._model), ctypes.byref(batch), library.num_threads())
        return logits


def _check_layer(i: int, layer: DecoderLayer, cache: KVCache, hidden: int) -> None:
    if cache.v is None:
        raise ValueError(f"layer {i}: a whole step needs a cache with values of its own")
    if layer.n_q_heads % cache.n_heads:
        raise ValueError(f"layer {i}: {layer.n_q_heads} query heads cannot share {cache.n_heads} key heads evenly")
    wide = (layer.n_q_heads + cache.n_heads) * cache.key_dim + cache.n_heads * cache.value_dim
    ffn = layer.down.k
    wanted = {
        "qkv": (wide, hidden),
        "o": (hidden, layer.n_q_heads * cache.value_dim),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }
    for name, shape in wanted.items():
        weight: PackedLinear = getattr(layer, name)
        if (weight.n, weight.k) != shape:
            raise ValueError(
                f"layer {i}: {name} is {weight.n}x{weight.k} where the heads and the hidden size "
                f"make it {shape[0]}x{shape[1]}"
            )
    for name in ("attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            check(f"layer {i}: {name}", norm, (hidden,), torch.float32)
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer, name)
        if norm is not None:
            check(f"layer {i}: {name}", norm, (cache.key_dim,), torch.float32)
    check(f"layer {i}: cos", layer.cos, (None, None), torch.float32)
    check(f"layer {i}: sin", layer.sin, tuple(layer.cos.shape), torch.float32)
    if layer.sinks is not None:
        check(f"layer {i}: sinks", layer.sinks, (layer.n_q_heads,), torch.float32)


def _layer_struct(layer: DecoderLayer, cache: KVCache, plan: int) -> library.Layer:
    return library.Layer(
        layer.qkv.struct,
        layer.o.struct,
        layer.gate_up.struct,
        layer.down.struct,
        pointer(layer.attn_norm),
        pointer(layer.ffn_norm),
        pointer(layer.post_attn_norm),
        pointer(layer.post_ffn_norm),
        pointer(layer.q_norm),
        pointer(layer.k_norm),
        pointer(layer.cos),
        pointer(layer.sin),
        pointer(layer.sinks),
        cache.struct,
        layer.n_q_heads,
        2 * layer.cos.shape[1],
        layer.window or 0,
        layer.group,
        plan,
        _GATES[layer.gate],
        layer.scale,
        layer.softcap,
    )

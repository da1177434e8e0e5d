"""One step of a llama-like decoder in plain torch, over unpacked weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.reference.attention import paged_attention
from kernels.reference.linear import linear
from kernels.reference.rows import gate, rms_norm, rope


def decoder_layer(
    x: Tensor,
    layer: dict[str, Any],
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    batch: dict[str, Tensor],
    eps: float,
) -> Tensor:
    """The residual stream after one layer; `k_cache` and `v_cache` [n_pages, page_size, H, D] are written in place.

    Args:
        x: [T, hidden].
        layer: `q`, `k`, `v`, `o`, `gate`, `up`, `down` as (weight [n, k], kind) and the settings of
            `kernels.cpu.step.DecoderLayer` by their names; absent ones are off.
        positions, slots: int64 [T].
        batch: page_table, query_start, kv_len, kv_start.
    """
    n, page_size = len(x), k_cache.shape[1]
    h = rms_norm(x, layer["attn_norm"], eps)
    q, k, v = (linear(h, *layer[name]).float() for name in "qkv")
    q, k, v = q.view(n, layer["n_q_heads"], -1), k.view(n, k_cache.shape[2], -1), v.view(n, v_cache.shape[2], -1)
    if layer.get("q_norm") is not None:
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    q, k = (rope(part, positions, layer["cos"], layer["sin"]) for part in (q, k))
    k_cache[slots // page_size, slots % page_size] = k.to(k_cache.dtype)
    v_cache[slots // page_size, slots % page_size] = v.to(v_cache.dtype)
    attended = paged_attention(
        q,
        k_cache,
        v_cache,
        **batch,
        scale=layer["scale"],
        window=layer.get("window"),
        softcap=layer.get("softcap", 0.0),
        sinks=layer.get("sinks"),
    )
    added = linear(attended.flatten(1), *layer["o"]).float()
    x = x + (added if layer.get("post_attn_norm") is None else rms_norm(added, layer["post_attn_norm"], eps))
    h = rms_norm(x, layer["ffn_norm"], eps)
    both = torch.cat([linear(h, *layer["gate"]), linear(h, *layer["up"])], -1).float()
    added = linear(gate(both, layer.get("gate_act", "silu")), *layer["down"]).float()
    return x + (added if layer.get("post_ffn_norm") is None else rms_norm(added, layer["post_ffn_norm"], eps))

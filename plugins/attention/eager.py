"""Attention as its definition reads, row by row: the reference every other kernel is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.interfaces.attention import AttentionKernel, KVView
from core.types import Batch, LayerSpec


class EagerKernel(AttentionKernel):
    """Scores, soft cap, mask, softmax and weighted sum written out in float32."""

    formats: Sequence[str] = ("*",)

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
        starts, group = batch.query_starts, batch.groups[layer.group]
        for row, kv_len in enumerate(batch.kv_lens):
            begin, end = starts[row], starts[row + 1]
            keys, values = kv.rows(batch, row)
            positions = torch.arange(kv_len - (end - begin), kv_len, device=q.device)
            key_positions = torch.arange(group.kv_starts[row], kv_len, device=q.device)
            hidden = mask(positions, key_positions, layer.window)
            out[begin:end] = attend(q[begin:end], keys, values[..., : layer.value_dim], hidden, layer)
        return out


def mask(positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query must not see, bool [n, S]: those after it, and those its window has passed."""
    distance = positions[:, None] - key_positions[None, :]
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, layer: LayerSpec) -> Tensor:
    """q [n, Hq, D] over keys [S, Hkv, D] and values [S, Hkv, Dv] -> [n, Hq, Dv]."""
    queries = q.float().reshape(len(q), layer.kv_heads, -1, layer.key_dim)
    scores = torch.einsum("nhgd,shd->hgns", queries, keys.float()) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    top = scores.amax(dim=-1, keepdim=True)
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(layer.kv_heads, -1, 1, 1)
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(sinks - top)
    out = torch.einsum("hgns,shd->nhgd", weights / total, values.float())
    return out.flatten(1, 2).to(q.dtype)

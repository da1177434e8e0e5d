"""Paged attention, one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    page_table: Tensor,
    query_start: Tensor,
    kv_len: Tensor,
    *,
    kv_start: Tensor | None = None,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of each token over its sequence's pages.

    Args:
        q: [T, Hq, D].
        k, v: [n_pages, page_size, Hkv, D] and [n_pages, page_size, Hkv, Dv], any floating type.
        page_table, query_start, kv_len, kv_start: integers [B, max_pages], [B + 1], [B], [B].
        window, softcap, sinks: as in `kernels.cpu.attention.paged_attention`.

    Returns:
        [T, Hq, Dv] in q's type.
    """
    n_tokens, n_heads, _ = q.shape
    group = n_heads // k.shape[2]
    out = torch.zeros(n_tokens, n_heads, v.shape[-1], dtype=q.dtype)
    for b in range(len(kv_len)):
        first, last, end = int(query_start[b]), int(query_start[b + 1]), int(kv_len[b])
        begin = 0 if kv_start is None else int(kv_start[b])
        if first == last:
            continue
        pages = page_table[b].long()
        n_pages = -(-(end - begin) // k.shape[1])
        keys = k[pages[:n_pages]].flatten(0, 1)[: end - begin].to(q.dtype).repeat_interleave(group, 1)
        values = v[pages[:n_pages]].flatten(0, 1)[: end - begin].to(q.dtype).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[first:last], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        i = torch.arange(end - (last - first), end)[:, None]
        j = torch.arange(begin, end)[None]
        seen = j <= i if window is None else (j <= i) & (j > i - window)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].to(q.dtype).expand(-1, last - first, 1)], -1)
        weights = torch.softmax(scores, -1)[..., : end - begin]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
    return out

"""Attention over paged keys and values for a ragged batch."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.kv import KVCache
from kernels.cpu.library import check, pointer


@dataclass
class Ragged:
    """Who attends to what in one step.

    Attributes:
        page_table: int32 [B, max_pages], pages of each sequence in order.
        query_start: int32 [B + 1], where each sequence's tokens start in the flat batch.
        kv_len: int32 [B], context length with this step's tokens: token t of sequence b is at position
            `kv_len[b] - (query_start[b + 1] - query_start[b]) + t - query_start[b]`.
        kv_start: int32 [B], position of the first slot of the sequence's row of the page table; not 0 only where a
            sliding window has freed its first pages. None means 0 for all.
    """

    page_table: Tensor
    query_start: Tensor
    kv_len: Tensor
    kv_start: Tensor | None = None
    _zeros: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        n = self.kv_len.shape[0]
        check("page_table", self.page_table, (n, None), torch.int32)
        check("query_start", self.query_start, (n + 1,), torch.int32)
        check("kv_len", self.kv_len, (n,), torch.int32)
        self._zeros = torch.zeros(n, dtype=torch.int32) if self.kv_start is None else self.kv_start
        check("kv_start", self._zeros, (n,), torch.int32)

    @property
    def starts(self) -> Tensor:
        return self._zeros


def paged_attention(
    q: Tensor,
    cache: KVCache,
    batch: Ragged,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    isa: str | None = None,
) -> Tensor:
    """Causal attention of each token over its sequence's pages (this step's keys must be written already).

    Heads that share a key head read it once. Results are the same bits for any number of threads, any cut of a
    prompt into chunks, and any neighbours in the batch. Method: FlashAttention's running softmax (Dao et al. 2022)
    with partial results over the context (flash decoding).

    Args:
        q: fp32 [T, Hq, key_dim]; Hq a multiple of the cache's heads.
        window: a query at i sees keys j with i - window < j <= i.
        softcap: `softcap * tanh(score / softcap)` before the softmax; 0 for none.
        sinks: fp32 [Hq], one more logit a head that has no value.
        out: fp32 [T, Hq, value_dim] to write to.

    Returns:
        fp32 [T, Hq, value_dim]; zeros for a token that sees nothing.
    """
    n_tokens, n_heads, _ = q.shape
    check("q", q, (n_tokens, n_heads, cache.key_dim), torch.float32, contiguous=False)
    if q.stride(2) != 1 or q.stride(1) != cache.key_dim:
        raise ValueError(f"q: the heads of a token must be contiguous; its strides are {q.stride()}")
    if n_heads % cache.n_heads:
        raise ValueError(f"{n_heads} query heads cannot share {cache.n_heads} key heads evenly")
    if sinks is not None:
        check("sinks", sinks, (n_heads,), torch.float32)
    if out is None:
        out = torch.empty(n_tokens, n_heads, cache.value_dim)
    check("out", out, (n_tokens, n_heads, cache.value_dim), torch.float32)
    arguments = library.Attention(
        batch.kv_len.shape[0],
        n_heads,
        window or 0,
        scale,
        softcap,
        pointer(batch.page_table),
        batch.page_table.stride(0),
        pointer(batch.query_start),
        pointer(batch.kv_len),
        pointer(batch.starts),
        pointer(sinks),
    )
    library.load(isa).pw_attention(
        ctypes.byref(arguments),
        ctypes.byref(cache.struct),
        pointer(q),
        q.stride(0),
        pointer(out),
        out.stride(0),
        library.num_threads(),
    )
    return out

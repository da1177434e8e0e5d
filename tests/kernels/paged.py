"""Paged caches with shuffled pages, filled through the kernels' own write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import cpu


@dataclass
class Context:
    """A filled cache with its ragged batch, and the same keys and values read back as numbers."""

    cache: cpu.KVCache
    batch: cpu.Ragged
    keys: Tensor
    values: Tensor


def poisoned(format: str, n_pages: int, page_size: int, n_heads: int, dk: int, dv: int) -> cpu.KVCache:
    """A cache in which everything not written is not a number, or the largest code."""
    cache = cpu.KVCache.allocate(format, n_pages, page_size, n_heads, dk, dv)
    for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        if tensor is not None:
            tensor.fill_(127 if tensor.dtype == torch.int8 else float("nan"))
    return cache


def page_table(lens: list[int], page_size: int, n_pages: int) -> Tensor:
    counts = [-(-n // page_size) for n in lens]
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, pages in zip(table, torch.randperm(n_pages)[: sum(counts)].int().split(counts), strict=True):
        row[: len(pages)] = pages
    return table


def slots_of(row: Tensor, positions: Tensor, page_size: int) -> Tensor:
    return row.long()[positions // page_size] * page_size + positions % page_size


def starts(lens: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)


def fill(
    format: str, queries: list[int], lens: list[int], *, page_size: int, n_heads: int, dk: int, dv: int, isa: str
) -> Context:
    n_pages = sum(-(-n // page_size) for n in lens) + 2
    cache = poisoned(format, n_pages, page_size, n_heads, dk, dv)
    table = page_table(lens, page_size, n_pages)
    for row, n in zip(table, lens, strict=True):
        slots = slots_of(row, torch.arange(n), page_size)
        cpu.kv_write(cache, torch.randn(n, n_heads, dk), torch.randn(n, n_heads, dv), slots, isa=isa)
    batch = cpu.Ragged(table, starts(queries), torch.tensor(lens, dtype=torch.int32))
    keys, values = cpu.kv_read(cache, torch.arange(n_pages))
    return Context(cache, batch, keys.nan_to_num(), values.nan_to_num())

"""Batches over paged memory with known contents, and attention over them computed the long way."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.interfaces import KVQuantizer
from core.kv import LayerKV, Pool
from core.types import Batch, GroupBatch, KVGroup, LayerSpec


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence: its last `queries` tokens of `length` are computed; pages before `start` were freed."""

    queries: int
    length: int
    start: int = 0


@dataclass(slots=True)
class Case:
    """A batch with its layer, its cache and the keys and values that went in (float32, by row from `start` on)."""

    layer: LayerSpec
    batch: Batch
    kv: LayerKV
    q: Tensor
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def expected(self) -> Tensor:
        """[T, Hq, Dv] in float64, one query and head at a time, over what the cache gives back."""
        out = torch.zeros(len(self.q), self.layer.q_heads, self.layer.value_dim, dtype=torch.float64)
        for row in range(self.batch.num_rows):
            begin, end = self.batch.query_starts[row], self.batch.query_starts[row + 1]
            for index in range(begin, end):
                out[index] = self._token(row, index, self.batch.kv_lens[row] - (end - index))
        return out

    def _token(self, row: int, index: int, position: int) -> Tensor:
        layer, start = self.layer, self.batch.groups[0].kv_starts[row]
        first = start if layer.window is None else max(start, position - layer.window + 1)
        keys = self.keys[row][first - start : position - start + 1].double()
        values = self.values[row][first - start : position - start + 1].double()
        shared = layer.q_heads // layer.kv_heads
        heads = []
        for head in range(layer.q_heads):
            scores = keys[:, head // shared] @ self.q[index, head].double() * layer.scale
            if layer.softcap is not None:
                scores = layer.softcap * torch.tanh(scores / layer.softcap)
            weights = scores.exp()
            sink = 0.0 if layer.sinks is None else math.exp(layer.sinks[head].item())
            heads.append((weights / (weights.sum() + sink)) @ values[:, head // shared])
        return torch.stack(heads)


def make_case(
    rows: Sequence[Row],
    quantizer: KVQuantizer,
    *,
    page_size: int,
    q_heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 16,
    value_dim: int = 16,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    value_in_key: bool = False,
    neighbours: bool = False,
    seed: int = 0,
) -> Case:
    """A layer and a batch of `rows`, with every page that no row holds full of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    layer = LayerSpec(
        index=0,
        group=0,
        q_heads=q_heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        scale=0.7 / math.sqrt(key_dim),
        window=window,
        softcap=softcap,
        value_in_key=value_in_key,
        sinks=normal(q_heads) if sinks else None,
    )
    group = KVGroup("only", (0,), kv_heads, key_dim, value_dim, window, value_in_key)
    tables, n_pages = _tables(rows, page_size, neighbours, seed)
    pool = Pool(group, 0, n_pages, page_size, quantizer, torch.float32)
    kv = pool.layers[0]
    for tensor in kv.storage.values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))
    case = Case(layer, _batch(rows, tables, page_size), kv, normal(sum(row.queries for row in rows), q_heads, key_dim))
    for row, pages in zip(rows, tables, strict=True):
        seen = row.length - row.start
        k = normal(seen, kv_heads, key_dim)
        v = k[..., :value_dim] if value_in_key else normal(seen, kv_heads, value_dim)
        slots = torch.tensor([pages[i // page_size] * page_size + i % page_size for i in range(seen)])
        kv.write(k, None if value_in_key else v, slots)
        stored = quantizer.read(kv.storage, torch.tensor(pages), seen)
        case.keys.append(stored[0].clone())
        case.values.append((stored[0][..., :value_dim] if value_in_key else stored[1]).clone())
    return case


def _tables(rows: Sequence[Row], page_size: int, neighbours: bool, seed: int) -> tuple[list[list[int]], int]:
    sizes = [-(-(row.length - row.start) // page_size) for row in rows]
    n_pages = sum(sizes) + 3
    free = list(range(n_pages))
    if not neighbours:
        random.Random(seed).shuffle(free)
    tables = []
    for size in sizes:
        tables.append(free[:size])
        free = free[size:]
    return tables, n_pages


def _batch(rows: Sequence[Row], tables: list[list[int]], page_size: int) -> Batch:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + row.queries)
    positions = torch.tensor([p for row in rows for p in range(row.length - row.queries, row.length)])
    width = max(len(pages) for pages in tables)
    table = torch.zeros(len(rows), width, dtype=torch.int32)
    for index, pages in enumerate(tables):
        table[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    slots = [
        pages[(p - row.start) // page_size] * page_size + (p - row.start) % page_size
        for row, pages in zip(rows, tables, strict=True)
        for p in range(row.length - row.queries, row.length)
    ]
    group = GroupBatch(
        page_table=table,
        kv_start=torch.tensor([row.start for row in rows], dtype=torch.int32),
        kv_starts=[row.start for row in rows],
        slots=torch.tensor(slots),
        first_slots=[pages[0] * page_size if _unbroken(pages) else None for pages in tables],
        num_pages=[len(pages) for pages in tables],
    )
    return Batch(
        tokens=torch.arange(starts[-1]),
        positions=positions,
        query_start=torch.tensor(starts, dtype=torch.int32),
        kv_len=torch.tensor([row.length for row in rows], dtype=torch.int32),
        query_starts=starts,
        kv_lens=[row.length for row in rows],
        groups=(group,),
        logit_rows=torch.tensor([start - 1 for start in starts[1:]]),
    )


def _unbroken(pages: list[int]) -> bool:
    return all(page == pages[0] + index for index, page in enumerate(pages))

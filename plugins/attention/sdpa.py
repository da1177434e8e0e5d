"""Attention through torch's fused product, with grouped-query heads kept grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.interfaces.attention import AttentionKernel, KVView
from core.interfaces.plugin import BuildContext, Options
from core.types import Batch, GroupBatch, LayerSpec

BATCHED_QUERIES = 8
"""Rows with at most so many tokens are computed together."""
BATCHED_TOKENS = 8192
"""The most context gathered for rows computed together: bounds the workspace."""
VIEWED_TOKENS = 512
"""An unbroken context longer than this is cheaper to read where it lies than to gather."""


@dataclass(slots=True)
class Piece:
    """Rows computed by one call, each with `n` tokens.

    `queries` [rows * n] picks them from the flat batch. Rows of a gathered piece share `table` [rows, M]; `pads` are
    the gathered slots that hold none of their tokens. `skip` context tokens in front are seen by no query. `mask`
    [rows, n, S] is added to the scores; `causal` stands for the plain triangle.
    """

    rows: list[int]
    n: int
    queries: Tensor
    table: Tensor | None = None
    pads: Tensor | None = None
    skip: int = 0
    mask: Tensor | None = None
    causal: bool = False


class SdpaKernel(AttentionKernel):
    """A row's query heads that share a key head become further query rows, so keys and values are never repeated.

    Short rows are gathered and computed together; the others one by one, on a view of the pool where their pages are
    neighbours. Soft caps, sinks and values narrower than keys have no fused product: their scores are written out.
    """

    formats: Sequence[str] = ("*",)

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._workspace: dict[str, Tensor] = {}

    def prepare(self, batch: Batch, layers: Sequence[LayerSpec]) -> dict[tuple[int, int | None], list[Piece]]:
        reads = {(layer.group, layer.window) for layer in layers}
        return {(group, window): self._pieces(batch, batch.groups[group], window) for group, window in reads}

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
        for piece in prepared[layer.group, layer.window]:
            keys, values = self._context(kv, layer, batch, piece)
            rows = q[piece.queries].view(len(piece.rows), piece.n, layer.kv_heads, -1, layer.key_dim)
            result = attend(rows.permute(0, 2, 3, 1, 4), keys.transpose(1, 2), values.transpose(1, 2), piece, layer)
            out[piece.queries] = result.permute(0, 3, 1, 2, 4).reshape(-1, layer.q_heads, layer.value_dim)
        return out

    def _pieces(self, batch: Batch, group: GroupBatch, window: int | None) -> list[Piece]:
        pieces, short = [], []
        for row, kv_len in enumerate(batch.kv_lens):
            n = batch.query_starts[row + 1] - batch.query_starts[row]
            span = kv_len - group.kv_starts[row]
            if n > BATCHED_QUERIES or (group.first_slots[row] is not None and span > VIEWED_TOKENS):
                pieces.append(_alone(batch, group, window, row))
            else:
                short.append((n, group.num_pages[row], row))
        for rows in _alike(sorted(short), self.context.page_size):
            together = _alone(batch, group, window, rows[0])
            pieces.append(together if len(rows) == 1 else self._together(batch, group, window, rows))
        return pieces

    def _together(self, batch: Batch, group: GroupBatch, window: int | None, rows: list[int]) -> Piece:
        device = batch.tokens.device
        begin = torch.tensor([batch.query_starts[row] for row in rows], device=device)
        n = batch.query_starts[rows[0] + 1] - batch.query_starts[rows[0]]
        pages = max(group.num_pages[row] for row in rows)
        kv_len = torch.tensor([batch.kv_lens[row] for row in rows], device=device)[:, None, None]
        start = torch.tensor([group.kv_starts[row] for row in rows], device=device)[:, None, None]
        position = kv_len - n + torch.arange(n, device=device)[:, None]
        key_position = start + torch.arange(pages * self.context.page_size, device=device)
        pads = (key_position >= kv_len).flatten().nonzero().flatten()
        return Piece(
            rows=rows,
            n=n,
            queries=(begin[:, None] + torch.arange(n, device=device)).flatten(),
            table=group.page_table[rows, :pages].flatten(),
            pads=pads,
            mask=_mask(position, key_position, window),
        )

    def _context(self, kv: KVView, layer: LayerSpec, batch: Batch, piece: Piece) -> tuple[Tensor, Tensor]:
        """Keys [rows, S, Hkv, D] and values [rows, S, Hkv, Dv] of a piece."""
        if piece.table is None:
            keys, values = (x[None, piece.skip :] for x in kv.rows(batch, piece.rows[0]))
        elif kv.format.name == "none":
            keys = self._gather("k", kv.storage["k"], piece)
            values = keys if layer.value_in_key else self._gather("v", kv.storage["v"], piece)
        else:
            keys, values = self._decoded(kv, batch, piece)
        return keys, values[..., : layer.value_dim]

    def _gather(self, name: str, stored: Tensor, piece: Piece) -> Tensor:
        assert piece.table is not None and piece.pads is not None
        found = self._buffer(name, (len(piece.table), *stored.shape[1:]), stored)
        torch.index_select(stored, 0, piece.table, out=found)
        found = found.view(-1, *stored.shape[2:])
        # A stale slot may hold a NaN of another request, and a mask does not stop NaN.
        found.index_fill_(0, piece.pads, 0)
        return found.view(len(piece.rows), -1, *stored.shape[2:])

    def _decoded(self, kv: KVView, batch: Batch, piece: Piece) -> tuple[Tensor, Tensor]:
        assert piece.mask is not None
        rows = [kv.rows(batch, row) for row in piece.rows]
        both = []
        for name, parts in zip("kv", zip(*rows, strict=True), strict=True):
            padded = self._buffer(name, (len(rows), piece.mask.shape[-1], *parts[0].shape[1:]), parts[0]).zero_()
            for index, part in enumerate(parts):
                padded[index, : len(part)] = part
            both.append(padded)
        return both[0], both[1]

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = torch.Size(shape).numel()
        held = self._workspace.get(name)
        if held is None or held.numel() < size or held.dtype != like.dtype or held.device != like.device:
            with torch.inference_mode(False):
                held = self._workspace[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(shape)


def attend(q: Tensor, keys: Tensor, values: Tensor, piece: Piece, layer: LayerSpec) -> Tensor:
    """q [rows, Hkv, G, n, D] over keys [rows, Hkv, S, D] and values [rows, Hkv, S, Dv] -> [rows, Hkv, G, n, Dv]."""
    if layer.softcap is not None or layer.sinks is not None or layer.key_dim != layer.value_dim:
        return _written_out(q, keys, values, piece, layer)
    mask = None if piece.mask is None else piece.mask.to(q.dtype)
    if piece.table is None and piece.n > 1:
        shape = (-1, q.shape[2], -1, -1)
        keys, values = keys[0, :, None].expand(shape), values[0, :, None].expand(shape)
        out = F.scaled_dot_product_attention(q[0], keys, values, mask, is_causal=piece.causal, scale=layer.scale)
        return out[None]
    if mask is not None and piece.n > 1:
        mask = mask.repeat(1, q.shape[2], 1)
    out = F.scaled_dot_product_attention(
        q.flatten(2, 3), keys, values, None if mask is None else mask[:, None], scale=layer.scale
    )
    return out.reshape(*q.shape[:4], layer.value_dim)


def _written_out(q: Tensor, keys: Tensor, values: Tensor, piece: Piece, layer: LayerSpec) -> Tensor:
    products = q.flatten(2, 3) @ keys.transpose(-1, -2)
    scores = products.float().reshape(*q.shape[:4], keys.shape[2]) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    if piece.causal:
        scores = scores + torch.full_like(scores[0, 0, 0], float("-inf")).triu(1)
    elif piece.mask is not None:
        scores = scores + piece.mask[:, None, None]
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(1, layer.kv_heads, -1, 1, 1).expand(*scores.shape[:4], 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    out = weights.to(values.dtype).flatten(2, 3) @ values
    return out.reshape(*q.shape[:4], layer.value_dim)


def _alone(batch: Batch, group: GroupBatch, window: int | None, row: int) -> Piece:
    begin, end = batch.query_starts[row], batch.query_starts[row + 1]
    n, start, device = end - begin, group.kv_starts[row], batch.tokens.device
    first = batch.kv_lens[row] - n
    skip = 0 if window is None else max(0, first - window + 1 - start)
    seen = batch.kv_lens[row] - start - skip
    piece = Piece(rows=[row], n=n, queries=torch.arange(begin, end, device=device), skip=skip)
    if n > 1:
        piece.causal = n == seen and (window is None or seen <= window)
        if not piece.causal:
            position = torch.arange(first, first + n, device=device)[:, None]
            piece.mask = _mask(position, torch.arange(start + skip, batch.kv_lens[row], device=device), window)[None]
    return piece


def _mask(position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    distance = position - key_position
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))


def _alike(rows: list[tuple[int, int, int]], page_size: int) -> list[list[int]]:
    """Split rows, given as sorted (tokens, pages, row), so that none is padded to more than twice its pages."""
    found: list[list[int]] = []
    kind, least = 0, 0
    for n, pages, row in rows:
        room = BATCHED_TOKENS // (pages * page_size)
        if not found or n != kind or pages > 2 * least or len(found[-1]) >= room:
            found.append([])
            kind, least = n, pages
        found[-1].append(row)
    return found

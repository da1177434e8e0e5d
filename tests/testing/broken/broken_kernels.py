"""Attention kernels that are wrong in one way each."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from core.interfaces import AttentionKernel, BuildContext, KVView, Options, PluginInfo
from core.types import Batch, LayerSpec


class Right(AttentionKernel):
    """Row by row with the softmax written out; the ones below change one thing of it."""

    formats: Sequence[str] = ("*",)

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
        for row in range(batch.num_rows):
            begin, end = batch.query_starts[row], batch.query_starts[row + 1]
            keys, values = self.context_of(kv, batch, row)
            out[begin:end] = self.attend(q[begin:end], keys, values, layer, batch, row)
        return out

    def context_of(self, kv: KVView, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        return kv.rows(batch, row)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        shared = layer.q_heads // layer.kv_heads
        keys, values = (self.shared(x, shared) for x in (keys, values[..., : layer.value_dim]))
        scores = torch.einsum("nhd,shd->hns", q, keys) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        start = batch.groups[layer.group].kv_starts[row]
        query = torch.arange(batch.kv_lens[row] - len(q), batch.kv_lens[row])[:, None]
        distance = query - (start + torch.arange(len(keys)))
        hidden = distance < 0 if layer.window is None else (distance < 0) | (distance >= self.window(layer.window))
        scores = scores.masked_fill(hidden, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        return torch.einsum("hns,shd->nhd", weights, values)

    def shared(self, x: Tensor, times: int) -> Tensor:
        return x.repeat_interleave(times, 1)

    def window(self, width: int) -> int:
        return width


class OneTokenTooWide(Right):
    def window(self, width: int) -> int:
        return width + 1


class TilesTheHeads(Right):
    def shared(self, x: Tensor, times: int) -> Tensor:
        return x.repeat(1, times, 1)


class SeesTheFuture(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        if len(q) == 1:
            return super().attend(q, keys, values, layer, batch, row)
        each = [
            super(SeesTheFuture, self).attend(x[None], keys, values, replace(layer, window=None), batch, row)[0]
            for x in q
        ]
        return torch.stack(each)


class ForgetsTheChunkBefore(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        if len(q) == 1:
            return super().attend(q, keys, values, layer, batch, row)
        return super().attend(q, keys, values, replace(layer, window=len(q)), batch, row)


class IgnoresFreedPages(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        group = replace(batch.groups[0], kv_starts=[0] * batch.num_rows)
        return super().attend(q, keys, values, layer, replace(batch, groups=(group,)), row)


class IgnoresSoftcaps(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        return super().attend(q, keys, values, replace(layer, softcap=None), batch, row)


class IgnoresSinks(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        return super().attend(q, keys, values, replace(layer, sinks=None), batch, row)


class TakesPagesForNeighbours(Right):
    def context_of(self, kv: KVView, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        keys, values = super().context_of(kv, batch, row)
        if kv.format.name != "none":
            return keys, values
        size, first = kv.storage["k"].shape[1], int(batch.groups[0].page_table[row, 0])
        flat = {name: tensor.flatten(0, 1)[first * size :][: len(keys)] for name, tensor in kv.storage.items()}
        return (flat["k"], flat.get("v", flat["k"])) if len(flat["k"]) == len(keys) else (keys, values)


class ScalesInPlace(Right):
    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        return super().attend(q.mul_(layer.scale), keys, values, replace(layer, scale=1.0), batch, row)


class ReusesItsResult(Right):
    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self.buffer = torch.empty(0)

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        out = super().forward(q, kv, layer, batch, prepared)
        if self.buffer.shape != out.shape:
            self.buffer = torch.empty_like(out)
        return self.buffer.copy_(out)


class MixesRows(Right):
    """Takes the longest context of the batch for the length of every row's softmax."""

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, layer: LayerSpec, batch: Batch, row: int) -> Tensor:
        spread = max(batch.kv_lens) / batch.kv_lens[row]
        return super().attend(q, keys, values, replace(layer, scale=layer.scale / spread**0.1), batch, row)


class ReadsWithoutSaying(Right):
    formats: Sequence[str] = ("none", "int8")


class ThinksForLong(Right):
    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        if batch.num_rows == 4:
            time.sleep(0.03)
        return super().forward(q, kv, layer, batch, prepared)


PROVIDES = {"lossless", "window", "softcap", "sinks", "latent", "kv:any"}
NUMBERS = {
    "l2_prefill",
    "l2_prefill_in_chunks",
    "l2_decode",
    "l2_mixed_batch",
    "l2_neighbouring_pages",
    "l2_head_layouts",
    "l2_values_of_another_width",
    "l2_window",
    "l2_window_with_freed_pages",
    "l2_softcap",
    "l2_sinks",
    "l2_latent",
    "l2_every_format",
    "l2_rows_do_not_depend_on_neighbours",
}
"""Checks that compare with attention computed the long way."""

BROKEN = {
    OneTokenTooWide: {
        "l3_any_batch",
        "l2_output_equals_the_null_parts",
        "l2_window",
        "l2_window_with_freed_pages",
        "l2_sinks",
    },
    TilesTheHeads: NUMBERS - {"l2_latent", "l2_rows_do_not_depend_on_neighbours"},
    SeesTheFuture: NUMBERS - {"l2_decode", "l2_rows_do_not_depend_on_neighbours"},
    ForgetsTheChunkBefore: NUMBERS - {"l2_prefill", "l2_decode", "l2_rows_do_not_depend_on_neighbours"},
    IgnoresFreedPages: {"l2_serves_every_request", "l2_window_with_freed_pages"},
    IgnoresSoftcaps: {"l2_softcap"},
    IgnoresSinks: {"l2_sinks"},
    TakesPagesForNeighbours: NUMBERS - {"l2_neighbouring_pages"},
    ScalesInPlace: {"l1_inputs_are_not_changed"},
    ReusesItsResult: {"l1_layers_do_not_share_results"},
    MixesRows: NUMBERS - {"l2_prefill", "l2_decode", "l2_window"},
    ReadsWithoutSaying: {"l1_formats_are_declared"},
    ThinksForLong: {"l4_cost_and_growth"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="attention.kernel",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset(PROVIDES),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

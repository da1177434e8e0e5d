"""From a plan to hidden states: the batch's tensors, and the pass through the model over paged memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from core.clock import Clock
from core.heads import LayerSlice, whole_caches
from core.interfaces.attention import AttentionKernel
from core.interfaces.context_reduction import ContextReduction
from core.interfaces.fusing import Fusable, FusedStep, Fuser
from core.kv import LayerKV
from core.sequence import Sequence as Seq
from core.types import Attend, Batch, Draft, GroupBatch, LayerSpec


class Model(Protocol):
    """What the runner needs of a loaded model."""

    @property
    def layers(self) -> Sequence[LayerSpec]: ...
    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        """Final hidden states [T, H]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> float32 [R, V]"""


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step: its next `n_known` tokens, then `draft`."""

    seq: Seq
    n_known: int
    draft: Draft

    @property
    def n_tokens(self) -> int:
        return self.n_known + len(self.draft.tokens)

    @property
    def samples(self) -> bool:
        """Whether its last known token is computed in this step, so that the next one can be sampled."""
        return self.n_known == self.seq.remaining

    @property
    def ends_prompt(self) -> bool:
        done = self.seq.num_computed
        return done < self.seq.num_prompt_tokens <= done + self.n_known

    @property
    def prompt_rows(self) -> int:
        """Leading tokens of the step whose logits give prompt logprobs: those followed by another prompt token."""
        if self.seq.prompt_logprobs is None:
            return 0
        return max(0, min(self.n_known, self.seq.num_prompt_tokens - 1 - self.seq.num_computed))


class Runner:
    """Runs one model over its KV pools."""

    def __init__(
        self,
        model: Model,
        kernel: AttentionKernel,
        layers: Sequence[Sequence[LayerSlice]],
        page_size: int,
        n_groups: int,
        clock: Clock,
        reduction: ContextReduction,
    ) -> None:
        self.model = model
        self.kernel = kernel
        self.layers = layers
        self.page_size = page_size
        self.n_groups = n_groups
        self._clock = clock
        self._reduction = reduction
        self._fused = self._fuse()

    @property
    def fused(self) -> bool:
        """Whether the kernel has taken the whole step over."""
        return self._fused is not None

    def _fuse(self) -> FusedStep | None:
        if self._reduction.observes != "never":
            return None
        if not (isinstance(self.kernel, Fuser) and isinstance(self.model, Fusable)):
            return None
        kv, pieces = whole_caches(self.model.layers, self.layers), self.model.pieces()
        return None if kv is None or pieces is None else self.kernel.fuse(pieces, kv)

    def prepare(self, rows: Sequence[Row]) -> Batch:
        """The tensors of a step, from sequences whose pages are reserved."""
        lengths = np.array([row.n_tokens for row in rows])
        begin = np.array([row.seq.num_computed for row in rows])
        starts = np.concatenate(([0], np.cumsum(lengths)))
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(starts[-1]) - starts[owner] + begin[owner]
        tokens = np.concatenate([_tokens(row) for row in rows])
        kv_len = begin + lengths
        return Batch(
            tokens=torch.from_numpy(tokens),
            positions=torch.from_numpy(positions),
            query_start=torch.from_numpy(starts.astype(np.int32)),
            kv_len=torch.from_numpy(kv_len.astype(np.int32)),
            query_starts=starts.tolist(),
            kv_lens=kv_len.tolist(),
            groups=tuple(self._group(rows, index, owner, positions, kv_len) for index in range(self.n_groups)),
            logit_rows=torch.from_numpy(_logit_rows(rows, starts)),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, rows: Sequence[Row] = ()) -> Tensor:
        """Final hidden states [T, H]. Writes keys and values to the pages on the way, and shows the context reduction
        those of `rows` that it observes."""
        add = self._clock.add
        watched = self._watched(rows)
        prepared = self.kernel.prepare(batch, [part.spec for parts in self.layers for part in parts])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
            parts = self.layers[layer]
            if len(parts) == 1:
                return read(parts[0], q, k, v)
            return torch.cat([read(part, *part.of(q, k, v)) for part in parts], dim=1)

        def read(part: LayerSlice, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
            spec, kv = part.spec, part.kv
            started = time.perf_counter()
            kv.write(k, v, batch.groups[spec.group].slots)
            written = time.perf_counter()
            out = self.kernel.forward(q, kv, spec, batch, prepared)
            add("quantizer.kv", written - started)
            attended = time.perf_counter()
            add("attention.kernel", attended - written)
            if watched and spec.window is None:
                self._show(watched, batch, spec, kv, q)
                add("context_reduction", time.perf_counter() - attended)
            return out

        return self.model.forward(batch, attend)

    @torch.inference_mode()
    def run(self, batch: Batch, rows: Sequence[Row] = ()) -> tuple[Tensor, Tensor]:
        """Final hidden states [T, H], and float32 logits of `batch.logit_rows` [R, V]."""
        if self._fused is not None:
            return self._fused(batch)
        hidden = self.forward(batch, rows)
        return hidden, self.model.logits(hidden[batch.logit_rows])

    def _watched(self, rows: Sequence[Row]) -> list[tuple[int, Row]]:
        observes = self._reduction.observes
        if observes == "never":
            return []
        return [(place, row) for place, row in enumerate(rows) if observes == "always" or row.ends_prompt]

    def _show(
        self, watched: list[tuple[int, Row]], batch: Batch, spec: LayerSpec, kv: LayerKV, q: Tensor
    ) -> None:
        for place, row in watched:
            begin = batch.query_starts[place]
            keys, _ = kv.rows(batch, place)
            n_keys = keys.shape[0] - len(row.draft.tokens)
            self._reduction.observe(row.seq.id, q[begin : begin + row.n_known], keys[:n_keys], spec)

    def _group(
        self, rows: Sequence[Row], index: int, owner: np.ndarray, positions: np.ndarray, kv_len: np.ndarray
    ) -> GroupBatch:
        tables = [row.seq.tables[index] for row in rows]
        start = np.array([table.start for table in tables])
        n_pages = -(-(kv_len - start) // self.page_size)
        page_table = np.zeros((len(rows), int(n_pages.max())), dtype=np.int32)
        for line, table, n in zip(page_table, tables, n_pages, strict=True):
            line[:n] = table.array[:n]
        offset = positions - start[owner]
        slots = page_table[owner, offset // self.page_size].astype(np.int64) * self.page_size + offset % self.page_size
        return GroupBatch(
            page_table=torch.from_numpy(page_table),
            kv_start=torch.from_numpy(start.astype(np.int32)),
            kv_starts=start.tolist(),
            slots=torch.from_numpy(slots),
            first_slots=[int(t.array[0]) * self.page_size if t.unbroken else None for t in tables],
            num_pages=n_pages.tolist(),
        )


def _tokens(row: Row) -> np.ndarray:
    seq = row.seq
    known = seq.tokens[seq.num_computed : seq.num_computed + row.n_known]
    return np.array([*known, *row.draft.tokens], dtype=np.int64)


def _logit_rows(rows: Sequence[Row], starts: Any) -> np.ndarray:
    """For each row: its prompt-logprob tokens, then, if it samples, its last known token and its drafts."""
    wanted: list[np.ndarray] = []
    for row, start in zip(rows, starts[:-1], strict=True):
        wanted.append(np.arange(start, start + row.prompt_rows))
        if row.samples:
            wanted.append(np.arange(start + row.n_known - 1, start + row.n_tokens))
    return np.concatenate(wanted).astype(np.int64)

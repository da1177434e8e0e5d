"""Running a loaded model without an engine: an attention written out over a growing cache, and batches of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from core.interfaces.plugin import BuildContext, Options
from core.models.loading import LoadedModel, load_model, open_model
from core.types import Batch, LayerSpec
from plugins.attention.native import NativeStructure
from plugins.quantizer.weights_none import DenseWeights


def load(model, dtype="float32", **options) -> LoadedModel:
    """`model`: a spec, a source, or a path."""
    opened = open_model(model if not isinstance(model, str) and hasattr(model, "name") else {"path": str(model)})
    return load_opened(opened, dtype, **options)


def load_opened(opened, dtype="float32", **options) -> LoadedModel:
    context = BuildContext()
    return load_model(
        opened,
        structure=NativeStructure(Options(), context),
        weights=DenseWeights(Options(), context),
        dtype=dtype,
        **options,
    )


class Session:
    """Several sequences through one model. `step` takes the next tokens of each and gives their logits."""

    def __init__(self, model: LoadedModel, rows: int = 1) -> None:
        self.model = model
        self.lengths = [0] * rows
        self.cache: list[dict[int, tuple[Tensor, Tensor | None]]] = [{} for _ in range(rows)]

    @torch.inference_mode()
    def step(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits [n, V] of each row's tokens. A row may have none."""
        starts = [0]
        for row in tokens:
            starts.append(starts[-1] + len(row))
        begins = list(self.lengths)
        self.lengths = [n + len(row) for n, row in zip(begins, tokens, strict=True)]
        positions = [p for begin, end in zip(begins, self.lengths, strict=True) for p in range(begin, end)]
        batch = Batch(
            tokens=torch.tensor([token for row in tokens for token in row], dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            query_start=torch.tensor(starts, dtype=torch.int32),
            kv_len=torch.tensor(self.lengths, dtype=torch.int32),
            query_starts=starts,
            kv_lens=list(self.lengths),
            groups=(),
            logit_rows=torch.arange(starts[-1]),
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
            spec = self.model.layers[layer]
            outs = [
                self._row(row, spec, *(None if x is None else x[a:b] for x in (q, k, v)))
                for row, (a, b) in enumerate(pairwise(starts))
            ]
            return torch.cat(outs)

        logits = self.model.logits(self.model.forward(batch, attend))
        return [logits[a:b] for a, b in pairwise(starts)]

    def _row(self, row: int, spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        assert q.shape[1:] == (spec.q_heads, spec.key_dim)
        assert k.shape[1:] == (spec.kv_heads, spec.key_dim)
        old = self.cache[row].get(spec.index)
        keys = k if old is None else torch.cat((old[0], k))
        values = v if old is None or v is None else torch.cat((old[1], v))
        self.cache[row][spec.index] = (keys, values)
        return naive(spec, q, keys, keys[..., : spec.value_dim] if values is None else values)


def naive(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [n, Hq, D] are the last n of the positions of k [S, Hkv, D] and v [S, Hkv, Dv]."""
    n, s = len(q), len(k)
    k, v = (x.repeat_interleave(spec.q_heads // spec.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("nhd,shd->hns", q, k) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    distance = torch.arange(s - n, s)[:, None] - torch.arange(s)
    seen = (distance >= 0) & (distance < (spec.window or s + 1))
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.view(-1, 1, 1).expand(-1, n, 1)), -1)
    weights = scores.softmax(-1)[..., :s]
    return torch.einsum("hns,shd->nhd", weights, v)


def prefill(model: LoadedModel, ids: Sequence[int]) -> Tensor:
    return Session(model).step([list(ids)])[0]


def chunked(model: LoadedModel, ids: Sequence[int], size: int) -> Tensor:
    session = Session(model)
    return torch.cat([session.step([list(ids[i : i + size])])[0] for i in range(0, len(ids), size)])


def greedy(model: LoadedModel, ids: Sequence[int], n: int) -> list[int]:
    session, tokens, out = Session(model), list(ids), []
    for _ in range(n):
        tokens = [int(session.step([tokens])[0][-1].argmax())]
        out += tokens
    return out

"""Drafts: asked of the drafter for the sequences whose next step decodes, checked, and counted by how they fared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from core.interfaces.drafter import Drafter
from core.sequence import Sequence, State
from core.types import Draft, DraftView, PartFault

View = tuple[Sequence, DraftView]


class Drafting:
    """One drafter at work. `k`: the most drafts a sequence; `needs_hidden`: final hidden states are kept for it.

    `drafted` and `accepted` count by place in the draft; `drafts` counts those that were not empty.
    """

    def __init__(self, drafter: Drafter, *, k: int, vocab_size: int, needs_hidden: bool) -> None:
        self.drafter = drafter
        self.drafts = 0
        self.drafted: Counter[int] = Counter()
        self.accepted: Counter[int] = Counter()
        self._k = k
        self._vocab_size = vocab_size
        self._needs_hidden = needs_hidden
        self._hidden: dict[str, list[Tensor]] = {}

    def watch(self, seq: Sequence, hidden: Tensor) -> None:
        """Hidden states [n, H] of tokens that have just been computed."""
        if self._needs_hidden and seq.state is State.RUNNING:
            self._hidden.setdefault(seq.id, []).append(hidden)

    def forget(self, id: str) -> None:
        self._hidden.pop(id, None)
        self.drafter.forget(id)

    def propose(self, stepped: Iterable[Sequence]) -> Iterator[tuple[Sequence, Draft | Exception]]:
        """A draft, or what went wrong with it, for each sequence whose next step decodes."""
        views = []
        for seq in stepped:
            k = min(self._k, seq.max_total - seq.num_tokens - 1)
            if seq.state is State.RUNNING and seq.remaining == 1 and k > 0:
                hidden = self._hidden.pop(seq.id, None)
                states = torch.cat(hidden) if hidden else None
                views.append((seq, DraftView(seq.id, seq.tokens, k, seq.request.params.temperature, states)))
        return self._asked(views) if views else iter(())

    def count(self, draft: Draft, n_accepted: int) -> None:
        self.drafts += bool(draft.tokens)
        for position in range(len(draft.tokens)):
            self.drafted[position] += 1
            self.accepted[position] += position < n_accepted

    def _asked(self, views: list[View]) -> Iterator[tuple[Sequence, Draft | Exception]]:
        """Asked for together; if that fails, each alone, so that only those at fault have none."""
        try:
            drafts = list(self.drafter.propose([view for _, view in views]))
            if len(drafts) != len(views):
                raise PartFault(f"it returned {len(drafts)} drafts for {len(views)} sequences")
        except Exception as error:
            if len(views) == 1:
                yield views[0][0], error
            else:
                for pair in views:
                    yield from self._asked([pair])
            return
        for (seq, view), draft in zip(views, drafts, strict=True):
            fault = self._fault(draft, view.k)
            yield seq, PartFault(fault) if fault else draft

    def _fault(self, draft: Draft, k: int) -> str | None:
        if not isinstance(draft, Draft):
            return f"it returned a {type(draft).__name__} where a Draft belongs"
        if len(draft.tokens) > k:
            return f"it drafted {len(draft.tokens)} tokens where {k} were asked for"
        vocab = self._vocab_size
        wrong = next((t for t in draft.tokens if type(t) is not int or not 0 <= t < vocab), None)
        if wrong is not None:
            return f"it drafted {wrong!r}; token ids lie in [0, {vocab - 1}]"
        if draft.probs is not None and tuple(draft.probs.shape) != (len(draft.tokens), vocab):
            return f"it gave probs of shape {tuple(draft.probs.shape)}, not [{len(draft.tokens)}, {vocab}]"
        return None

"""One choice of a request, from the queue to its last token."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequence_
from enum import Enum
from typing import Any

import numpy as np

from core.types import Draft, Match, Request, TokenLogprob

NO_DRAFT = Draft()


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class PageTable:
    """The pages a sequence holds in one KV group, in order; the first one's first token is at position `start`."""

    __slots__ = ("_array", "_pages", "_unbroken", "start")

    def __init__(self) -> None:
        self.start = 0
        self.pages = ()

    @property
    def pages(self) -> Sequence_[int]:
        return self._pages

    @pages.setter
    def pages(self, pages: Sequence_[int]) -> None:
        self._pages = list(pages)
        self._array: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._pages)

    def append(self, pages: Iterable[int]) -> None:
        self._pages.extend(pages)
        self._array = None

    def replace(self, position: int, page: int) -> None:
        self._pages[position] = page
        self._array = None

    @property
    def array(self) -> np.ndarray:
        """The pages as int32."""
        if self._array is None:
            self._array = np.asarray(self._pages, dtype=np.int32)
            self._unbroken = bool((np.diff(self._array) == 1).all())
        return self._array

    @property
    def unbroken(self) -> bool:
        """Whether each page is the neighbour of the one before."""
        return self.array is not None and self._unbroken


class Sequence:
    """State of one choice. Schedulers read it through core.types.SequenceView; the engine and memory write it."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "client",
        "digests",
        "draft",
        "first_token_at",
        "id",
        "index",
        "leader",
        "match",
        "max_total",
        "num_computed",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "reduced",
        "request",
        "sampler",
        "state",
        "tables",
        "tokens",
    )

    def __init__(self, request: Request, index: int, max_total: int, n_groups: int) -> None:
        self.request = request
        self.index = index
        self.id = f"{request.id}#{index}"
        self.arrival = request.arrival
        self.priority = request.priority
        self.client = request.client
        self.tokens: list[int] = list(request.prompt)
        self.num_prompt_tokens = len(request.prompt)
        self.max_total = max_total
        self.num_computed = 0
        self.cached_tokens: int | None = None
        self.draft: Draft = NO_DRAFT
        self.tables = [PageTable() for _ in range(n_groups)]
        self.match: Match | None = None
        self.leader: tuple[Sequence, int] | None = None
        self.state = State.WAITING
        self.first_token_at: float | None = None
        self.reduced = False
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.sampler: Any = None
        self.digests: list[bytes] = []  # of its whole pages, as far as core.prefixes needed them

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_drafts(self) -> int:
        return len(self.draft.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def predicted_total(self) -> int:
        predicted = self.request.params.predicted_tokens
        if predicted is None:
            return self.max_total
        return min(self.max_total, max(self.num_tokens, self.num_prompt_tokens + predicted))

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.num_computed


class SequenceQueue(Sequence_[Sequence]):
    """Sequences by id, in order; taking one out anywhere costs nothing. Reads as a list."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, Sequence] = OrderedDict()

    def append(self, seq: Sequence) -> None:
        self._items[seq.id] = seq

    def remove(self, seq: Sequence) -> None:
        del self._items[seq.id]

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and self._items.get(seq.id) is seq

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items.values())

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(self._items.values())[index]
        ordered = iter(self) if index >= 0 else reversed(self)
        try:
            return next(itertools.islice(ordered, index if index >= 0 else -index - 1, None))
        except StopIteration:
            raise IndexError(index) from None


class ArrivalQueue(SequenceQueue):
    """Waiting sequences, earliest arrival first."""

    def put_back(self, seq: Sequence) -> None:
        """Return one that was preempted to its place, which is nearly always the front."""
        first = next(iter(self), seq)
        self.append(seq)
        if seq.arrival <= first.arrival:
            self._items.move_to_end(seq.id, last=False)
        else:
            self._items = OrderedDict((s.id, s) for s in sorted(self, key=lambda s: s.arrival))

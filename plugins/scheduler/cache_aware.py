"""Longest cached prefix first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from core.interfaces.plugin import BuildContext
from core.interfaces.scheduling import BatchingScheduler, in_turn
from core.types import Memory, Queues, SequenceView
from plugins.scheduler import CacheAwareOptions


class CacheAwareScheduler(BatchingScheduler):
    """Of the `look_ahead` that wait longest, the one with the most cached tokens first, as SGLang's longest prefix
    match orders them. One that was overtaken `patience` times goes before all others."""

    options: CacheAwareOptions

    def __init__(self, options: CacheAwareOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._overtaken: dict[str, int] = {}
        self._compared: list[SequenceView] = []

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        self._compared = list(islice(queues.waiting, self.options.look_ahead))
        overdue = [seq for seq in self._compared if self._is_overdue(seq)]
        others = [seq for seq in self._compared if not self._is_overdue(seq)]
        others.sort(key=memory.cached_tokens, reverse=True)
        yield from [*overdue, *others]
        yield from in_turn(queues.waiting)

    def admitted(self, seq: SequenceView) -> None:
        self._overtaken.pop(seq.id, None)
        if seq in self._compared:
            place = self._compared.index(seq)
            for other in self._compared[:place]:
                self._overtaken[other.id] = self._overtaken.get(other.id, 0) + 1
            del self._compared[place]

    def removed(self, seq: SequenceView) -> None:
        self._overtaken.pop(seq.id, None)
        self._compared.clear()

    def _is_overdue(self, seq: SequenceView) -> bool:
        return self._overtaken.get(seq.id, 0) >= self.options.patience

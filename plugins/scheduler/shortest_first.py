"""Shortest job first, with ageing."""

from __future__ import annotations

from core.interfaces.scheduling import OrderedScheduler
from core.types import SequenceView
from plugins.scheduler import ShortestFirstOptions


class ShortestFirstScheduler(OrderedScheduler):
    """By the length that the caller expects (`predicted_tokens`), or else that `max_tokens` allows. Waiting shortens a
    request, so the longest one is overtaken only by those that arrive within its length divided by `ageing`."""

    options: ShortestFirstOptions

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.predicted_total + self.options.ageing * seq.arrival,)

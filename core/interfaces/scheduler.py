"""The scheduler seam: what runs in this step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from pydantic import PositiveInt

from core.interfaces.plugin import Options, Part
from core.types import Budget, Memory, Plan, Queues, SequenceView


class SchedulerOptions(Options):
    """`max_running`: the most sequences that run; `token_budget`: the most tokens a step computes."""

    max_running: PositiveInt = 16
    token_budget: PositiveInt = 256


class Scheduler(Part[SchedulerOptions], ABC):
    """Plans one step at a time. It never sees a page: `memory` admits, reserves and preempts, at once.

    A plan names running sequences only (those running before, and those it admitted), each once, with at least one
    token, no more than it has left to compute plus its drafts, all reserved, and in sum within the budget. Every
    waiting sequence must run in the end: with nothing running and something waiting, admit the first that fits.
    """

    @abstractmethod
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        """Choose this step's work. `queues` is a live view: admitting and preempting move sequences in it."""

    def added(self, seq: SequenceView) -> None:
        """A sequence has joined the waiting ones. For policies that keep an index of their own."""

    def removed(self, seq: SequenceView) -> None:
        """A sequence has ended, from whichever queue."""

    def stats(self) -> Mapping[str, float]:
        """Counts of its own since it was built, for reports; they only grow."""
        return {}


def remaining(seq: SequenceView) -> int:
    """Tokens of a sequence that are not computed yet: one while decoding, more in prefill. Drafts not counted."""
    return seq.num_tokens - seq.num_computed

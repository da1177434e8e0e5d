"""Fairness between clients."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from core.interfaces.plugin import BuildContext
from core.interfaces.scheduler import remaining
from core.interfaces.scheduling import BatchingScheduler
from core.types import Budget, Memory, Plan, Queues, SequenceView
from plugins.scheduler import FairOptions

REMEMBERED = 1024
"""Charges kept of clients that have nothing waiting."""


class FairScheduler(BatchingScheduler):
    """The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    Each client is charged for its tokens, and of those with waiting requests the one charged least goes first, its
    requests by arrival. A client that comes back is lifted to the least of those waiting, or to the last that waited,
    so idling saves up nothing. While two clients wait, what they were charged differs by no more than two prompts or
    two full batches are worth.
    """

    options: FairOptions

    def __init__(self, options: FairOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._charges: dict[str, float] = {}
        self._order: list[tuple[float, str]] = []
        self._queues: dict[str, list[tuple[float, str]]] = {}
        self._waiting: dict[str, SequenceView] = {}
        self._prompts_charged: set[str] = set()
        self._least = 0.0
        self._left_last = ""

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, budget, memory)
        running = {seq.id: seq for seq in queues.running}
        for item in plan.items:
            seq = running.get(item.id)
            if seq is not None and remaining(seq) == 1:
                self._charge(seq.client, self.options.output_weight * item.n_tokens)
        return plan

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        at = 0
        while at < len(self._order):
            self._least = max(self._least, self._order[0][0])
            client = self._order[at][1]
            id = self._queues[client][0][1]
            yield self._waiting[id]
            at += id in self._waiting

    def admitted(self, seq: SequenceView) -> None:
        self._withdraw(seq)
        if seq.id not in self._prompts_charged:
            self._prompts_charged.add(seq.id)
            self._charge(seq.client, self.options.prompt_weight * remaining(seq))

    def added(self, seq: SequenceView) -> None:
        self._withdraw(seq)
        if not self._queues:
            self._least = max(self._least, self._charges.get(self._left_last, 0.0))
        if seq.client not in self._queues:
            self._charges[seq.client] = max(self._charges.get(seq.client, 0.0), self._least)
            self._queues[seq.client] = []
            insort(self._order, (self._charges[seq.client], seq.client))
        insort(self._queues[seq.client], (seq.arrival, seq.id))
        self._waiting[seq.id] = seq

    def removed(self, seq: SequenceView) -> None:
        self._withdraw(seq)
        self._prompts_charged.discard(seq.id)
        if len(self._charges) > REMEMBERED + 2 * len(self._queues):
            kept = {client: charge for client, charge in self._charges.items() if charge > self._least}
            self._charges = kept | {client: self._charges[client] for client in self._queues}

    def _charge(self, client: str, amount: float) -> None:
        before = self._charges.get(client, self._least)
        self._charges[client] = before + amount
        if client in self._queues:
            del self._order[bisect_left(self._order, (before, client))]
            insort(self._order, (before + amount, client))

    def _withdraw(self, seq: SequenceView) -> None:
        if self._waiting.pop(seq.id, None) is None:
            return
        queue = self._queues[seq.client]
        del queue[bisect_left(queue, (seq.arrival, seq.id))]
        if not queue:
            del self._queues[seq.client]
            self._left_last = seq.client
            del self._order[bisect_left(self._order, (self._charges[seq.client], seq.client))]

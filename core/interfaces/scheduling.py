"""What schedulers share: one way to fill a step, in which policies decide whom to admit next and whom to preempt."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Literal

from core.interfaces.plugin import BuildContext
from core.interfaces.scheduler import Scheduler, SchedulerOptions, remaining
from core.types import Budget, Memory, Plan, Queues, Scheduled, SequenceView


class BatchingOptions(SchedulerOptions):
    """`chunked_prefill`: compute a long prompt in pieces beside running decodes. Off: while a prompt is unfinished,
    steps compute prompts only, and running streams wait. `preemption`: move what is preempted to the allocator's
    second tier (`swap`), where it has one with room, or have it computed again (`recompute`)."""

    chunked_prefill: bool = True
    preemption: Literal["swap", "recompute"] = "swap"


class BatchingScheduler(Scheduler):
    """Fills a step: decodes first, then prompts that have begun, then new ones while memory and budget allow.

    The order follows Sarathi-Serve (Agrawal et al., OSDI 2024). When a running sequence finds no memory, the `victim`
    is preempted, and a step that preempts admits nobody. Drafts are verified with the budget and the memory that all
    this leaves. Policies override `candidates` (whom to admit next), `victim`, or both.
    """

    options: BatchingOptions

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        step = _Step(self, queues, budget, memory)
        running = list(queues.running)
        decodes = [seq for seq in running if remaining(seq) == 1]
        prompts = [seq for seq in running if remaining(seq) > 1]
        if self.options.chunked_prefill:
            step.compute(decodes)
        step.compute(prompts)
        step.admit()
        if not step.planned:
            step.compute(decodes)
        step.compute_drafts(decodes)
        return Plan(tuple(Scheduled(id, n_tokens) for id, n_tokens in step.planned.items()))

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        """Waiting sequences, the next to admit first. One that is admitted, or ends, before the next is asked for
        leaves `queues.waiting`. The default is the order of arrival."""
        return in_turn(queues.waiting)

    def admitted(self, seq: SequenceView) -> None:
        """A candidate was admitted. For policies that keep an index of their own."""

    def victim(self, queues: Queues) -> SequenceView:
        """Whom to preempt of those running; the default is the last one admitted."""
        return queues.running[-1]


class _Step:
    """One plan in the making: `planned` tokens by sequence, and what is left of the budget."""

    def __init__(self, scheduler: BatchingScheduler, queues: Queues, budget: Budget, memory: Memory) -> None:
        self.scheduler = scheduler
        self.queues = queues
        self.memory = memory
        self.left = budget.tokens
        self.max_running = budget.running
        self.planned: dict[str, int] = {}
        self.preempted: set[str] = set()

    def compute(self, sequences: Sequence[SequenceView]) -> None:
        for seq in sequences:
            n_tokens = min(remaining(seq), self.left)
            if n_tokens and self._hold(seq, n_tokens):
                self._plan(seq, n_tokens)

    def compute_drafts(self, decodes: Sequence[SequenceView]) -> None:
        for seq in decodes:
            n_drafts = min(seq.num_drafts, self.left) if seq.id in self.planned else 0
            if n_drafts and self.memory.reserve(seq, 1 + n_drafts):
                self._plan(seq, n_drafts)

    def admit(self) -> None:
        if self.preempted or not self._room():
            return
        for seq in self.scheduler.candidates(self.queues, self.memory):
            if self.memory.admit(seq):
                self.scheduler.admitted(seq)
                self.compute([seq])
            elif len(self.queues.running):
                return
            if self.preempted or not self._room():
                return

    def _room(self) -> bool:
        return self.left > 0 and len(self.queues.running) < self.max_running

    def _plan(self, seq: SequenceView, n_tokens: int) -> None:
        self.planned[seq.id] = self.planned.get(seq.id, 0) + n_tokens
        self.left -= n_tokens

    def _hold(self, seq: SequenceView, n_tokens: int) -> bool:
        """Reserve, preempting until there is room; False if the sequence itself had to go, or has ended."""
        while seq.id not in self.preempted:
            if self.memory.reserve(seq, n_tokens):
                return True
            if seq not in self.queues.running:
                return False
            victim = self.scheduler.victim(self.queues)
            self.memory.preempt(victim)
            self.preempted.add(victim.id)
            self.scheduler.added(victim)
            self.left += self.planned.pop(victim.id, 0)
        return False


class OrderedScheduler(BatchingScheduler):
    """Admits by a key that does not change while a sequence waits, the lowest first, and preempts the highest.

    Waiting sequences are kept sorted as they come and go, so a step does not look at those it cannot admit.
    """

    def __init__(self, options: BatchingOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._order: list[tuple[tuple[float, ...], str]] = []
        self._waiting: dict[str, tuple[tuple[float, ...], SequenceView]] = {}

    @abstractmethod
    def key(self, seq: SequenceView) -> tuple[float, ...]:
        """Where a waiting sequence stands; ties go by arrival."""

    def added(self, seq: SequenceView) -> None:
        self._withdraw(seq)
        key = (*self.key(seq), seq.arrival)
        self._waiting[seq.id] = key, seq
        insort(self._order, (key, seq.id))

    def removed(self, seq: SequenceView) -> None:
        self._withdraw(seq)

    def admitted(self, seq: SequenceView) -> None:
        self._withdraw(seq)

    def _withdraw(self, seq: SequenceView) -> None:
        if seq.id in self._waiting:
            key, _ = self._waiting.pop(seq.id)
            del self._order[bisect_left(self._order, (key, seq.id))]

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        return self.between(-math.inf, math.inf)

    def between(self, low: float, high: float) -> Iterator[SequenceView]:
        """Waiting sequences whose key begins with a number from `low` to below `high`, in order."""
        at = bisect_left(self._order, ((low,),))
        while at < len(self._order) and self._order[at][0][0] < high:
            place = self._order[at]
            yield self._waiting[place[1]][1]
            at += at < len(self._order) and self._order[at] is place

    def victim(self, queues: Queues) -> SequenceView:
        return max(reversed(queues.running), key=self.key)


def in_turn(waiting: Sequence[SequenceView]) -> Iterator[SequenceView]:
    """A live queue from its head on, while the one just given may be taken out of it."""
    at = 0
    while at < len(waiting):
        n_waiting = len(waiting)
        yield waiting[at]
        if len(waiting) == n_waiting:
            at += 1

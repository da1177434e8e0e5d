"""Classes of priority, with ageing."""

from __future__ import annotations

from core.interfaces.scheduling import OrderedScheduler
from core.types import Budget, Memory, Plan, Queues, SequenceView
from plugins.scheduler import PriorityOptions


class PriorityScheduler(OrderedScheduler):
    """The lowest priority number first. A waiting request of a better class takes the place of running ones.

    A class is worth `ageing` seconds of arrival, so no request waits for ever: one that has waited long enough is
    neither overtaken nor preempted by newer ones of any class.
    """

    options: PriorityOptions

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.priority * self.options.ageing + seq.arrival,)

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        for seq in self.candidates(queues, memory):
            if not self._take_place(seq, queues, budget, memory):
                break
        return super().plan(queues, budget, memory)

    def _take_place(self, seq: SequenceView, queues: Queues, budget: Budget, memory: Memory) -> bool:
        """Admit `seq` by preempting whom it comes before; False if there is none or it does not help."""
        while queues.running:
            victim = self.victim(queues)
            if victim.priority <= seq.priority or self.key(victim) <= self.key(seq):
                return False
            if len(queues.running) < budget.running and memory.admit(seq):
                self.admitted(seq)
                return True
            memory.preempt(victim)
            self.added(victim)
        return False

"""Static batching: a batch ends before the next one begins."""

from __future__ import annotations

from collections.abc import Iterator

from core.interfaces.scheduling import BatchingScheduler, in_turn
from core.types import Budget, Memory, Plan, Queues, SequenceView


class StaticScheduler(BatchingScheduler):
    """Forms a batch in order of arrival when the last one is done, as large as memory and `max_running` allow."""

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        if not queues.running:
            self._form(queues, budget, memory)
        return super().plan(queues, budget, memory)

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        return iter(())

    def _form(self, queues: Queues, budget: Budget, memory: Memory) -> None:
        for seq in in_turn(queues.waiting):
            if len(queues.running) >= budget.running or (not memory.admit(seq) and queues.running):
                return

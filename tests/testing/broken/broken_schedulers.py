"""Schedulers that are wrong in one way each."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

from core.interfaces import BuildContext, PluginInfo, Scheduler, SchedulerOptions, remaining
from core.types import Budget, Memory, Plan, Queues, Scheduled, SequenceView


class Right(Scheduler):
    """Decodes, then prompts in chunks, then arrivals in turn; the last one admitted is preempted when memory is short.
    The ones below change one thing of it."""

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        left = budget.tokens
        items: dict[str, Scheduled] = {}
        for seq in list(queues.running):
            if seq not in list(queues.running):
                continue
            wanted = self.wanted(seq, left)
            while wanted and not self.reserve(memory, seq, wanted):
                victim = list(queues.running)[-1]
                left += items.pop(victim.id).n_tokens if victim.id in items else 0
                memory.preempt(victim)
                if victim is seq:
                    wanted = 0
            if wanted:
                items[seq.id] = Scheduled(seq.id, wanted)
                left -= wanted
        for seq in self.arrivals(queues):
            if left <= 0 or len(queues.running) >= self.limit(budget) or not memory.admit(seq):
                break
            n_tokens = min(remaining(seq), left)
            items[seq.id] = Scheduled(seq.id, n_tokens)
            left -= n_tokens
        return Plan(tuple(items.values()))

    def wanted(self, seq: SequenceView, left: int) -> int:
        return min(remaining(seq) + seq.num_drafts, left)

    def reserve(self, memory: Memory, seq: SequenceView, n_tokens: int) -> bool:
        return memory.reserve(seq, n_tokens)

    def arrivals(self, queues: Queues) -> Iterator[SequenceView]:
        yield from list(queues.waiting)

    def limit(self, budget: Budget) -> int:
        return budget.running


class StarvesLongPrompts(Right):
    def arrivals(self, queues: Queues) -> Iterator[SequenceView]:
        yield from sorted(queues.waiting, key=lambda seq: seq.num_tokens)


class IgnoresTheTokenBudget(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        return super().plan(queues, replace(budget, tokens=budget.tokens + 5), memory)


class IgnoresTheRunningLimit(Right):
    def limit(self, budget: Budget) -> int:
        return budget.running + 1


class PlansMoreThanIsLeft(Right):
    def wanted(self, seq: SequenceView, left: int) -> int:
        return min(super().wanted(seq, left) + 1, left)


class ForgetsToReserve(Right):
    def reserve(self, memory: Memory, seq: SequenceView, n_tokens: int) -> bool:
        return True


class PlansTwice(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, budget, memory)
        spare = budget.tokens - sum(item.n_tokens for item in plan.items)
        return Plan((*plan.items, *(item for item in plan.items[:1] if item.n_tokens <= spare)))


class PlansThoseWaiting(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, replace(budget, tokens=budget.tokens - 1), memory)
        return Plan((*plan.items, *(Scheduled(seq.id, 1) for seq in list(queues.waiting)[:1])))


class NeedsThePromptInOnePiece(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        if any(remaining(seq) > budget.tokens for seq in list(queues.waiting)[:1]):
            return Plan(())
        return super().plan(queues, budget, memory)


class NeverPreempts(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        items, left = [], budget.tokens
        for seq in list(queues.running):
            wanted = min(remaining(seq), left)
            if wanted and memory.reserve(seq, wanted):
                items.append(Scheduled(seq.id, wanted))
                left -= wanted
        for seq in list(queues.waiting):
            if left <= 0 or len(queues.running) >= budget.running or not memory.admit(seq):
                break
            items.append(Scheduled(seq.id, min(remaining(seq), left)))
            left -= items[-1].n_tokens
        return Plan(tuple(items))


class RemembersTheDead(Right):
    def __init__(self, options: SchedulerOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._seen: list[SequenceView] = []

    def added(self, seq: SequenceView) -> None:
        self._seen.append(seq)


class SharesOneQueue(Right):
    order: ClassVar[list[SequenceView]] = []

    def added(self, seq: SequenceView) -> None:
        self.order.append(seq)

    def removed(self, seq: SequenceView) -> None:
        self.order.remove(seq)

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, budget, memory)
        if not plan.items and not len(queues.waiting):
            return Plan(tuple(Scheduled(seq.id, 1) for seq in self.order[:1]))
        return plan


class SortsAgainForEachOther(Right):
    def arrivals(self, queues: Queues) -> Iterator[SequenceView]:
        waiting = list(queues.waiting)
        for seq in waiting:
            min(waiting, key=lambda other: other.arrival)
            if seq is waiting[-1]:
                break
        yield from waiting


class PlansGhosts(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, budget, memory)
        return plan if plan.items else Plan((Scheduled("ghost", 1),))


class PreemptsTheWaiting(Right):
    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        plan = super().plan(queues, budget, memory)
        for seq in list(queues.waiting)[:1]:
            memory.preempt(seq)
        return plan


BROKEN = {
    StarvesLongPrompts: {"l1_nobody_starves"},
    IgnoresTheTokenBudget: {"l3_any_order", "l2_serves_every_request", "l1_stays_within_the_token_budget"},
    IgnoresTheRunningLimit: {"l1_stays_within_the_running_limit"},
    PlansMoreThanIsLeft: {"l1_plans_no_more_than_is_left"},
    ForgetsToReserve: {"l1_plans_reserved_tokens_only"},
    PlansTwice: {"l1_plans_each_sequence_once"},
    PlansThoseWaiting: {"l1_plans_running_sequences_only"},
    NeedsThePromptInOnePiece: {
        "l2_output_equals_the_null_parts",
        "l1_prompts_beyond_the_budget_run_in_chunks",
        "l1_always_moves",
        "l1_everything_finishes",
        "l1_nobody_starves",
    },
    NeverPreempts: {
        "l3_any_order",
        "l1_two_that_outgrow_memory_both_finish",
        "l1_always_moves",
        "l1_everything_finishes",
    },
    RemembersTheDead: {"l1_ended_sequences_are_forgotten"},
    SharesOneQueue: {"l1_schedulers_are_independent"},
    SortsAgainForEachOther: {"l4_cost_and_growth"},
    PlansGhosts: {
        "l1_an_empty_engine_plans_nothing",
        "l1_schedulers_are_independent",
        "l1_ended_sequences_are_forgotten",
    },
    PreemptsTheWaiting: {"l1_uses_memory_as_agreed"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="scheduler",
        part=f"{__name__}:{part.__name__}",
        options=SchedulerOptions,
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

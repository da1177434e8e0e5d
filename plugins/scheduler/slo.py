"""Latency targets: the least slack first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from core.interfaces.plugin import BuildContext
from core.interfaces.scheduler import remaining
from core.interfaces.scheduling import OrderedScheduler
from core.types import Budget, Memory, Plan, Queues, SequenceView
from plugins.scheduler import SloOptions

SMOOTHING = 0.2


class SloScheduler(OrderedScheduler):
    """By the latest time at which a request may start and still meet its target for the first token.

    Requests that cannot meet it any more stand behind those that can, until they are `grace` targets late. Steps with
    running streams are cut to the tokens that fit the target between tokens, at the speed measured so far.
    """

    options: SloOptions
    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, on the clock of `SequenceView.arrival`."""

    def __init__(self, options: SloOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._seconds_a_token = 0.0
        self._last: tuple[float, int] | None = None

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.arrival + self.options.ttft_ms / 1000 - seq.num_prompt_tokens * self._seconds_a_token,)

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        now = self.clock()
        self._measure(now, bool(queues.running))
        n_decodes = sum(remaining(seq) == 1 for seq in queues.running)
        plan = super().plan(queues, Budget(self._tokens(budget, n_decodes), budget.running), memory)
        self._last = now, sum(item.n_tokens for item in plan.items)
        return plan

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        now = self.clock()
        overdue = now - self.options.grace * self.options.ttft_ms / 1000
        for low, high in ((-math.inf, overdue), (now, math.inf), (overdue, now)):
            yield from self.between(low, high)

    def _tokens(self, budget: Budget, n_decodes: int) -> int:
        """The most tokens of a step that keeps the streams' target, but always one for a prompt."""
        if not n_decodes or not self._seconds_a_token:
            return budget.tokens
        timely = int(self.options.itl_ms / 1000 / self._seconds_a_token)
        return min(budget.tokens, max(n_decodes + 1, timely))

    def _measure(self, now: float, busy: bool) -> None:
        """Learn the time a token takes from the last step, unless the engine may have been idle since."""
        if self._last is None or not busy:
            return
        before, n_tokens = self._last
        if n_tokens and now > before:
            measured = (now - before) / n_tokens
            known = self._seconds_a_token or measured
            self._seconds_a_token = known + SMOOTHING * (measured - known)

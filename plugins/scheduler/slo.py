"""Latency targets: the least slack first."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping

from core.interfaces.plugin import BuildContext
from core.interfaces.scheduler import remaining
from core.interfaces.scheduling import OrderedScheduler
from core.types import Budget, Memory, Plan, Queues, SequenceView
from plugins.scheduler import SloOptions

SMOOTHING = 0.2


class SloScheduler(OrderedScheduler):
    """By the latest time at which a request may start and still meet its target for the first token.

    Requests that cannot meet it any more stand behind those that can, until they are `grace` targets late. Steps with
    running streams are cut to the tokens that fit the target between tokens. Both go by the speed measured so far: the
    time of a step that only decodes, and what each token of a prompt adds to it.
    """

    options: SloOptions
    clock: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, on the clock of `SequenceView.arrival`."""

    def __init__(self, options: SloOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._decode_seconds = 0.0
        self._prompt_token_seconds = 0.0
        self._last: tuple[float, int, int] | None = None
        self._goodput = Goodput(options)

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        prefill = self._decode_seconds + seq.num_prompt_tokens * self._prompt_token_seconds
        return (seq.arrival + self.options.ttft_ms / 1000 - prefill,)

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Plan:
        now = self.clock()
        self._measure(now, bool(queues.running))
        self._goodput.look(queues, now)
        decodes = {seq.id for seq in queues.running if remaining(seq) == 1}
        plan = super().plan(queues, Budget(self._tokens(budget, len(decodes)), budget.running), memory)
        n_prompt = sum(item.n_tokens for item in plan.items if item.id not in decodes)
        self._last = now, n_prompt, len(plan.items)
        return plan

    def candidates(self, queues: Queues, memory: Memory) -> Iterator[SequenceView]:
        now = self.clock()
        overdue = now - self.options.grace * self.options.ttft_ms / 1000
        for low, high in ((-math.inf, overdue), (now, math.inf), (overdue, now)):
            yield from self.between(low, high)

    def removed(self, seq: SequenceView) -> None:
        super().removed(seq)
        self._goodput.ended(seq, self.clock())

    def stats(self) -> Mapping[str, float]:
        return self._goodput.counts

    def _tokens(self, budget: Budget, n_decodes: int) -> int:
        """The most tokens of a step that keeps the streams' target, but always one for a prompt."""
        if not n_decodes or not self._prompt_token_seconds:
            return budget.tokens
        timely = int((self.options.itl_ms / 1000 - self._decode_seconds) / self._prompt_token_seconds)
        return min(budget.tokens, n_decodes + max(1, timely))

    def _measure(self, now: float, busy: bool) -> None:
        """Learn from the last step, unless the engine may have been idle since."""
        if self._last is None or not busy:
            return
        before, n_prompt, n_rows = self._last
        if n_prompt:
            measured = max(0.0, now - before - self._decode_seconds) / n_prompt
            self._prompt_token_seconds = _smoothed(self._prompt_token_seconds, measured)
        elif n_rows:
            self._decode_seconds = _smoothed(self._decode_seconds, now - before)


class Goodput:
    """Counts choices that ended, and those that met their targets: the first token `ttft_ms` after arrival, the others
    `itl_ms` apart on average."""

    def __init__(self, options: SloOptions) -> None:
        self.counts = dict.fromkeys(("ended", "met_ttft", "met_itl", "met_targets"), 0)
        self._ttft, self._itl = options.ttft_ms / 1000, options.itl_ms / 1000
        self._first_token_at: dict[str, float] = {}

    def look(self, queues: Queues, now: float) -> None:
        """Between two steps: who has got a first token in the last one."""
        for seq in queues.running:
            if seq.num_tokens > seq.num_prompt_tokens:
                self._first_token_at.setdefault(seq.id, now)

    def ended(self, seq: SequenceView, now: float) -> None:
        n_tokens = seq.num_tokens - seq.num_prompt_tokens
        first = self._first_token_at.pop(seq.id, now)
        in_time = n_tokens > 0 and first - seq.arrival <= self._ttft
        flowing = n_tokens > 0 and now - first <= self._itl * (n_tokens - 1)
        self.counts["ended"] += 1
        self.counts["met_ttft"] += in_time
        self.counts["met_itl"] += flowing
        self.counts["met_targets"] += in_time and flowing


def _smoothed(known: float, measured: float) -> float:
    return known + SMOOTHING * (measured - known) if known else measured

"""A simulated engine for schedulers: sequences, memory that is counted in pages, and a referee for every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from core.interfaces import Scheduler
from core.types import Budget, Plan, Queues, SequenceView

MAX_IDLE_STEPS = 4


@dataclass(slots=True)
class _State:
    id: str
    arrival: float
    num_prompt_tokens: int
    max_total: int
    priority: int
    client: str
    num_tokens: int
    num_computed: int = 0
    num_drafts: int = 0
    predicted_total: int = 0


class FakeSequence:
    """A sequence that a scheduler may read; writing raises AttributeError."""

    __slots__ = ("__weakref__", "_state")
    _state: _State

    def __init__(self, state: _State) -> None:
        object.__setattr__(self, "_state", state)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a scheduler may only read sequences, and this one set {name}")

    @property
    def id(self) -> str:
        return self._state.id

    @property
    def arrival(self) -> float:
        return self._state.arrival

    @property
    def priority(self) -> int:
        return self._state.priority

    @property
    def client(self) -> str:
        return self._state.client

    @property
    def num_prompt_tokens(self) -> int:
        return self._state.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return self._state.num_tokens

    @property
    def num_computed(self) -> int:
        return self._state.num_computed

    @property
    def num_drafts(self) -> int:
        return self._state.num_drafts

    @property
    def max_total(self) -> int:
        return self._state.max_total

    @property
    def predicted_total(self) -> int:
        return self._state.predicted_total or self._state.max_total

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_computed

    def __repr__(self) -> str:
        return f"<{self.id}: {self.num_computed} of {self.num_tokens} tokens computed, at most {self.max_total}>"


class LiveView(Sequence[SequenceView]):
    """A queue that can be read while it changes, and not be changed."""

    def __init__(self, queue: list[FakeSequence]) -> None:
        self._queue = queue

    @overload
    def __getitem__(self, index: int) -> SequenceView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SequenceView]: ...
    def __getitem__(self, index: int | slice) -> SequenceView | Sequence[SequenceView]:
        return self._queue[index]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[SequenceView]:
        return iter(self._queue)


@dataclass(slots=True)
class World:
    """Runs a scheduler. It implements `core.types.Memory`, and notes each broken rule in `broken` by the rule's name
    instead of stopping, so that a check can look for its own."""

    scheduler: Scheduler
    pages: int
    page_size: int = 4
    budget: Budget = field(default_factory=lambda: Budget(tokens=32, running=4))
    drafts: int = 0
    cached: Callable[[FakeSequence], int] = lambda seq: 0
    seed: int = 0
    waiting: list[FakeSequence] = field(default_factory=list)
    running: list[FakeSequence] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)
    preemptions: int = 0
    steps: int = 0
    idle_steps: int = 0
    started: dict[str, int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=dict)
    _count: int = 0
    _random: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        self._random.seed(self.seed)

    # --- requests --------------------------------------------------------------------------------------------------

    def add(self, prompt: int, output: int, priority: int = 0, client: str = "") -> FakeSequence:
        name = f"s{self._count}"
        state = _State(name, float(self._count), prompt, prompt + output, priority, client, prompt)
        self._count += 1
        seq = FakeSequence(state)
        self.waiting.append(seq)
        self.scheduler.added(seq)
        return seq

    def remove(self, seq: FakeSequence) -> None:
        """End a sequence, as an abort or its last token does."""
        queue = self.running if seq in self.running else self.waiting
        queue.remove(seq)
        self._held.pop(seq.id, None)
        self.scheduler.removed(seq)

    # --- core.types.Memory -----------------------------------------------------------------------------------------

    def admit(self, seq: SequenceView) -> bool:
        known = self._known(seq, self.waiting, "admit takes a waiting sequence")
        if known is None:
            return False
        if len(self.running) >= self.budget.running:
            self.note("running_limit", f"admits {seq.id} beside {len(self.running)} running, the most allowed")
            return False
        if not self._hold(known, known.num_tokens):
            return False
        self.waiting.remove(known)
        self.running.append(known)
        known._state.num_computed = min(self.cached(known), known.num_tokens - 1)
        self.started.setdefault(known.id, self.steps)
        return True

    def reserve(self, seq: SequenceView, n_tokens: int) -> bool:
        known = self._known(seq, self.running, "reserve takes a running sequence")
        return known is not None and self._hold(known, known.num_computed + n_tokens)

    def preempt(self, seq: SequenceView) -> None:
        known = self._known(seq, self.running, "preempt takes a running sequence")
        if known is None:
            return
        self.running.remove(known)
        del self._held[known.id]
        known._state.num_computed = 0
        known._state.num_drafts = 0
        self.waiting.append(known)
        self.waiting.sort(key=lambda s: s.arrival)
        self.preemptions += 1

    def cached_tokens(self, seq: SequenceView) -> int:
        known = self._known(seq, self.waiting, "cached_tokens takes a waiting sequence")
        return min(self.cached(known), known.num_tokens - 1) if known else 0

    @property
    def free_pages(self) -> int:
        return self.pages - sum(self._held.values())

    def _hold(self, seq: FakeSequence, n_tokens: int) -> bool:
        held = self._held.get(seq.id, 0)
        more = -(-n_tokens // self.page_size) - held
        if more > self.free_pages:
            return False
        if more > 0:
            self._held[seq.id] = held + more
        else:
            self._held.setdefault(seq.id, held)
        return True

    def _known(self, seq: SequenceView, queue: list[FakeSequence], rule: str) -> FakeSequence | None:
        for known in queue:
            if known is seq:
                return known
        self.note("memory_verbs", f"{rule}, and {getattr(seq, 'id', seq)!r} is not one")
        return None

    def note(self, rule: str, message: str) -> None:
        self.broken.setdefault(rule, f"step {self.steps}: {message}")

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> Plan:
        """Plan, judge the plan, and compute what is right in it."""
        states = {seq.id: seq.num_tokens for seq in (*self.waiting, *self.running)}
        plan = self.scheduler.plan(Queues(LiveView(self.waiting), LiveView(self.running)), self.budget, self)
        if states.keys() != {seq.id for seq in (*self.waiting, *self.running)}:
            self.note("queues_change_by_memory_only", "sequences came or went while planning")
        work = self._judge(plan)
        self.idle_steps = self.idle_steps + 1 if not work and (self.waiting or self.running) else 0
        if self.idle_steps == MAX_IDLE_STEPS:
            self.note("progress", f"nothing runs for {MAX_IDLE_STEPS} steps; waiting {self.waiting[:3]}")
        for seq, n_tokens in work:
            self._compute(seq, n_tokens)
        self.steps += 1
        return plan

    def run(self, max_steps: int) -> None:
        """Step until all is done, nothing moves any more, or `max_steps` are over."""
        for _ in range(max_steps):
            if not (self.waiting or self.running) or self.idle_steps >= MAX_IDLE_STEPS:
                return
            self.step()

    def _judge(self, plan: Plan) -> list[tuple[FakeSequence, int]]:
        """Note what is wrong, and go on with what was probably meant, so that one fault does not show as many."""
        if not isinstance(plan, Plan):
            self.note("plan_type", f"plan() gave {type(plan).__name__}, not Plan")
            return []
        running = {seq.id: seq for seq in self.running}
        waiting = {seq.id for seq in self.waiting}
        work: dict[str, tuple[FakeSequence, int]] = {}
        for item in plan.items:
            seq = running.get(item.id)
            if seq is None:
                rule, what = ("running_only", "waiting") if item.id in waiting else ("live_only", "gone or unknown")
                self.note(rule, f"plans {item.id!r}, which is {what}")
            elif item.id in work:
                self.note("once", f"plans {item.id} twice")
            else:
                work[item.id] = (seq, self._judge_tokens(seq, item.n_tokens))
        total = sum(item.n_tokens for item in plan.items)
        if total > self.budget.tokens:
            self.note("token_budget", f"plans {total} tokens; the budget is {self.budget.tokens}")
        return [(seq, n_tokens) for seq, n_tokens in work.values() if n_tokens]

    def _judge_tokens(self, seq: FakeSequence, n_tokens: int) -> int:
        left, held = seq.remaining + seq.num_drafts, self._held[seq.id] * self.page_size
        if not 1 <= n_tokens <= left:
            self.note("tokens_left", f"plans {n_tokens} tokens of {seq} with {seq.num_drafts} drafts")
        elif seq.num_computed + n_tokens > held:
            self.note("reserved", f"plans {n_tokens} tokens of {seq}, whose pages hold {held}")
        return max(0, min(n_tokens, left))

    def _compute(self, seq: FakeSequence, n_tokens: int) -> None:
        state = seq._state
        if n_tokens < seq.remaining:
            state.num_computed += n_tokens
            return
        accepted = self._random.randint(0, n_tokens - seq.remaining)
        produced = min(accepted + 1, state.max_total - state.num_tokens)
        state.num_tokens += produced
        state.num_computed = state.num_tokens - 1
        if state.num_tokens >= state.max_total:
            self.remove(seq)
            self.finished.append(seq.id)
            return
        state.num_drafts = min(self._random.randint(0, self.drafts), state.max_total - state.num_tokens - 1)

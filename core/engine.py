"""The engine: requests in, one step at a time, events out."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.clock import Clock
from core.drafting import Drafting
from core.hooks import Observers
from core.interfaces.context_reduction import ContextReduction
from core.interfaces.drafter import Drafter
from core.interfaces.scheduler import Scheduler
from core.memory import Memory
from core.runner import Row, Runner
from core.sampling import Sampler, Verified, token_logprobs, verify
from core.sequence import NO_DRAFT, ArrivalQueue, SequenceQueue, State
from core.sequence import Sequence as Seq
from core.types import (
    Budget,
    Draft,
    Event,
    FinishReason,
    InvalidRequest,
    PartFault,
    Plan,
    QueueFull,
    Queues,
    Request,
    SequenceView,
    TokenLogprob,
)

log = logging.getLogger("partwise")

STALL_SECONDS = 5.0
STEP_SEAMS = ("attention.kernel", "attention.structure", "quantizer.weights", "quantizer.kv", "context_reduction")
"""Whose code or weights the model computes with, the likeliest cause of a fault first."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's sizes: tokens a sequence, waiting requests, tokens and sequences a step, drafts a sequence; and
    whether what is preempted moves to the host tier, where there is one with room."""

    max_model_len: int
    max_waiting: int
    budget: Budget
    draft_k: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    swap: bool = True


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    steps: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    finished: Counter[str] = field(default_factory=Counter)


class Engine:
    """Runs requests through the parts of one recipe. Not thread-safe: one caller adds, aborts and steps.

    A fault in a part ends the requests it concerns with an error event that names the part; the engine goes on.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        memory: Memory,
        scheduler: Scheduler,
        drafter: Drafter,
        reduction: ContextReduction,
        limits: Limits,
        parts: Mapping[str, str],
        labels: Mapping[str, str],
        observers: Observers,
        clock: Clock,
        needs_hidden: bool = False,
        seed: int | None = None,
    ) -> None:
        self.runner = runner
        self.memory = memory
        self.scheduler = scheduler
        self.drafting = Drafting(
            drafter, k=limits.draft_k, vocab_size=limits.vocab_size, needs_hidden=needs_hidden
        )
        self.reduction = reduction
        self.limits = limits
        self.parts = parts
        self.labels = labels
        self.observers = observers
        self.clock = clock
        self.counters = Counters()
        self.waiting = ArrivalQueue()
        self.running = SequenceQueue()
        self._groups: dict[str, list[Seq]] = {}
        self._unforked: dict[str, list[Seq]] = {}
        self._orphans: set[str] = set()
        self._events: list[Event] = []
        self._seeds = torch.Generator().manual_seed(seed if seed is not None else secrets.randbits(63))
        self._progress_at = time.monotonic()
        self._last_step: dict[str, Any] = {}

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. InvalidRequest: it can never be served as asked; QueueFull: not now."""
        max_total = self._admissible(request)
        if len(self.waiting) + sum(map(len, self._unforked.values())) >= self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests are waiting already; try again later")
        if not self._groups:
            self._progress_at = time.monotonic()
        seed = request.params.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), generator=self._seeds))
        choices = [self._sequence(request, index, max_total, seed) for index in range(request.params.n)]
        self._groups[request.id] = choices
        self.counters.requests += 1
        self.counters.prompt_tokens += len(request.prompt)
        self.observers.call("on_request_added", request=request)
        if request.params.max_tokens == 0 and request.params.prompt_logprobs is None:
            for seq in list(choices):
                self._finish(seq, "length")
            return
        self._wait(choices[0])
        if choices[1:]:
            self._unforked[request.id] = choices[1:]

    def abort(self, id: str, index: int | None = None) -> None:
        """End a request, or only its choice `index`, and free the pages now. Unknown or ended ones do nothing."""
        for seq in list(self._groups.get(id, ())):
            if index is None or seq.index == index:
                self._finish(seq, "abort")

    @property
    def has_work(self) -> bool:
        return bool(self._groups or self._events)

    def step(self) -> list[Event]:
        """Plan, compute, verify, commit, draft. Events of this step, and of what ended since the last one."""
        rows = self._plan()
        if rows:
            self._run(rows)
            with self.clock.span("context_reduction"):
                self._reduce([row.seq for row in rows])
            self._propose([row.seq for row in rows])
            self._after_step(rows)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End every request. Weights and pools are held for as long as the engine is referred to."""
        for id in list(self._groups):
            self.abort(id)

    # --- one step -------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Row]:
        if not (self.waiting or self.running):
            return []
        try:
            with self.clock.span("scheduler"):
                plan = self.scheduler.plan(Queues(self.waiting, self.running), self.limits.budget, _Verbs(self))
            if not isinstance(plan, Plan):
                raise PartFault(f"returned a {type(plan).__name__} where a Plan belongs")
            rows = self._checked_rows(plan)
        except Exception as error:
            self._fault_all("scheduler", error)
            return []
        if rows:
            self._progress_at = time.monotonic()
        elif time.monotonic() - self._progress_at > STALL_SECONDS:
            waits = len(self.waiting) + len(self.running)
            self._fault_all("scheduler", PartFault(f"it planned nothing for {STALL_SECONDS:g} s though {waits} wait"))
        return rows

    def _run(self, rows: list[Row]) -> None:
        """Compute, verify and commit. If that fails, each row is tried alone, to end only those at fault."""
        try:
            self.memory.settle()
            batch = self.runner.prepare(rows)
            with self.clock.span("model"):
                hidden, logits = self.runner.run(batch, rows)
            with self.clock.span("sampling"):
                prompt_logprobs, verified = self._verify(rows, logits[:, : self.limits.vocab_size])
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows[0].seq, self._told(self._model_step(), error))
                return
            log.warning("a step of %d sequences failed (%s); trying each alone", len(rows), error)
            for row in self._leaders_first(rows):
                if row.seq.state is State.RUNNING:
                    self._run([row])
            return
        for row, start in zip(rows, batch.query_starts, strict=False):
            before = row.seq.num_computed
            self._commit(row, prompt_logprobs.get(row.seq.id, []), verified.get(row.seq.id))
            self.drafting.watch(row.seq, hidden[start : start + row.seq.num_computed - before])

    def _verify(
        self, rows: list[Row], logits: Tensor
    ) -> tuple[dict[str, list[TokenLogprob]], dict[str, tuple[Verified, list[TokenLogprob]]]]:
        prompt: dict[str, list[TokenLogprob]] = {}
        sampled: list[Row] = []
        lines: list[int] = []
        line = 0
        for row in rows:
            if row.prompt_rows:
                prompt[row.seq.id] = self._prompt_logprobs(row, logits[line : line + row.prompt_rows])
                line += row.prompt_rows
            if row.samples:
                sampled.append(row)
                lines += range(line, line + 1 + len(row.draft.tokens))
                line += 1 + len(row.draft.tokens)
        if len(lines) < len(logits):
            logits = logits[lines]
        found = verify(logits, [row.seq.sampler for row in sampled], [row.draft for row in sampled]) if sampled else []
        verified, line = {}, 0
        for row, result in zip(sampled, found, strict=True):
            n_top = row.seq.request.params.logprobs
            logprobs = (
                [] if n_top is None else token_logprobs(logits[line : line + len(result.tokens)], result.tokens, n_top)
            )
            verified[row.seq.id] = (result, logprobs)
            line += 1 + len(row.draft.tokens)
        return prompt, verified

    def _prompt_logprobs(self, row: Row, logits: Tensor) -> list[TokenLogprob]:
        first = row.seq.num_computed + 1
        n_top = row.seq.request.params.prompt_logprobs
        assert n_top is not None
        return token_logprobs(logits, row.seq.tokens[first : first + len(logits)], n_top)

    def _commit(
        self, row: Row, prompt_logprobs: list[TokenLogprob], sampled: tuple[Verified, list[TokenLogprob]] | None
    ) -> None:
        seq = row.seq
        if seq.state is not State.RUNNING:
            return
        self.memory.leads.unfollow(seq)
        seq.num_computed += row.n_known
        self.counters.computed_tokens += row.n_tokens
        seq.draft = NO_DRAFT
        if seq.prompt_logprobs is not None:
            known_before = len(seq.prompt_logprobs) - 1 - (seq.num_computed - row.n_known)
            seq.prompt_logprobs += prompt_logprobs[max(0, known_before) :]
        if sampled is None:
            return
        verified, logprobs = sampled
        if not verified.finite:
            self._fail(seq, f"{self._model_step()} gave logits that are not finite numbers for this request")
            return
        if seq.num_output == 0 and not self._prompt_done(seq):
            return
        tokens, stop = self._kept(seq, verified.tokens)
        self.drafting.count(row.draft, min(verified.n_accepted, len(tokens)))
        seq.tokens += tokens
        seq.num_computed = min(seq.num_computed + verified.n_accepted, len(seq.tokens))
        self.counters.generated_tokens += len(tokens)
        reason: FinishReason | None = "stop" if stop is not None else None
        if reason is None and seq.num_tokens >= seq.max_total:
            reason = "length"
        self._emit(seq, tokens, logprobs[: len(tokens)], reason, stop)

    def _reduce(self, stepped: Sequence[Seq]) -> None:
        """Let go of what the context reduction chooses of the sequences that ran."""
        for seq in stepped:
            if seq.state is not State.RUNNING:
                continue
            try:
                for view in self.memory.views(seq):
                    places = self.reduction.forget(view)
                    if places:
                        self.memory.forget(seq, view, places)
            except Exception as error:
                self._fail(seq, self._told(self.labels["context_reduction"], error))

    def _propose(self, stepped: Sequence[Seq]) -> None:
        """Drafts for the sequences whose next step decodes."""
        with self.clock.span("drafter"):
            for seq, draft in self.drafting.propose(stepped):
                if isinstance(draft, Draft):
                    seq.draft = draft
                else:
                    self._fail(seq, self._told(self.labels["drafter"], draft))

    # --- planning -------------------------------------------------------------------------------------------------

    def _checked_rows(self, plan: Plan) -> list[Row]:
        """The plan's rows; a sequence whose item breaks the contract ends."""
        rows: dict[str, Row] = {}
        orphans, self._orphans = self._orphans, set()
        total = 0
        for item in plan.items:
            seq = self._find(item.id)
            if seq is None or seq.state is not State.RUNNING:
                if item.id not in orphans:
                    log.error("%s planned %r, which is not running", self.labels["scheduler"], item.id)
                continue
            fault = self._item_fault(seq, item.n_tokens, item.id in rows, total + item.n_tokens)
            if fault:
                rows.pop(seq.id, None)
                self._fail(seq, f"{self.labels['scheduler']} {fault}")
                continue
            total += item.n_tokens
            n_known = min(item.n_tokens, seq.remaining)
            rows[seq.id] = Row(seq, n_known, _cut(seq.draft, item.n_tokens - n_known))
        return self._followable(rows)

    def _followable(self, rows: dict[str, Row]) -> list[Row]:
        """Without the rows whose leader does not compute in this step what they share with it."""
        follow = any(row.seq.leader for row in rows.values())
        for row in self._leaders_first(list(rows.values())) if follow else ():
            if row.seq.leader is None:
                continue
            leader, n_tokens = row.seq.leader
            step = rows.get(leader.id)
            if leader.num_computed + (step.n_known if step else 0) < n_tokens:
                del rows[row.seq.id]
        return [row for row in rows.values() if row.seq.state is State.RUNNING]

    def _leaders_first(self, rows: list[Row]) -> list[Row]:
        order = {id: place for place, id in enumerate(seq.id for seq in self.running)}
        return sorted((row for row in rows if row.seq.id in order), key=lambda row: order[row.seq.id])

    def _item_fault(self, seq: Seq, n_tokens: int, again: bool, total: int) -> str | None:
        if again:
            return "planned one sequence twice in a step"
        if not 1 <= n_tokens <= seq.remaining + seq.num_drafts:
            return f"planned {n_tokens} tokens of a sequence that has {seq.remaining} and {seq.num_drafts} drafts left"
        if total > self.limits.budget.tokens:
            return f"planned {total} tokens in a step; the budget is {self.limits.budget.tokens}"
        if not self.memory.holds(seq, seq.num_computed + n_tokens):
            return f"planned {n_tokens} tokens without reserving pages for them"
        return None

    def admit(self, seq: Seq) -> bool:
        """The scheduler's verb: see core.types.Memory."""
        if len(self.running) >= self.limits.budget.running:
            return False
        is_first = seq.cached_tokens is None
        try:
            if not self.memory.admit(seq):
                return False
        except PartFault as fault:
            self._fail(seq, str(fault))
            return False
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.state = State.RUNNING
        if is_first:
            self.counters.cached_tokens += seq.cached_tokens or 0
        return True

    def reserve(self, seq: Seq, n_tokens: int) -> bool:
        try:
            return seq.state is State.RUNNING and self.memory.reserve(seq, n_tokens)
        except PartFault as fault:
            self._fail(seq, str(fault))
            return False

    def preempt(self, seq: Seq) -> None:
        if seq.state is not State.RUNNING:
            return
        lost = seq.num_computed
        self._part_from_followers(seq)
        kept = self._swap_out(seq) if self.limits.swap else 0
        if not kept:
            self._remember(seq)
            self._release(seq)
        self.running.remove(seq)
        seq.state = State.WAITING
        seq.draft = NO_DRAFT
        self._forget(seq)
        if kept < lost:
            self._forget_context(seq)
        self.waiting.put_back(seq)
        self.counters.preemptions += 1
        self.counters.swaps += kept > 0
        self.observers.call("on_preempted", id=seq.request.id, index=seq.index, computed_tokens=lost - kept)

    def _swap_out(self, seq: Seq) -> int:
        try:
            return self.memory.swap_out(seq)
        except Exception as error:
            log.error("%s", self._told(self.labels["kv_allocator"], error))
            return 0

    def _release(self, seq: Seq) -> None:
        self._guarded(self.labels["kv_allocator"], partial(self.memory.release, seq))

    # --- the life of a sequence -----------------------------------------------------------------------------------

    def _admissible(self, request: Request) -> int:
        """How long the request may become."""
        n_prompt, limit = len(request.prompt), self.limits.max_model_len
        if request.id in self._groups:
            raise InvalidRequest(f"a request with id {request.id!r} is live already", "id")
        if not n_prompt:
            raise InvalidRequest("the prompt is empty; give at least one token", "prompt")
        self._check_tokens(request)
        room = limit - n_prompt
        if room < (0 if request.params.max_tokens == 0 else 1):
            raise InvalidRequest(
                f"the prompt has {n_prompt} tokens and the model's limit is {limit}, which must hold at least one more",
                "prompt",
            )
        asked = request.params.max_tokens
        max_total = n_prompt + (room if asked is None else min(asked, room))
        self.memory.check_fits(max_total)
        return max_total

    def _check_tokens(self, request: Request) -> None:
        vocab = self.limits.vocab_size
        for param, tokens in (
            ("prompt", request.prompt),
            ("logit_bias", request.params.logit_bias),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            wrong = next((t for t in tokens if type(t) is not int or not 0 <= t < vocab), None)
            if wrong is not None:
                raise InvalidRequest(f"{param} holds {wrong!r}; token ids lie in [0, {vocab - 1}]", param)

    def _sequence(self, request: Request, index: int, max_total: int, seed: int) -> Seq:
        seq = Seq(request, index, max_total, len(self.memory.groups))
        stops = self._stops(request)
        seq.sampler = Sampler(request.params, seed, index, seq.tokens, len(request.prompt), stops)
        if request.params.prompt_logprobs is not None and index == 0:
            seq.prompt_logprobs = [None]
        return seq

    def _stops(self, request: Request) -> frozenset[int]:
        eos = frozenset() if request.params.ignore_eos else self.limits.eos_token_ids
        return eos.union(request.params.stop_token_ids)

    def _wait(self, seq: Seq) -> None:
        self.waiting.append(seq)
        self.scheduler.added(seq)

    def _prompt_done(self, seq: Seq) -> bool:
        """The first choice to have computed the prompt lets the others share it."""
        try:
            self.memory.remember(seq)
        except Exception as error:
            self._fail(seq, self._told(self.labels["prefix_cache"], error))
            return False
        for sibling in self._unforked.pop(seq.request.id, ()):
            try:
                self.memory.fork(seq, sibling)
            except Exception as error:
                self._fail(sibling, self._told(self.labels["kv_allocator"], error))
            else:
                self._wait(sibling)
        return True

    def _kept(self, seq: Seq, tokens: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
        """Tokens up to the first that ends the choice, and that one."""
        stops = self._stops(seq.request)
        room = seq.max_total - seq.num_tokens
        for position, token in enumerate(tokens[:room]):
            if token in stops and seq.num_output + position >= seq.request.params.min_tokens:
                return tuple(tokens[: position + 1]), token
        return tuple(tokens[:room]), None

    def _emit(
        self,
        seq: Seq,
        tokens: tuple[int, ...],
        logprobs: Sequence[TokenLogprob],
        reason: FinishReason | None,
        stop: int | None,
    ) -> None:
        if seq.first_token_at is None and tokens:
            seq.first_token_at = time.monotonic()
            seconds = seq.first_token_at - seq.arrival
            self.observers.call("on_first_token", id=seq.request.id, index=seq.index, seconds=seconds)
        if reason is None:
            self._events.append(self._event(seq, tokens, logprobs, None, None))
        else:
            self._finish(seq, reason, tokens, logprobs, stop)

    def _event(
        self,
        seq: Seq,
        tokens: tuple[int, ...],
        logprobs: Sequence[TokenLogprob],
        reason: FinishReason | None,
        stop: int | None,
        error: str | None = None,
    ) -> Event:
        prompt = None
        if seq.prompt_logprobs is not None and len(seq.prompt_logprobs) == seq.num_prompt_tokens:
            prompt, seq.prompt_logprobs = tuple(seq.prompt_logprobs), None
        return Event(
            seq.request.id, seq.index, tokens, tuple(logprobs), prompt, seq.cached_tokens or 0, reason, stop, error
        )

    def _finish(
        self,
        seq: Seq,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        logprobs: Sequence[TokenLogprob] = (),
        stop: int | None = None,
        error: str | None = None,
    ) -> None:
        self._leave(seq)
        if error is None:
            self._remember(seq)
        self._part_from_followers(seq)
        self._release(seq)
        self._events.append(self._event(seq, tokens, logprobs, reason, stop, error))
        self.counters.finished[reason] += 1
        seconds = time.monotonic() - seq.arrival
        self.observers.call(
            "on_request_finished",
            id=seq.request.id,
            index=seq.index,
            reason=reason,
            tokens=seq.num_output,
            seconds=seconds,
        )

    def _leave(self, seq: Seq) -> None:
        queue = self.running if seq.state is State.RUNNING else self.waiting
        queued = seq in queue
        seq.state = State.ENDED
        if queued:
            queue.remove(seq)
            self._guarded(self.labels["scheduler"], lambda: self.scheduler.removed(seq))
        self._forget(seq)
        self._forget_context(seq)
        self._leave_siblings(seq)

    def _leave_siblings(self, seq: Seq) -> None:
        """If the choice that was to compute the prompt for the others has ended, the next one takes its place."""
        id = seq.request.id
        unforked = [s for s in self._unforked.pop(id, ()) if s is not seq]
        siblings = self._groups[id]
        siblings.remove(seq)
        if unforked and len(unforked) == len(siblings):
            self._wait(unforked.pop(0))
        if unforked:
            self._unforked[id] = unforked
        if not siblings:
            del self._groups[id]

    def _remember(self, seq: Seq) -> None:
        """Whole computed pages of a sequence that goes stay cached."""
        try:
            self.memory.remember(seq)
        except Exception as error:
            log.error("%s", self._told(self.labels["prefix_cache"], error))

    def _part_from_followers(self, seq: Seq) -> None:
        """Those that wait for what a sequence that goes was to compute wait for admission again."""
        for follower in self.memory.leads.followers(seq):
            self.preempt(follower)
            self._orphans.add(follower.id)
            self._guarded(self.labels["scheduler"], partial(self.scheduler.added, follower))

    def _forget(self, seq: Seq) -> None:
        self._guarded(self.labels["drafter"], lambda: self.drafting.forget(seq.id))

    def _forget_context(self, seq: Seq) -> None:
        self._guarded(self.labels["context_reduction"], partial(self.reduction.ended, seq.id))

    # --- faults ---------------------------------------------------------------------------------------------------

    def _fail(self, seq: Seq, message: str) -> None:
        if seq.state is not State.ENDED:
            log.error("request %s ends: %s", seq.request.id, message)
            self._finish(seq, "error", error=message)

    def _fault_all(self, seam: str, error: Exception) -> None:
        message = self._told(self.labels[seam], error)
        for seq in [*self.running, *self.waiting]:
            self._fail(seq, message)

    def _model_step(self) -> str:
        return f"the model's step ({', '.join(self.labels[seam] for seam in STEP_SEAMS)})"

    def _told(self, label: str, error: Exception) -> str:
        if isinstance(error, PartFault) and label in str(error):
            return str(error)
        if not isinstance(error, PartFault):
            log.debug("%s raised", label, exc_info=error)
        what = str(error) if isinstance(error, PartFault) else f"raised {type(error).__name__}: {error}"
        return f"{label}: {what}"

    def _guarded(self, label: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            log.error("%s", self._told(label, error))

    # --- reading --------------------------------------------------------------------------------------------------

    def known(self, seq: SequenceView) -> Seq:
        """The engine's own sequence behind a view. PartFault: it is not one, or has ended."""
        if isinstance(seq, Seq) and seq.state is not State.ENDED:
            return seq
        raise PartFault(f"{self.labels['scheduler']} used a sequence that is not live: {seq!r}")

    def _find(self, id: str) -> Seq | None:
        return next((seq for seq in self._groups.get(id.rpartition("#")[0], ()) if seq.id == id), None)

    def live(self) -> Iterable[Seq]:
        """Every sequence that may hold pages."""
        for choices in self._groups.values():
            yield from choices

    def check(self) -> None:
        """Rule of conservation over all groups. PartFault names the page that is wrong."""
        self.memory.check(self.live())

    def _after_step(self, rows: list[Row]) -> None:
        self.counters.steps += 1
        self._last_step = {
            "batch_size": len(rows),
            "tokens": sum(row.n_tokens for row in rows),
            "generated": sum(len(event.tokens) for event in self._events),
            "running": len(self.running),
            "waiting": len(self.waiting),
        }
        self.observers.call("on_step", stats=self._last_step)

    def stats(self) -> dict[str, Any]:
        """Everything measured so far, as plain numbers. Times are seconds by seam, for all steps together."""
        c, d, cache, lookups = self.counters, self.drafting, self.memory.cache.stats, self.memory.lookups
        return {
            "running": len(self.running),
            "waiting": len(self.waiting) + sum(map(len, self._unforked.values())),
            "steps": c.steps,
            "requests": c.requests,
            "finished": dict(c.finished),
            "prompt_tokens": c.prompt_tokens,
            "computed_tokens": c.computed_tokens,
            "generated_tokens": c.generated_tokens,
            "cached_tokens": c.cached_tokens,
            "preemptions": c.preemptions,
            "swaps": c.swaps,
            "drafts": d.drafts,
            "drafted": [d.drafted[i] for i in range(len(d.drafted))],
            "accepted": [d.accepted[i] for i in range(len(d.drafted))],
            "last_step": dict(self._last_step),
            "scheduler": self._scheduler_counts(),
            "kv": self.memory.stats(self.live()),
            "prefix_cache": {
                "lookups": lookups.lookups,
                "lookup_tokens": lookups.lookup_tokens,
                "hit_tokens": lookups.hit_tokens,
                "inserted_pages": cache.inserted_pages,
                "evicted_pages": cache.evicted_pages,
                "pages": self.memory.cache.n_pages,
            },
            "seconds": dict(self.clock.seconds),
        }

    def _scheduler_counts(self) -> dict[str, float]:
        try:
            return {str(name): float(count) for name, count in self.scheduler.stats().items()}
        except Exception as error:
            log.error("%s", self._told(self.labels["scheduler"], error))
            return {}


class _Verbs:
    """The scheduler's view of memory (core.types.Memory)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def admit(self, seq: SequenceView) -> bool:
        return self._engine.admit(self._engine.known(seq))

    def reserve(self, seq: SequenceView, n_tokens: int) -> bool:
        return self._engine.reserve(self._engine.known(seq), n_tokens)

    def preempt(self, seq: SequenceView) -> None:
        self._engine.preempt(self._engine.known(seq))

    def cached_tokens(self, seq: SequenceView) -> int:
        return self._engine.memory.cached_tokens(self._engine.known(seq))


def _cut(draft: Draft, n_tokens: int) -> Draft:
    if n_tokens == len(draft.tokens):
        return draft
    return Draft(draft.tokens[:n_tokens], None if draft.probs is None else draft.probs[:n_tokens])

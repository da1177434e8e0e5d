"""Runs a study: blocks of arms in random order, until the effects are known well enough or the budget is spent.

What is run next depends only on the plan and on the ledger, so a study that was killed goes on where it was.
"""

from __future__ import annotations

import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from core.lab import analysis, quality
from core.lab.designs import Arm, Design
from core.lab.errors import BudgetError, LabError, TargetError
from core.lab.hosts import Host
from core.lab.ledger import Failure, Impossible, Ledger, Trial
from core.lab.loadgen import DeadlineReached
from core.lab.plan import StudyPlan
from core.lab.targets import OpenAITarget
from core.lab.trial import Outcome, run_trial

MOST_FAILURES = 2


class Lab(Protocol):
    """What a study needs of the world."""

    def start(self, arm: Arm) -> AbstractContextManager[Host]:
        """Starts an arm. TargetError when it does not come up."""
        ...

    def reasons(self, arm: Arm) -> list[str]:
        """Why the arm cannot work; empty when it can."""
        ...


class Screen:
    """Is told what goes on; this one shows nothing."""

    def block(self, number: int, runs: int) -> None: ...

    def trial(self, arm: str, workload: str, requests: int) -> None: ...

    def requests(self, ended: int) -> None: ...

    def estimate(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


Runner = Callable[..., Outcome]


class Study:
    """One study over one ledger."""

    def __init__(
        self,
        plan: StudyPlan,
        ledger: Ledger,
        lab: Lab,
        screen: Screen | None = None,
        run: Runner = run_trial,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan = plan
        self._ledger = ledger
        self._lab = lab
        self._screen = screen or Screen()
        self._run = run
        self._clock = clock
        self._began = clock()
        self._earlier = spent(ledger)

    def run(self) -> str:
        """Runs until there is a reason to stop, and says it. BudgetError when not even one block fits."""
        self._refuse_impossible_arms()
        for block in range(self.plan.blocks):
            wanted = self._wanted(block)
            if not wanted:
                return "every effect is known well enough"
            self._screen.block(block, sum(len(workloads) for _, workloads in wanted))
            if block and self._predicted(wanted, block) > self.left():
                return "the budget would not hold another block"
            try:
                for position, (arm, workloads) in enumerate(wanted):
                    self._run_arm(arm, workloads, block, position)
            except DeadlineReached:
                return self._out_of_budget(block, len(wanted))
            self._check_anything_works()
            self._screen.estimate(self._headline())
        return f"{self.plan.blocks} blocks were run"

    def left(self) -> float:
        """Seconds left of the budget; the time of earlier runs on this ledger counts."""
        return self.plan.budget_s - self._earlier - (self._clock() - self._began)

    def _refuse_impossible_arms(self) -> None:
        known = {e.arm for e in self._ledger.entries if isinstance(e, Impossible)}
        for arm in self.plan.design.arms:
            if arm.name not in known and (reasons := self._lab.reasons(arm)):
                self._ledger.append(Impossible(arm.name, arm.words, reasons))
                self._screen.warn(f"{arm.name} cannot work: {'; '.join(reasons)}")
        if not workable(self.plan.design, self._ledger).effects:
            raise LabError("no effect can be measured: see above why arms cannot work.")

    def _check_anything_works(self) -> None:
        failed = [e for e in self._ledger.entries if isinstance(e, Failure)]
        if failed and not self._ledger.trials:
            raise TargetError(f"no arm works; the last one failed so: {failed[-1].reason}")

    def _wanted(self, block: int) -> list[tuple[Arm, list[str]]]:
        """Arms of this block in their random order, each with its workloads in theirs."""
        design = workable(self.plan.design, self._ledger, block)
        before = {key: t for key, t in analysis.by_key(self._ledger.trials).items() if key[2] < block}
        open_arms: dict[str, list[str]] = {}
        for workload in self.plan.workloads:
            for effect in design.effects:
                if analysis.is_settled(effect, workload, self.plan.metric, before, self.plan.resolution):
                    continue
                for arm in effect.weights:
                    if workload not in open_arms.setdefault(arm, []):
                        open_arms[arm].append(workload)
        arms = [arm for arm in design.arms if open_arms.get(arm.name)]
        rng = np.random.default_rng([self.plan.seed, block])
        order = [arms[i] for i in rng.permutation(len(arms))]
        return [(arm, rng.permutation(sorted(open_arms[arm.name])).tolist()) for arm in order]

    def _run_arm(self, arm: Arm, workloads: list[str], block: int, position: int) -> None:
        done = analysis.by_key(self._ledger.trials)
        failed = {(e.arm, e.block) for e in self._ledger.entries if isinstance(e, Failure)}
        todo = [w for w in workloads if (arm.name, w, block) not in done]
        if not todo or (arm.name, block) in failed:
            return
        began = self._clock()
        if self.left() <= 0:
            raise DeadlineReached
        try:
            with self._lab.start(arm) as host:
                start_s = self._clock() - began
                for workload in todo:
                    self._run_workload(arm, host, workload, block, position, start_s)
                    start_s = 0.0
                self._take_quality(arm, host)
        except TargetError as error:
            self._ledger.append(Failure(arm.name, arm.words, block, str(error), self._clock() - began))
            self._screen.warn(f"{arm.name} failed in block {block + 1}: {error}")

    def _run_workload(self, arm: Arm, host: Host, workload: str, block: int, position: int, start_s: float) -> None:
        load = self.plan.loads[workload]
        self._screen.trial(arm.name, workload, sum(s.requests for s in load.sessions(block)))
        outcome = self._run(
            host,
            load,
            self.plan.seed + block,
            self.plan.targets,
            warmup=self.plan.warmup,
            deadline_s=max(0.0, self.left()),
            progress=self._screen.requests,
        )
        self._ledger.append(
            Trial(
                arm=arm.name,
                words=arm.words,
                workload=workload,
                block=block,
                position=position,
                at=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=outcome.seconds,
                start_s=start_s,
                summary=outcome.summary,
            )
        )

    def _take_quality(self, arm: Arm, host: Host) -> None:
        path = quality_path(self._ledger.path.parent, arm.name)
        if self.plan.quality is None or path.exists() or not isinstance(host.target, OpenAITarget):
            return
        try:
            answers = quality.take(host.target, self.plan.quality, self.left)
        except TargetError as error:
            self._screen.warn(f"{arm.name}: {error}")
            return
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.encode(answers))
        fresh.replace(path)

    def _predicted(self, wanted: list[tuple[Arm, list[str]]], block: int) -> float:
        """Seconds that what is left of this block will take, judged by the blocks before."""
        trials = self._ledger.trials
        done = {t.key for t in trials}
        seconds = 0.0
        for arm, workloads in wanted:
            todo = [w for w in workloads if (arm.name, w, block) not in done]
            same = [t for t in trials if t.arm == arm.name]
            starts = [t.start_s for t in same if t.start_s]
            seconds += float(np.mean(starts)) if todo and starts else 0.0
            for workload in todo:
                times = [t.seconds for t in same if t.workload == workload]
                seconds += float(np.mean(times)) if times else 0.0
        return seconds

    def _out_of_budget(self, block: int, arms: int) -> str:
        self._check_anything_works()
        if block:
            return "the budget was spent"
        done = len({t.arm for t in self._ledger.trials})
        estimate = f"about {self.plan.budget_s * arms / done:.0f} s would do" if done else "not one arm was through"
        raise BudgetError(
            f"a budget of {self.plan.budget_s:.0f} s is too short for one block of {arms} arms: {done} were measured, "
            f"{estimate}; what was measured is kept in {self._ledger.path}, and a larger budget goes on from there."
        )

    def _headline(self) -> str:
        """The effect that the study is about, so far."""
        found = analysis.results(
            workable(self.plan.design, self._ledger),
            list(self.plan.workloads),
            self.plan.metric,
            analysis.by_key(self._ledger.trials),
            self.plan.log_margin,
        )
        if not found:
            return ""
        best = max(found, key=lambda r: (r.effect.kind == "total", abs(r.estimate.mean)))
        return f"{best.effect.name} on {best.workload}: x{np.exp(best.estimate.mean):.2f}"


def spent(ledger: Ledger) -> float:
    """Seconds that earlier trials and failures of this ledger took."""
    trials = sum(t.seconds + t.start_s for t in ledger.trials)
    return trials + sum(e.seconds for e in ledger.entries if isinstance(e, Failure))


def failures(ledger: Ledger) -> bool:
    """Whether anything that should have worked did not: an arm, or a single request."""
    failed = any(t.summary.completed < t.summary.requests for t in ledger.trials)
    return failed or any(isinstance(e, Failure) for e in ledger.entries)


def missing(ledger: Ledger, before: int | None = None) -> Mapping[str, str]:
    """Arms that are given up, with the reason: impossible ones, and those that failed `MOST_FAILURES` times in
    blocks before `before`."""
    given_up = {e.arm: "; ".join(e.reasons) for e in ledger.entries if isinstance(e, Impossible)}
    failed = [e for e in ledger.entries if isinstance(e, Failure) and (before is None or e.block < before)]
    for arm, times in Counter(e.arm for e in failed).items():
        if times >= MOST_FAILURES:
            given_up[arm] = next(e.reason for e in reversed(failed) if e.arm == arm)
    return given_up


def workable(design: Design, ledger: Ledger, before: int | None = None) -> Design:
    """The design without the arms that are given up."""
    return design.without(missing(ledger, before).keys())


def quality_path(folder: Path, arm: str) -> Path:
    """Where the answers of an arm are kept beside the ledger."""
    plain = re.sub(r"[^\w.-]+", "_", arm).strip("_")
    return folder / "quality" / f"{plain}-{zlib.crc32(arm.encode()):08x}.json"

"""From a ledger's trials to effects with verdicts, and to the mean of each arm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.lab import statistics
from core.lab.designs import Design, Effect
from core.lab.ledger import Trial
from core.lab.statistics import Estimate, Verdict

Measured = Mapping[tuple[str, str, int], Trial]


@dataclass(frozen=True, slots=True)
class Result:
    """What one effect is on one workload in one metric."""

    effect: Effect
    workload: str
    metric: str
    estimate: Estimate
    adjusted_p: float
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ArmMean:
    """An arm's trials of one workload: geometric means of what is positive, plain means of the rest."""

    arm: str
    workload: str
    runs: int
    values: dict[str, float]
    requests: int
    failed: int
    seam_seconds: dict[str, float]


def by_key(trials: Sequence[Trial]) -> dict[tuple[str, str, int], Trial]:
    return {trial.key: trial for trial in trials}


def effect_values(effect: Effect, workload: str, metric: str, trials: Measured) -> list[float]:
    """The effect's value, on the log scale, in each block in which all its arms were measured."""
    blocks = sorted({block for _, name, block in trials if name == workload})
    values = []
    for block in blocks:
        rows = [(trials.get((arm, workload, block)), w) for arm, w in effect.weights.items()]
        numbers = [(t.summary.values.get(metric, math.nan), w) for t, w in rows if t is not None]
        if len(numbers) == len(rows) and all(x > 0 for x, _ in numbers):
            values.append(sum(w * math.log(x) for x, w in numbers))
    return values


def is_settled(effect: Effect, workload: str, metric: str, trials: Measured, resolution: float) -> bool:
    """Whether the stopping rule lets this effect rest; `resolution`: wanted half width on the log scale."""
    values = effect_values(effect, workload, metric, trials)
    return bool(statistics.stopping_block(np.asarray(values), resolution)) if values else False


def results(design: Design, workloads: Sequence[str], metric: str, trials: Measured, margin: float) -> list[Result]:
    """All effects of one metric: one family for the adjustment of p. `margin` on the log scale.

    Effects that were never measured whole are left out.
    """
    found = []
    for workload in workloads:
        for effect in design.effects:
            values = effect_values(effect, workload, metric, trials)
            if values:
                found.append((effect, workload, statistics.estimate(values)))
    if not found:
        return []
    adjusted = statistics.adjusted([e.p for _, _, e in found])
    return [
        Result(effect, workload, metric, e, float(p), statistics.verdict(e, float(p), margin))
        for (effect, workload, e), p in zip(found, adjusted, strict=True)
    ]


def arm_means(trials: Sequence[Trial]) -> list[ArmMean]:
    """One row for each arm and workload, in the order in which they first ran."""
    groups: dict[tuple[str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        groups[(trial.arm, trial.workload)].append(trial)
    return [_arm_mean(arm, workload, group) for (arm, workload), group in groups.items()]


def _arm_mean(arm: str, workload: str, group: Sequence[Trial]) -> ArmMean:
    samples: dict[str, list[float]] = defaultdict(list)
    seams: dict[str, float] = defaultdict(float)
    for trial in group:
        for name, value in trial.summary.values.items():
            samples[name].append(value)
        for name, seconds in trial.summary.seam_seconds.items():
            seams[name] += seconds / len(group)
    return ArmMean(
        arm=arm,
        workload=workload,
        runs=len(group),
        values={name: _mean(values) for name, values in samples.items()},
        requests=sum(t.summary.requests for t in group),
        failed=sum(t.summary.requests - t.summary.completed for t in group),
        seam_seconds=dict(seams),
    )


def _mean(values: Sequence[float]) -> float:
    if min(values) > 0:
        return math.exp(sum(map(math.log, values)) / len(values))
    return sum(values) / len(values)

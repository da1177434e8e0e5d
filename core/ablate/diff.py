"""Two studies side by side: which effects changed, and what else did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from core.lab import analysis, environment, plan, statistics
from core.lab.analysis import Result
from core.lab.errors import UsageError
from core.lab.findings import change, interval
from core.lab.ledger import Trial, read
from core.lab.plan import StudyPlan

Found = dict[tuple[str, str], Result]


def show(folders: Sequence[Path], console: Console) -> int:
    """Prints how each effect that two studies share differs between them (Welch's t, p adjusted for their number)."""
    if len(folders) != 2:
        raise UsageError(f"diff takes two folders of studies, diff=A,B; given: {len(folders)}.")
    (plan_a, env_a), (plan_b, env_b) = (plan.read_lock(folder / "lock.yaml") for folder in folders)
    if plan_a.metric != plan_b.metric:
        raise UsageError(f"the studies measure different things: {plan_a.metric} and {plan_b.metric}.")
    a, b = _results(plan_a, folders[0]), _results(plan_b, folders[1])
    shared = [key for key in a if key in b]
    if not shared:
        raise UsageError(f"{folders[0]} and {folders[1]} share no effect on the same workload.")
    for name, folder in zip("AB", folders, strict=True):
        console.print(f"{name}: {folder}", markup=False, soft_wrap=True)
    console.print(_table(a, b, shared, ["A", "B"]))
    for key in sorted(a.keys() ^ b.keys()):
        console.print(f"only in {folders[0] if key in a else folders[1]}: {key[0]} on {key[1]}", markup=False)
    for line in environment.differences(env_a, env_b):
        console.print(f"environment: {line}", markup=False)
    return 0


def _results(made: StudyPlan, folder: Path) -> Found:
    trials = [entry for entry in read(folder / "ledger.jsonl") if isinstance(entry, Trial)]
    ran = {trial.arm for trial in trials}
    design = made.design.without({arm.name for arm in made.design.arms} - ran)
    measured = analysis.by_key(trials)
    found = analysis.results(design, list(made.workloads), made.metric, measured, made.log_margin)
    return {(r.effect.name, r.workload): r for r in found}


def _table(a: Found, b: Found, shared: Sequence[tuple[str, str]], titles: Sequence[str]) -> Table:
    differences = [statistics.compare(a[key].estimate, b[key].estimate) for key in shared]
    known = [1.0 if math.isnan(d.p) else d.p for d in differences]
    adjusted = statistics.adjusted(known)
    heads = [Column(title, no_wrap=True) for title in (*titles, "change (p)")]
    table = Table(Column("effect", overflow="fold", min_width=16), *heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for key, difference, p in zip(shared, differences, adjusted, strict=True):
        ends = [f"{change(r.estimate.mean)}\n({interval(r.estimate)})" for r in (a[key], b[key])]
        said = "changed" if p <= 1 - statistics.LEVEL else "no change seen"
        table.add_row(f"{key[0]}\non {key[1]}", *ends, f"{change(difference.change)} ({p:.2g})\n{said}")
    return table

"""From a study's folder to report.html and report.md. Reads the ledger only, so it can be made again any time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from core.lab import analysis, charts, cost, findings, quality, statistics
from core.lab.analysis import ArmMean, Result
from core.lab.designs import AGAIN, Design, Effect
from core.lab.ledger import Entry, Failure, Header, Ledger, Trial
from core.lab.metrics import METRICS, metric
from core.lab.plan import StudyPlan
from core.lab.quality import Answers, Quality
from core.lab.study import missing, quality_path, workable

SECONDARY = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "e2e_p50_ms",
             "goodput_per_s", "memory_bytes_peak", "kv_bytes_peak")  # fmt: skip
COLUMNS = ("requests_per_s", "output_tokens_per_s", "goodput_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms",
           "itl_p99_ms", "tpot_p50_ms", "e2e_p50_ms", "memory_bytes_peak", "kv_bytes_peak", "prefix_hit_rate",
           "acceptance", "preemptions", "energy_j")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One arm on one workload, as the arm table shows it."""

    mean: ArmMean
    cells: list[str]
    loss: str
    usd_per_million: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """All that the templates show."""

    plan: StudyPlan
    environment: dict[str, Any]
    started: str
    ended: str
    findings: list[str]
    headline: list[tuple[str, str, str]]
    noise: list[str]
    warnings: list[str]
    results: list[Result]
    secondary: dict[str, list[Result]]
    columns: list[str]
    rows: dict[str, list[Row]]
    seams: dict[str, list[ArmMean]]
    losses: dict[str, Quality]
    given_up: Mapping[str, str]
    notes: Sequence[str]
    blocks: int
    trials: int
    fused: list[str]
    pictures: dict[str, str]


def build(plan: StudyPlan, ledger: Ledger) -> Report:
    """Everything there is to say about a ledger."""
    trials = ledger.trials
    design = workable(plan.design, ledger)
    measured = analysis.by_key(trials)
    names = list(plan.workloads)
    results = analysis.results(design, names, plan.metric, measured, plan.log_margin)
    secondary = {
        name: found
        for name in SECONDARY
        if name != plan.metric and (found := analysis.results(design, names, name, measured, plan.log_margin))
    }
    answers = _answers(ledger.path.parent, plan.design)
    order = {arm.name: i for i, arm in enumerate(plan.design.arms)}
    means = sorted(analysis.arm_means(trials), key=lambda m: order.get(m.arm, len(order)))
    losses = _effect_losses(design, answers)
    arm_losses = _arm_losses(plan.design, answers)
    columns = [c for c in COLUMNS if any(c in m.values for m in means)]
    headers = [e for e in ledger.entries if isinstance(e, Header)]
    return Report(
        plan=plan,
        environment=headers[-1].environment if headers else {},
        started=_moment(trials[0].at) if trials else "",
        ended=_moment(trials[-1].at) if trials else "",
        findings=findings.findings(results, losses),
        headline=_headline(results),
        noise=findings.noise_floor(results),
        warnings=_warnings(plan, trials, ledger.entries, losses),
        results=results,
        secondary=secondary,
        columns=columns,
        rows={w: [_row(plan, m, columns, arm_losses) for m in means if m.workload == w] for w in names},
        seams={w: [m for m in means if m.workload == w and m.seam_seconds] for w in names},
        losses=arm_losses,
        given_up=missing(ledger),
        notes=design.notes,
        blocks=len({t.block for t in trials}),
        trials=len(trials),
        fused=list(dict.fromkeys(m.arm for m in means if m.seam_seconds and "attention.kernel" not in m.seam_seconds)),
        pictures=_pictures(plan, design, results, measured, means, arm_losses),
    )


def _moment(iso: str) -> str:
    return datetime.fromisoformat(iso).strftime("%Y-%m-%d %H:%M UTC")


def _answers(folder: Path, design: Design) -> dict[str, Answers]:
    found = {}
    for arm in design.arms:
        path = quality_path(folder, arm.name)
        if path.exists():
            found[arm.name] = msgspec.json.decode(path.read_bytes(), type=Answers)
    return found


def _arm_losses(design: Design, answers: Mapping[str, Answers]) -> dict[str, Quality]:
    reference = answers.get(design.reference)
    if reference is None:
        return {}
    return {name: quality.compare(mine, reference) for name, mine in answers.items()}


def _effect_losses(design: Design, answers: Mapping[str, Answers]) -> dict[str, Quality]:
    """What each effect's part changes: the arm with it against the arm without it."""
    losses = {}
    for effect in design.effects:
        pair = _with_and_without(effect, design)
        if pair and pair[0] in answers and pair[1] in answers:
            losses[effect.name] = quality.compare(answers[pair[0]], answers[pair[1]])
    return losses


def _with_and_without(effect: Effect, design: Design) -> tuple[str, str] | None:
    if len(effect.weights) == 2:
        above, below = sorted(effect.weights, key=lambda arm: effect.weights[arm], reverse=True)
        return above, below
    if effect.kind != "main":
        return None
    part = design.parts.index(effect.name)
    by_levels = {levels: arm for arm, levels in design.levels.items()}
    for levels, arm in by_levels.items():
        other = (*levels[:part], -1, *levels[part + 1 :])
        if levels[part] > 0 and other in by_levels:
            return arm, by_levels[other]
    return None


def _headline(results: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Figure, what it is of, and its interval, for each workload: the total, or else the largest real effect."""
    found = []
    for workload in dict.fromkeys(r.workload for r in results):
        here = [r for r in results if r.workload == workload and r.effect.kind != "noise"]
        if here:
            best = max(here, key=lambda r: (r.effect.kind == "total", r.verdict.kind == "real", abs(r.estimate.mean)))
            e = best.estimate
            text = f"{best.effect.name}, {metric(best.metric).label} on {workload}"
            figure = {"real": findings.change(e.mean), "none": "no effect", "undecided": "undecided"}[best.verdict.kind]
            found.append((figure, text, findings.interval(e)))
    return found


def _warnings(
    plan: StudyPlan, trials: Sequence[Trial], entries: Sequence[Entry], losses: Mapping[str, Quality]
) -> list[str]:
    found = []
    failed = sum(t.summary.requests - t.summary.completed for t in trials)
    if failed:
        found.append(f"{failed} of {sum(t.summary.requests for t in trials)} requests failed; see the arm tables.")
    found += [f"{e.arm} failed in block {e.block + 1}: {e.reason}" for e in entries if isinstance(e, Failure)]
    late = [t for t in trials if t.summary.lag_p99_ms > max(5.0, 0.05 * t.summary.values.get("e2e_p50_ms", 0.0))]
    if late:
        worst = max(t.summary.lag_p99_ms for t in late)
        found.append(
            f"in {len(late)} of {len(trials)} runs the load generator was late by up to {worst:.0f} ms (p99): "
            "latencies of those runs are too good."
        )
    for name in plan.lossless:
        if name in losses and not losses[name].lossless:
            found.append(f"{name} says that it is lossless, but it {findings.loss(losses[name])}.")
    return found


def _row(plan: StudyPlan, mean: ArmMean, columns: Sequence[str], losses: Mapping[str, Quality]) -> Row:
    rate = mean.values.get("output_tokens_per_s")
    return Row(
        mean=mean,
        cells=[findings.number(name, mean.values.get(name)) for name in columns],
        loss=findings.loss(losses[mean.arm]) if mean.arm in losses else "",
        usd_per_million=cost.per_million(plan.price, rate) if plan.price and rate else None,
    )


def _pictures(
    plan: StudyPlan,
    design: Design,
    results: Sequence[Result],
    measured: analysis.Measured,
    means: Sequence[ArmMean],
    losses: Mapping[str, Quality],
) -> dict[str, str]:
    pictures: dict[str, str] = {}
    if not results:
        return pictures
    label = metric(plan.metric).label
    if design.name == "ladder" and (rungs := _rungs(plan, design, measured, losses)):
        pictures["ladder"] = charts.ladder(rungs, label)
    parts = [r for r in results if r.effect.kind != "total"]
    if parts:
        pictures["forest"] = charts.forest(parts, plan.log_margin, label)
    if any(r.effect.kind == "interaction" for r in results):
        pictures["interactions"] = charts.interactions(results, design.parts)
    rates = _points(plan, means, lambda m: m.values.get("itl_p50_ms"), lambda m: m.values.get("output_tokens_per_s"))
    if rates:
        pictures["pareto"] = charts.pareto(rates)
    if any(not q.lossless for q in losses.values()):
        lost = _points(
            plan,
            means,
            lambda m: _mib(m.values.get("memory_bytes_peak")),
            lambda m: losses[m.arm].kl if m.arm in losses else None,
        )
        if lost:
            pictures["quality"] = charts.quality_bytes(lost)
    return pictures


def _mib(value: float | None) -> float | None:
    return None if value is None else value / 2**20


def _points(plan: StudyPlan, means: Sequence[ArmMean], x: Any, y: Any) -> dict[str, list[charts.Point]]:
    found = {
        workload: [
            charts.Point(m.arm, x(m), y(m))
            for m in means
            if m.workload == workload and not m.arm.endswith(AGAIN) and x(m) is not None and y(m) is not None
        ]
        for workload in plan.workloads
    }
    return {workload: points for workload, points in found.items() if points}


def _rungs(
    plan: StudyPlan, design: Design, measured: analysis.Measured, losses: Mapping[str, Quality]
) -> list[charts.Rung]:
    rungs = []
    for workload in plan.workloads:
        for arm in design.arms:
            if arm.name.endswith(AGAIN):
                continue
            over = Effect(arm.name, "total", {arm.name: 1.0, design.reference: -1.0})
            if arm.name == design.reference:
                estimate = statistics.Estimate(0.0, 0.0, 0.0, 1.0, 0.0, 0)
            elif values := analysis.effect_values(over, workload, plan.metric, measured):
                estimate = statistics.estimate(values)
            else:
                continue
            lossy = arm.name in losses and not losses[arm.name].lossless
            slot = design.slots.get(arm.name.removeprefix("+ "))
            name = f"{arm.name} ({slot.rpartition('.')[2]})" if slot else arm.name
            rungs.append(charts.Rung(name, workload, estimate, lossy))
    return rungs


def _themed(svg: str) -> Markup:
    """A picture that takes the page's colours."""
    for colour, name in ((charts.INK, "--ink"), (charts.FAINT, "--line"), (charts.PAPER, "--paper")):
        svg = svg.replace(colour, f"var({name})")
    return Markup(svg)


def render(report: Report, template: str) -> str:
    """`report.html` or `report.md` as text."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=template.endswith(".html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "change": findings.change,
        "interval": findings.interval,
        "themed": _themed,
        "finite": math.isfinite,
        "number": findings.number,
        "loss": findings.loss,
    }
    return environment.get_template(f"{template}.jinja").render(report=report, metrics=METRICS)


def write(plan: StudyPlan, ledger: Ledger) -> Path:
    """Writes report.html, report.md and the pictures of the latter beside the ledger; the HTML's path."""
    folder = ledger.path.parent
    report = build(plan, ledger)
    pictures = folder / "charts"
    pictures.mkdir(exist_ok=True)
    for name, svg in report.pictures.items():
        paper = f'<rect width="100%" height="100%" fill="{charts.PAPER}"/>'
        start = svg.index(">", svg.index("<svg")) + 1
        (pictures / f"{name}.svg").write_text(svg[:start] + paper + svg[start:], encoding="utf-8")
    (folder / "report.md").write_text(render(report, "report.md"), encoding="utf-8")
    (folder / "report.html").write_text(render(report, "report.html"), encoding="utf-8")
    return folder / "report.html"

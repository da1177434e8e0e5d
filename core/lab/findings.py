"""A study in plain language."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from core.lab.analysis import Result
from core.lab.metrics import metric
from core.lab.quality import Quality
from core.lab.statistics import Estimate

TIMES = 2.0
"""From this ratio on an effect is told as times, below it in percent."""


def change(log_ratio: float) -> str:
    """`+38 %`, `-12 %`, `5.2 times`."""
    ratio = math.exp(log_ratio)
    if ratio >= TIMES:
        return f"{_short(ratio)} times"
    return f"{_percent(log_ratio)} %"


def interval(e: Estimate) -> str:
    """`31 to 44 %`, `4.9 to 5.6 times`: the interval in the unit in which its effect is told."""
    if not (math.isfinite(e.low) and math.isfinite(e.high)):
        return "one run, no interval yet"
    if math.exp(e.mean) >= TIMES:
        return f"{_short(math.exp(e.low))} to {_short(math.exp(e.high))} times"
    bounds = f"{_percent(e.low)} to {_percent(e.high)} %"
    return bounds.replace("+", "") if e.low > 0 else bounds


def _percent(log_ratio: float) -> str:
    percent = math.expm1(log_ratio) * 100
    text = f"{percent:+.0f}" if abs(percent) >= 10 else f"{percent:+.1f}"
    return "0" if text in ("+0.0", "-0.0") else text.replace("-", "\N{MINUS SIGN}")


def _short(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 20 else f"{ratio:.1f}"


def number(name: str, value: float | None) -> str:
    """A metric's value as a table shows it."""
    if value is None:
        return "–"
    if metric(name).unit == "B":
        return f"{value / 2**20:,.0f} MiB"
    if name in ("prefix_hit_rate", "acceptance"):
        return f"{value * 100:.0f} %"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def on_workload(result: Result) -> str:
    """What one effect is on one workload: a phrase without the effect's name."""
    e, v = result.estimate, result.verdict
    where = f"on {result.workload}"
    if v.kind == "real":
        of = "the " if math.exp(e.mean) >= TIMES else ""
        return f"{change(e.mean)} {of}{metric(result.metric).label} {where} ({interval(e)})"
    if v.kind == "none":
        return f"no effect {where} (below {(v.excluded or 0) * 100:.1f} %)"
    more = f", about {v.runs_needed} blocks would decide" if v.runs_needed else ""
    return f"undecided {where} ({interval(e)}{more})"


def loss(quality: Quality) -> str:
    """What is lost, in a phrase; says so when it is nothing."""
    if quality.lossless:
        return "loses nothing"
    return (
        f"changes {(1 - quality.agreement) * 100:.1f} % of greedy tokens, KL {quality.kl:.2g}, "
        f"perplexity {(quality.perplexity_ratio - 1) * 100:+.1f} %"
    )


def findings(results: Sequence[Result], losses: Mapping[str, Quality]) -> list[str]:
    """One sentence for each effect, the largest first; `losses` by effect name, put beside every lossy one."""
    names = dict.fromkeys(r.effect.name for r in results if r.effect.kind != "noise")
    grouped = {name: [r for r in results if r.effect.name == name] for name in names}
    ordered = sorted(grouped.values(), key=_importance, reverse=True)
    return [_sentence(group, losses.get(group[0].effect.name)) for group in ordered]


def _importance(group: Sequence[Result]) -> tuple[bool, float]:
    return group[0].effect.kind == "total", max(abs(r.estimate.mean) for r in group)


def _sentence(group: Sequence[Result], lost: Quality | None) -> str:
    rank = {"real": 0, "none": 1, "undecided": 2}
    ordered = sorted(group, key=lambda r: (rank[r.verdict.kind], -abs(r.estimate.mean)))
    parts = [_interaction(r) if r.effect.kind == "interaction" else on_workload(r) for r in ordered]
    if lost is not None and not lost.lossless:
        parts.append(loss(lost))
    return f"{group[0].effect.name}: {'; '.join(parts)}."


def _interaction(result: Result) -> str:
    text = on_workload(result)
    if result.verdict.kind != "real":
        return text.replace("no effect", "no interaction")
    more = "more" if result.estimate.mean > 0 else "less"
    size = abs(math.expm1(result.estimate.mean)) * 100
    e = result.estimate
    return (
        f"together {size:.0f} % {more} {metric(result.metric).label} than their separate gains make "
        f"on {result.workload} ({interval(e)})"
    )


def noise_floor(results: Sequence[Result]) -> list[str]:
    """What the A/A arms say about the machine."""
    lines = []
    for r in results:
        if r.effect.kind != "noise":
            continue
        e = r.estimate
        text = f"{r.workload}: one arm against itself came out at {change(e.mean)} ({interval(e)})"
        if r.verdict.kind == "real":
            text += (
                ". That should be nothing: something on this machine favours one position or drifts, so effects "
                "of this size cannot be trusted"
            )
        lines.append(text + ".")
    return lines

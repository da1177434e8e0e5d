"""The pictures of a report, as SVG text. Colours are chosen to work on light and dark paper; `INK`, `FAINT` and
`PAPER` are replaced by the page's own."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from core.lab.analysis import Result
from core.lab.findings import change
from core.lab.metrics import metric
from core.lab.statistics import Estimate

INK, FAINT, PAPER = "#1d2433", "#c9ced8", "#fdfdfc"
SERIES = ("#0d8a7c", "#5b5bd6", "#c4681a", "#c03a6b", "#2f7fc1", "#7a8b1f", "#8a5cc9", "#71717a")
BETTER, WORSE, QUIET = "#0d8a7c", "#c03a5b", "#8b93a3"
COLUMNS = 3
MOST_NAMES = 9
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "svg.hashsalt": "partwise",
}
_RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 0.95, 1, 1.05, 1.1, 1.25, 1.5, 2, 3, 5, 10, 20, 50, 100)


@dataclass(frozen=True, slots=True)
class Rung:
    """One arm of a ladder on one workload, against the lowest one."""

    name: str
    workload: str
    over_baseline: Estimate
    lossy: bool


@dataclass(frozen=True, slots=True)
class Point:
    name: str
    x: float
    y: float


def ladder(rungs: Sequence[Rung], label: str) -> str:
    """Cumulative gain, one panel a workload; the darker end of each bar is what its own part added."""
    workloads = list(dict.fromkeys(r.workload for r in rungs))
    names = list(dict.fromkeys(r.name for r in rungs))
    with matplotlib.rc_context(_STYLE):
        figure, panels = _panels(len(workloads), height=0.42 * len(names) + 1.1)
        for i, (axes, workload) in enumerate(zip(panels, workloads, strict=True)):
            _ladder_panel(axes, [r for r in rungs if r.workload == workload], names, SERIES[i % len(SERIES)])
            axes.set_title(workload)
            axes.set_xlabel(f"{label}, times baseline")
        _name_rows_once(panels)
        return _svg(figure)


def _ladder_panel(axes: Axes, rungs: Sequence[Rung], names: Sequence[str], colour: str) -> None:
    before = 1.0
    most = max(math.exp(_finite(r.over_baseline.high, r.over_baseline.mean)) for r in rungs)
    for rung in rungs:
        y, e = names.index(rung.name), rung.over_baseline
        ratio = math.exp(e.mean)
        axes.barh(y, min(before, ratio), color=colour, alpha=0.32, height=0.62, linewidth=0)
        axes.barh(y, ratio - before, left=before, height=0.62, linewidth=0, color=colour if ratio > before else WORSE)
        low, high = math.exp(_finite(e.low, e.mean)), math.exp(_finite(e.high, e.mean))
        axes.plot([low, high], [y, y], color=INK, linewidth=1.2, solid_capstyle="butt")
        axes.text(max(high, ratio) + most * 0.02, y, f"×{ratio:.2f}{' *' if rung.lossy else ''}", va="center")
        before = ratio
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, most * 1.22)
    axes.axvline(1.0, color=FAINT, linewidth=1, zorder=0)
    axes.tick_params(length=0)


def forest(results: Sequence[Result], margin: float, label: str) -> str:
    """Every effect with its interval, one panel a workload; the band is the margin within which nothing matters.

    Filled: real. Hollow: none. Grey: undecided.
    """
    workloads = list(dict.fromkeys(r.workload for r in results))
    names = list(dict.fromkeys(r.effect.name for r in results))
    bounds = [b for r in results for b in (r.estimate.low, r.estimate.high, r.estimate.mean) if math.isfinite(b)]
    limits = (min(*bounds, -2 * margin), max(*bounds, 2 * margin))
    with matplotlib.rc_context(_STYLE):
        figure, panels = _panels(len(workloads), height=0.36 * len(names) + 1.1)
        for axes, workload in zip(panels, workloads, strict=True):
            axes.axvspan(-margin, margin, color=QUIET, alpha=0.18, linewidth=0)
            axes.axvline(0, color=FAINT, linewidth=1)
            for result in results:
                if result.workload == workload:
                    _forest_row(axes, result, names.index(result.effect.name))
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.4, -0.6)
            _ratio_axis(axes, limits)
            axes.set_title(workload)
            axes.set_xlabel(f"change of {label}")
        _name_rows_once(panels)
        return _svg(figure)


def _forest_row(axes: Axes, result: Result, y: int) -> None:
    e, kind = result.estimate, result.verdict.kind
    good = (e.mean > 0) == metric(result.metric).higher_is_better
    colour = (BETTER if good else WORSE) if kind == "real" else QUIET
    low, high = _finite(e.low, e.mean), _finite(e.high, e.mean)
    axes.plot([low, high], [y, y], color=colour, linewidth=2.4 if kind == "real" else 1.4, solid_capstyle="butt")
    face = PAPER if kind == "none" else colour
    axes.plot([e.mean], [y], "o", markersize=6.5, markerfacecolor=face, markeredgecolor=colour, markeredgewidth=1.4)


def _ratio_axis(axes: Axes, limits: tuple[float, float]) -> None:
    pad = (limits[1] - limits[0]) * 0.06
    low, high = limits[0] - pad, limits[1] + pad
    inside = [math.log(r) for r in _RATIOS if low <= math.log(r) <= high]
    apart = (high - low) / 6
    ticks: list[float] = [0.0]
    for tick in sorted(inside, key=abs):
        if all(abs(tick - other) >= apart for other in ticks):
            ticks.append(tick)
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
    axes.tick_params(length=0)


def _tick(x: float) -> str:
    if x == 0:
        return "0"
    return f"×{math.exp(x):.0f}" if math.exp(x) >= 1.95 else change(x)


def interactions(results: Sequence[Result], parts: Sequence[str]) -> str:
    """Main effects on the diagonal, pairwise interactions below; what is not real is faint."""
    workloads = list(dict.fromkeys(r.workload for r in results))
    reach = max((abs(r.estimate.mean) for r in results if r.effect.kind in ("main", "interaction")), default=0.1)
    colours = LinearSegmentedColormap.from_list("effects", [WORSE, "#f2f1ee", BETTER])
    with matplotlib.rc_context(_STYLE):
        figure, panels = _panels(len(workloads), height=0.62 * len(parts) + 1.2, width=0.95 * len(parts) + 1.6)
        for axes, workload in zip(panels, workloads, strict=True):
            cells = {r.effect.name: r for r in results if r.workload == workload}
            grid = np.full((len(parts), len(parts)), np.nan)
            for i, row in enumerate(parts):
                for j, column in enumerate(parts[: i + 1]):
                    result = cells.get(row if i == j else f"{column} x {row}")
                    if result is not None:
                        grid[i, j] = result.estimate.mean
                        weight, alpha = ("bold", 1.0) if result.verdict.kind == "real" else ("normal", 0.55)
                        text = change(result.estimate.mean)
                        axes.text(j, i, text, ha="center", va="center", color="#1b2030", fontweight=weight, alpha=alpha)
            axes.imshow(grid, cmap=colours, norm=TwoSlopeNorm(0.0, -reach, reach), aspect="auto")
            axes.set_xticks(range(len(parts)), parts, rotation=25, ha="right")
            axes.set_yticks(range(len(parts)), parts)
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            axes.set_title(workload)
        return _svg(figure)


def pareto(points: Mapping[str, Sequence[Point]]) -> str:
    """Output tokens a second against ITL, by workload; the line joins what no other arm beats in both."""
    with matplotlib.rc_context(_STYLE):
        figure, panels = _panels(len(points), height=3.4)
        for i, (axes, (workload, arms)) in enumerate(zip(panels, points.items(), strict=True)):
            front = frontier(arms)
            axes.step([p.x for p in front], [p.y for p in front], where="post", color=FAINT, linewidth=1.6, zorder=1)
            _scatter(axes, arms, SERIES[i % len(SERIES)], {p.name for p in front})
            axes.set_title(workload)
            axes.set_xlabel("ITL p50, ms (less is better)")
            axes.set_ylabel("output tokens a second")
        return _svg(figure)


def frontier(arms: Sequence[Point]) -> list[Point]:
    """Points that no other beats in both: less x, more y; by rising x."""
    best: list[Point] = []
    for point in sorted(arms, key=lambda p: (p.x, -p.y)):
        if not best or point.y > best[-1].y:
            best.append(point)
    return best


def quality_bytes(points: Mapping[str, Sequence[Point]]) -> str:
    """What is lost against the bytes that the process holds."""
    with matplotlib.rc_context(_STYLE):
        figure, panels = _panels(len(points), height=3.2)
        for i, (axes, (workload, arms)) in enumerate(zip(panels, points.items(), strict=True)):
            _scatter(axes, arms, SERIES[i % len(SERIES)], {p.name for p in arms})
            axes.set_title(workload)
            axes.set_xlabel("resident memory, MiB")
            axes.set_ylabel("KL from the reference, nats")
            axes.set_ylim(bottom=0)
        return _svg(figure)


def _scatter(axes: Axes, arms: Sequence[Point], colour: str, strong: set[str]) -> None:
    for p in arms:
        axes.plot([p.x], [p.y], "o", color=colour, alpha=1.0 if p.name in strong else 0.4, markersize=7)
    xs, ys = [p.x for p in arms], [p.y for p in arms]
    width = (max(xs) - min(xs)) or abs(max(xs)) or 1.0
    height = (max(ys) - min(ys)) or abs(max(ys)) or 1.0
    axes.set_xlim(min(xs) - 0.08 * width, max(xs) + 0.55 * width)
    axes.set_ylim(min(ys) - 0.12 * height, max(ys) + 0.15 * height)
    step, last = 0.085 * height, -math.inf
    named = arms if len(arms) <= MOST_NAMES else [p for p in arms if p.name in strong or p == arms[0]]
    for group in sorted(_together(named, width, height), key=lambda g: g[0].y):
        p = group[0]
        last = max(p.y, last + step)
        more = f" and {len(group) - 2} more" if len(group) > 2 else ""
        axes.annotate(
            ", ".join(q.name for q in group[:2]) + more,
            (p.x, p.y),
            (p.x + 0.045 * width, last),
            va="center",
            fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3},
        )
    axes.grid(color=FAINT, linewidth=0.4, alpha=0.6)
    axes.tick_params(length=0)


def _together(arms: Sequence[Point], width: float, height: float) -> list[list[Point]]:
    """Points that lie on top of one another share a label."""
    groups: list[list[Point]] = []
    for p in arms:
        for group in groups:
            if abs(group[0].x - p.x) < 0.02 * width and abs(group[0].y - p.y) < 0.02 * height:
                group.append(p)
                break
        else:
            groups.append([p])
    return groups


def _name_rows_once(panels: Sequence[Axes]) -> None:
    for i, axes in enumerate(panels):
        if i % COLUMNS:
            axes.set_yticklabels([])


def _finite(value: float, otherwise: float) -> float:
    return value if math.isfinite(value) else otherwise


def _panels(n: int, height: float, width: float = 4.6) -> tuple[Figure, list[Any]]:
    columns = min(n, COLUMNS)
    rows = math.ceil(n / columns)
    figure = Figure(figsize=(max(width, 3.4) * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    cells = [axes for row in grid for axes in row]
    for unused in cells[n:]:
        unused.set_visible(False)
    return figure, cells[:n]


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]

"""Pictures of a plan: the roofline, users against context, and cost against time between tokens."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core.plan.errors import PlanError
from core.plan.latency import Roofline
from core.plan.memory import Budget
from core.plan.plan import HOUR, Plan, Ranked, Server
from core.plan.report import decode_name, ranking_table, summary, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEMPLATE = Path(__file__).parent / "report.html.jinja"


def roofline(plan: Plan) -> Figure:
    """Reachable operations a second against operations a byte, with the prefill and decode steps."""
    figure, axes = _axes("operations a byte", "Tops/s")
    e, device = plan.efficiency, plan.device
    slope = device.bandwidth.value * e.bandwidth.value
    roof = plan.ridge * slope
    grid = [plan.ridge * 2**n for n in range(-8, 5)]
    axes.plot(
        grid, [min(slope * x, roof) / 1e12 for x in grid], color="black", label=f"{device.name}, reachable"
    )
    for name, step in ((decode_name(plan), plan.decode), ("prefill of one prompt", plan.prefill)):
        operations = step.linear_operations + step.attention_operations
        rate = operations / step.seconds / 1e12
        axes.plot([step.intensity], [rate], "o", label=f"{name}: {step.bound}")
    return _finish(figure, axes, f"Roofline of {plan.model.name} on {device.name}")


def users_by_context(plan: Plan) -> Figure:
    """How many users fit at each context, for KV formats and attention structures."""
    figure, axes = _axes("context, tokens", "users")
    limit = plan.model.shape.max_context
    contexts = [2**n for n in range(7, 21) if 2**n <= limit]
    kv_variants = [("native", kv) for kv in dict.fromkeys((plan.recipe.kv, "bf16", "fp8", "int4"))]
    structures = [(s, plan.recipe.kv) for s in ("mha", "mqa", "mla")]
    for structure, kv in kv_variants + structures:
        changes = {"structure": structure, "kv": kv, "prefix_share": 0.0}
        recipe = plan.recipe.model_copy(update=changes)
        try:
            budget = Budget(plan.model, plan.device, recipe)
        except PlanError:
            continue
        users = [budget.users_at(n) for n in contexts]
        style = "-" if structure == "native" else "--"
        shown = [(n, u) for n, u in zip(contexts, users, strict=True) if u]
        if shown:
            axes.plot(*zip(*shown, strict=True), style, marker=".", label=f"{structure}, KV {kv}")
    return _finish(figure, axes, f"Users of {plan.model.name} on {plan.device.name}")


def cost_by_itl(plans: Sequence[Plan]) -> Figure:
    """Cost of a million tokens against the time between tokens, over the batch."""
    figure, axes = _axes("time between tokens, ms", "USD per million tokens")
    for plan in plans:
        price = plan.cost.price if plan.cost else plan.device.price()
        server = Server(Roofline(plan.model, plan.device, plan.recipe, plan.efficiency))
        if price is None or server.users < plan.recipe.min_batch:
            continue
        sizes = server.candidates(server.users)
        tokens = plan.recipe.prompt + plan.recipe.output
        per_hour = price.usd_per_hour * plan.recipe.tp / HOUR * 1e6 / tokens / plan.recipe.utilization
        points = [(server.itl(n) * 1e3, per_hour / server.rate(n)) for n in sizes]
        (line,) = axes.plot(*zip(*points, strict=True), marker=".", label=plan.device.name)
        if plan.serving is not None and plan.cost is not None:
            at = ([plan.serving.itl_seconds * 1e3], [plan.cost.blended_per_million])
            axes.plot(*at, "*", markersize=14, color=line.get_color())
    return _finish(figure, axes, "Cost against speed (star: the planned batch)")


def write_report(directory: Path, plans: Sequence[Plan], ranking: Sequence[Ranked]) -> list[Path]:
    """Write a self-contained report.html and a PNG of each picture; returns the files written."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    directory.mkdir(parents=True, exist_ok=True)
    figures = {
        "roofline": roofline(plans[0]),
        "users_by_context": users_by_context(plans[0]),
        "cost_by_itl": cost_by_itl(plans),
    }
    written = []
    for name, figure in figures.items():
        written.append(directory / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
    environment = Environment(loader=FileSystemLoader(TEMPLATE.parent), autoescape=True)
    page = environment.get_template(TEMPLATE.name).render(
        title=summary(plans[0]),
        pictures=[Markup(_svg(figure)) for figure in figures.values()],
        tables=[*([ranking_table(ranking)] if len(ranking) > 1 else []), *tables(plans[0])],
    )
    written.append(directory / "report.html")
    written[-1].write_text(page)
    return written


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_xscale("log")
    axes.set_yscale("log")
    return figure, axes


def _finish(figure: Figure, axes: Axes, title: str) -> Figure:
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="major", alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=8)
    return figure


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    return text.getvalue()[text.getvalue().index("<svg") :]

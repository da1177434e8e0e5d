"""A plan as tables for the terminal and for HTML, and as plain values for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table as RichTable

from core.plan.catalogue import Device
from core.plan.figures import Figure, show_bytes, show_seconds
from core.plan.latency import Efficiency
from core.plan.models import Model
from core.plan.plan import Plan, Ranked, why_impossible
from core.plan.recipe import Recipe


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def summary(plan: Plan) -> str:
    """The plan in a sentence or two."""
    head = f"{plan.model.name} on {plan.device.name}, recipe {plan.recipe.name}"
    if plan.recipe.tp > 1:
        head += f", {plan.recipe.tp} devices a replica"
    if plan.serving is None:
        return f"{head}: impossible. {why_impossible(plan)}"
    s = plan.serving
    text = (
        f"{head}: {s.batch} streams (limited by {s.limited_by}) at {show_seconds(s.itl_seconds)} a token, "
        f"first token after {show_seconds(s.ttft_seconds)}, {s.rate:.2f} requests/s at "
        f"{plan.recipe.utilization:.0%} utilization"
    )
    if plan.cost is not None:
        text += f", ${plan.cost.blended_per_million:.3f} per million tokens"
    if not plan.memory.fits:
        text += f". It does not fit what was asked: {why_impossible(plan)}"
    return text + "."


def tables(plan: Plan) -> Iterator[Table]:
    yield _inputs(plan)
    yield _weights(plan)
    yield _memory(plan)
    yield _waste(plan)
    yield _time(plan)
    if plan.serving is not None:
        yield _serving(plan)
    if plan.impossible:
        rows = tuple(
            (i.target, i.wanted, i.best, i.advice or "nothing in this recipe") for i in plan.impossible
        )
        yield Table("Impossible targets", ("target", "wanted", "best reachable", "what would help"), rows)
    if plan.cost is not None:
        yield _cost(plan)


def _inputs(plan: Plan) -> Table:
    device, e = plan.device, plan.efficiency
    figures: list[tuple[str, Figure]] = [("memory", device.memory), ("bandwidth", device.bandwidth)]
    figures += [(f"dense rate, {name}", rate) for name, rate in device.rates.items()]
    figures += [
        (f"efficiency: {name.replace('_', ' ')}", getattr(e, name)) for name in Efficiency.model_fields
    ]
    if device.link is not None:
        figures = [f for f in figures if f[0] != "efficiency: link"] + [("link", device.link)]
    rows = [(name, show_figure(f), f.kind, f.source, f.date or "") for name, f in figures]
    rows.append(("model", f"{plan.model.parameters:,} parameters", "given", plan.model.source, ""))
    if plan.cost is not None:
        p = plan.cost.price
        rows.append(("price", f"${p.usd_per_hour:g}/h", "given", f"{p.provider}, {p.source}", p.date))
    return Table("What the plan is made from", ("input", "value", "kind", "source", "date"), tuple(rows))


def show_figure(figure: Figure) -> str:
    if figure.unit in ("B", "B/s"):
        return show_bytes(figure.value) + ("/s" if figure.unit == "B/s" else "")
    if figure.unit == "op/s":
        return (
            f"{figure.value / 1e12:,.4g} Tops/s"
            if figure.value < 1e15
            else f"{figure.value / 1e12:,.0f} Tops/s"
        )
    return show_seconds(figure.value) if figure.unit == "s" else f"{figure.value:.3g}"


def _weights(plan: Plan) -> Table:
    m = plan.memory
    rows = [(w.kind, w.format, f"{w.parameters:,}", show_bytes(w.bytes), "derived") for w in m.weights]
    rows.append(
        ("all", "", f"{sum(w.parameters for w in m.weights):,}", show_bytes(m.weight_bytes), "derived")
    )
    columns = ("weights of one device", "format", "parameters", "bytes with scales", "kind")
    return Table("Weights", columns, tuple(rows))


def _memory(plan: Plan) -> Table:
    m, r = plan.memory, plan.recipe
    rows = [
        ("the engine may take", show_bytes(m.budget_bytes)),
        ("weights", show_bytes(m.weight_bytes)),
        (f"activations and logits at batch {m.wanted_users:,}", show_bytes(m.activation_bytes)),
        ("shared prefix", show_bytes(m.shared_kv_bytes)),
        ("left for sequences", show_bytes(m.left_bytes)),
        (f"KV a token, {r.kv}", f"{m.kv_token_bytes:,.0f} B"),
        ("KV of full windows, a sequence", show_bytes(m.kv_window_bytes)),
        (f"KV a sequence of {m.context:,}", show_bytes(m.kv_sequence_bytes)),
        (f"users of {m.context:,} tokens that fit", f"{m.users:,}"),
        (f"longest context for {m.wanted_users:,} users", f"{m.longest_context:,} tokens"),
    ]
    if not m.fits:
        rows.append((f"missing for {m.wanted_users:,} users", show_bytes(m.missing_bytes)))
        rows.append(("the first thing that would fix it", str(m.fix)))
    return Table("Memory of one device", ("", "value", "kind"), tuple((*row, "derived") for row in rows))


def _waste(plan: Plan) -> Table:
    rows = tuple(
        (w.allocator, f"{w.held_tokens:,.1f}", f"{w.used_tokens:,.1f}", f"{w.share:.1%}", "derived")
        for w in plan.memory.waste
    )
    columns = ("allocator", "tokens held a request", "tokens used", "waste", "kind")
    return Table("Waste by allocator, averaged over a request", columns, rows)


def _time(plan: Plan) -> Table:
    m = plan.memory
    asked = f"decode, {m.wanted_users:,} users of {m.context:,} tokens"
    steps = (("one prompt alone", plan.prefill), (decode_name(plan), plan.decode), (asked, plan.asked))
    rows = tuple(
        (
            name,
            show_seconds(s.seconds),
            show_bytes(s.weight_bytes),
            show_bytes(s.kv_bytes),
            f"{(s.linear_operations + s.attention_operations) / 1e9:,.1f} G",
            f"{s.intensity:,.1f}",
            s.bound,
            "derived",
        )
        for name, s in steps
    )
    columns = ("step", "time", "weights read", "KV moved", "operations", "ops/byte", "bound by", "kind")
    return Table(f"Steps (compute-bound from {plan.ridge:,.0f} ops/byte on)", columns, rows)


def decode_name(plan: Plan) -> str:
    batch = plan.serving.batch if plan.serving else plan.recipe.min_batch
    tokens = f" x {plan.recipe.verified} tokens" if plan.recipe.verified > 1 else ""
    return f"decode, batch {batch}{tokens}"


def _serving(plan: Plan) -> Table:
    s, r = plan.serving, plan.recipe
    assert s is not None
    chunk = f"while a prompt runs in chunks of {r.chunk:,}" if r.chunk else "while a prompt runs in one step"
    rows = [
        ("batch", f"{s.batch}, limited by {s.limited_by}"),
        ("time between tokens", show_seconds(s.itl_seconds)),
        (f"time between tokens {chunk}", show_seconds(s.itl_in_prefill_seconds)),
        ("the same without chunks", show_seconds(s.itl_unchunked_seconds)),
        ("time to first token, without waiting", show_seconds(s.ttft_seconds)),
        ("requests a second, batch always full", f"{s.full_rate:.3f}"),
        (f"requests a second at {r.utilization:.0%} utilization", f"{s.rate:.3f}"),
        ("input tokens a second", f"{s.input_tokens_per_second:,.0f}"),
        ("output tokens a second", f"{s.output_tokens_per_second:,.0f}"),
        ("requests in the system (Little's law)", f"{s.in_system:,.1f}"),
    ]
    if s.speculation is not None:
        g = s.speculation
        rows += [
            ("tokens a verified step", f"{g.tokens_per_step:.2f}"),
            ("speculation, published formula", f"{g.published_speedup:.2f} times"),
            (f"speculation, priced at batch {s.batch}", f"{g.priced_speedup:.2f} times"),
        ]
    if plan.traffic is not None:
        t = plan.traffic
        hour = "" if t.usd_per_hour is None else f", ${t.usd_per_hour:,.2f}/h"
        rows.append((f"devices for {t.requests_per_second:g} requests/s", f"{t.devices}{hour}"))
    return Table("Serving, one replica", ("", "value", "kind"), tuple((*row, "derived") for row in rows))


def _cost(plan: Plan) -> Table:
    c = plan.cost
    assert c is not None
    rows = (
        ("a million input tokens", f"${c.input_per_million:.4f}"),
        ("a million output tokens", f"${c.output_per_million:.4f}"),
        ("a million tokens of both", f"${c.blended_per_million:.4f}"),
        ("a thousand requests", f"${c.per_request * 1000:.4f}"),
    )
    return Table(f"Cost at {c.price.label()}", ("", "USD", "kind"), tuple((*row, "derived") for row in rows))


def ranking_table(ranking: Sequence[Ranked]) -> Table:
    rows = []
    for place, entry in enumerate(ranking, 1):
        s, c = (entry.plan.serving, entry.plan.cost) if entry.plan else (None, None)
        rows.append(
            (
                str(place) if s is not None else "-",
                entry.name,
                str(s.batch) if s else "-",
                show_seconds(s.itl_seconds) if s else "-",
                show_seconds(s.ttft_seconds) if s else "-",
                f"{s.rate:.2f}" if s else "-",
                c.price.label() if c else "-",
                f"${c.input_per_million:.3f}" if c else "-",
                f"${c.output_per_million:.3f}" if c else "-",
                entry.reason,
            )
        )
    columns = ("", "plan", "batch", "ITL", "TTFT", "requests/s", "price", "1M in", "1M out", "why here")
    return Table("Ranking by cost a token", columns, tuple(rows))


def print_tables(console: Console, shown: Sequence[Table]) -> None:
    for table in shown:
        rich = RichTable(title=table.title, title_justify="left", header_style="bold")
        for column in table.columns:
            rich.add_column(column, overflow="fold")
        for row in table.rows:
            rich.add_row(*row)
        console.print(rich)


def plain(value: Any) -> Any:
    """Plain values for JSON: computed numbers become {value, unit, kind}, figures keep their own kind."""
    if isinstance(value, Model):
        return {
            "name": value.name,
            "source": value.source,
            "checkpoint": value.checkpoint,
            "parameters": _derived(value.parameters, "elements"),
            "active_parameters": _derived(value.active_parameters, "elements"),
            "notes": list(value.notes),
        }
    if isinstance(value, Device):
        figures = {f.name: plain(getattr(value, f.name)) for f in fields(value)}
        return {**figures, "rates": {k: plain(v) for k, v in value.rates.items()}}
    if isinstance(value, Recipe):
        return {key: {"value": v, "kind": "given"} for key, v in value.model_dump().items()}
    if isinstance(value, BaseModel):
        return {k: plain(getattr(value, k)) for k in type(value).model_fields}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain_field(getattr(value, f.name), f.metadata.get("unit")) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def _plain_field(value: Any, unit: str | None) -> Any:
    return plain(value) if unit is None or value is None else _derived(value, unit)


def _derived(value: float, unit: str) -> dict[str, Any]:
    return {"value": value, "unit": unit, "kind": "derived"}


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    return {"summary": summary(plan), "ok": plan.ok, **plain(plan)}


def ranking_to_plain(ranking: Sequence[Ranked]) -> list[dict[str, Any]]:
    return [
        {"name": r.name, "reason": r.reason, "plan": None if r.plan is None else plan_to_plain(r.plan)}
        for r in ranking
    ]

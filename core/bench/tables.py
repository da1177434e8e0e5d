"""What the terminal shows of measured arms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from core.lab import cost
from core.lab.analysis import arm_means
from core.lab.findings import number
from core.lab.ledger import Trial
from core.lab.metrics import LATENCIES, METRICS, PERCENTILES
from core.lab.plan import Price

COLUMNS = {
    "requests_per_s": "req/s",
    "output_tokens_per_s": "tok/s",
    "goodput_per_s": "good/s",
    "memory_bytes_peak": "memory",
    "kv_bytes_peak": "KV",
    "prefix_hit_rate": "hits",
    "acceptance": "accepted",
    "preemptions": "preempted",
    "energy_j": "joules",
}
PAIRS = ("ttft", "itl", "e2e")
SILENT = "the target does not tell"
WHY_MISSING = {
    "goodput": "no target was given: goodput.ttft=200",
    "memory": "the target's process is not ours to look into",
    "acceptance": f"nothing was drafted, or {SILENT}",
    "energy": "no counter of this machine can be read for it",
}
"""By the first word of a metric's name; of all others the target keeps silent."""


def details(trial: Trial, price: Price | None) -> Table:
    """Everything about one run."""
    s = trial.summary
    table = Table(title=f"{trial.arm} on {trial.workload}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_row("requests", f"{s.completed} of {s.requests}, up to {s.max_concurrency} at once")
    table.add_row("duration", f"{s.duration_s:.2f} s")
    table.add_row("tokens", f"{s.prompt_tokens:,} in, {s.output_tokens:,} out")
    for name in LATENCIES:
        cells = [number(f"{name}_p{q}_ms", s.values.get(f"{name}_p{q}_ms")) for q in PERCENTILES]
        why = "" if f"{name}_p50_ms" in s.values else " (no answer came in two pieces)"
        table.add_row(f"{name.upper()} p50 / p90 / p95 / p99", f"{' / '.join(cells)} ms{why}")
    for name, metric in METRICS.items():
        if metric.unit != "ms":
            why = WHY_MISSING.get(name.split("_")[0], SILENT)
            table.add_row(metric.label, number(name, s.values[name]) if name in s.values else f"– ({why})")
    for seam, seconds in sorted(s.seam_seconds.items(), key=lambda item: -item[1]):
        table.add_row(f"time in {seam}", f"{seconds:.3f} s")
    if not s.seam_seconds:
        table.add_row("time by seam", f"– ({SILENT})")
    rate = s.values.get("output_tokens_per_s")
    if price and rate:
        table.add_row("a million output tokens", f"${cost.per_million(price, rate):.2f} ({price.source})")
    table.add_row("load generator's lag", f"{s.lag_p50_ms:.2f} ms, p99 {s.lag_p99_ms:.2f} ms")
    for error, times in s.errors.items():
        table.add_row("[red]failed[/]", f"{times} x {error}")
    return table


def comparison(trials: Sequence[Trial], price: Price | None) -> Table:
    """One row an arm and workload; several runs of one are averaged."""
    means = arm_means(trials)
    columns = {c: head for c, head in COLUMNS.items() if any(c in m.values for m in means)}
    pairs = [p for p in PAIRS if any(f"{p}_p50_ms" in m.values for m in means)]
    latencies = [f"{p.upper()} p50 / p99, ms" for p in pairs]
    numbers = [*columns.values(), *latencies, *(["$/M tok"] if price else []), "runs", "failed"]
    table = Table(Column("arm", overflow="fold"), Column("workload", no_wrap=True), *numbers, box=SIMPLE_HEAD)
    for m in means:
        rate = m.values.get("output_tokens_per_s")
        cells = [number(c, m.values.get(c)) for c in columns]
        for p in pairs:
            cells.append(" / ".join(number(f"{p}_p{q}_ms", m.values.get(f"{p}_p{q}_ms")) for q in (50, 99)))
        if price:
            cells.append(f"{cost.per_million(price, rate):.2f}" if rate else "–")
        table.add_row(m.arm, m.workload, *cells, str(m.runs), str(m.failed))
    return table

"""What the terminal shows of measured arms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from core.lab import cost
from core.lab.analysis import ArmMean, arm_means
from core.lab.findings import number
from core.lab.ledger import Trial
from core.lab.metrics import LATENCIES, METRICS, PERCENTILES
from core.lab.plan import Price

SPEED = {
    "requests_per_s": "req/s",
    "output_tokens_per_s": "tok/s",
    "goodput_per_s": "good/s",
    "ttft_p50_ms": "TTFT",
    "ttft_p99_ms": "p99",
    "itl_p50_ms": "ITL",
    "itl_p99_ms": "p99",
    "e2e_p50_ms": "E2E",
    "e2e_p99_ms": "p99",
}
USE = {
    "memory_bytes_peak": "memory",
    "kv_bytes_peak": "KV",
    "prefix_hit_rate": "hits",
    "acceptance": "accept",
    "preemptions": "preempt",
    "energy_j": "joules",
}
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


def comparisons(trials: Sequence[Trial], price: Price | None) -> list[Table]:
    """Two tables a workload: rates and times, and what was used. One row an arm, the mean of its runs."""
    means = arm_means(trials)
    tables = []
    for workload in dict.fromkeys(m.workload for m in means):
        here = [m for m in means if m.workload == workload]
        times = {c: head for c, head in SPEED.items() if any(c in m.values for m in here)}
        rows = [[number(c, m.values.get(c)) for c in times] for m in here]
        tables.append(_arms(f"{workload}: rates a second, times in ms", list(times.values()), here, rows))
        used = {c: head for c, head in USE.items() if any(c in m.values for m in here)}
        rows = [[*(number(c, m.values.get(c)) for c in used), *_counts(m, price)] for m in here]
        heads = [*used.values(), *(["$/M"] if price else []), "runs", "failed"]
        tables.append(
            _arms(f"{workload}: what was used{', dollars a million output tokens' if price else ''}", heads, here, rows)
        )
    return tables


def _counts(mean: ArmMean, price: Price | None) -> list[str]:
    rate = mean.values.get("output_tokens_per_s")
    dollars = [f"{cost.per_million(price, rate):.2f}" if rate else "–"] if price else []
    return [*dollars, str(mean.runs), str(mean.failed)]


def _arms(title: str, heads: Sequence[str], means: Sequence[ArmMean], rows: Sequence[Sequence[str]]) -> Table:
    arm = Column("arm", overflow="fold", min_width=17)
    table = Table(arm, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for mean, cells in zip(means, rows, strict=True):
        table.add_row(mean.arm, *cells)
    return table

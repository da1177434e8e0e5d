"""Outcomes of conformance checks as a table for people and as JSON for machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from core.testing.suite import LEVELS, Outcome

MARKS = {"passed": "[green]passed[/]", "failed": "[red]failed[/]", "skipped": "[yellow]skipped[/]"}


def by_part(outcomes: Iterable[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    def key(outcome: Outcome) -> tuple[str, str]:
        return outcome.seam, outcome.part

    return {part: list(group) for part, group in groupby(sorted(outcomes, key=key), key)}


def as_json(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Each part with its counts and every check's outcome. `ok`: no check failed."""
    parts = []
    for (seam, part), checks in by_part(outcomes).items():
        parts.append({"seam": seam, "part": part, **_counts(checks), "checks": [asdict(check) for check in checks]})
    return {"ok": all(not part["failed"] for part in parts), "parts": parts}


def overview(outcomes: Iterable[Outcome]) -> RenderableType:
    """A line for each part, passed of run by level, then what failed and why checks were skipped."""
    outcomes = list(outcomes)
    table = Table(title="Conformance", title_justify="left", box=None, pad_edge=False)
    table.add_column("part")
    for level, what in LEVELS.items():
        table.add_column(f"L{level} {what}", justify="right")
    table.add_column("skipped", justify="right")
    for (seam, part), checks in by_part(outcomes).items():
        cells = [_passed([check for check in checks if check.level == level]) for level in LEVELS]
        table.add_row(f"{seam}={part}", *cells, str(_counts(checks)["skipped"] or ""))
    return Group(table, *_remarks(outcomes))


def checklist(outcomes: Sequence[Outcome]) -> RenderableType:
    """Every check of one part with its outcome."""
    table = Table(box=None, pad_edge=False)
    for name in ("level", "check", "outcome", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    for outcome in outcomes:
        name = outcome.check.removeprefix(f"test_l{outcome.level}_").replace("_", " ")
        level = f"L{outcome.level} {LEVELS[outcome.level]}"
        table.add_row(level, name, MARKS[outcome.status], f"{outcome.seconds:.2f}")
    counts = _counts(outcomes)
    total = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return Group(table, *_remarks(outcomes), Text(total, style="bold red" if counts["failed"] else "bold"))


def as_text(what: RenderableType, width: int = 120) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def _passed(checks: Sequence[Outcome]) -> str:
    ran = [check for check in checks if check.status != "skipped"]
    passed = sum(check.status == "passed" for check in ran)
    if not ran:
        return "[dim]-[/]"
    return f"{passed}/{len(ran)}" if passed == len(ran) else f"[red]{passed}/{len(ran)}[/]"


def _remarks(outcomes: Iterable[Outcome]) -> list[RenderableType]:
    lines: list[RenderableType] = []
    for outcome in outcomes:
        if outcome.status != "passed" and outcome.detail:
            where = f"{outcome.seam}={outcome.part} {outcome.check.removeprefix('test_')}"
            lines.append(f"{MARKS[outcome.status]} [bold]{where}[/]: {escape(outcome.detail)}")
    return lines


def _counts(checks: Sequence[Outcome]) -> dict[str, int]:
    return {status: sum(check.status == status for check in checks) for status in ("passed", "failed", "skipped")}

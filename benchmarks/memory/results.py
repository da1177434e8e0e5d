"""Tables for the terminal, and the same ones kept in RESULTS.md with the day and the machine."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core.lab.environment import describe

HERE = Path(__file__).parent
FILE = HERE / "RESULTS.md"
HEAD = """# Memory and scheduling, measured

What the benchmarks beside this file found; each section names the command that writes it anew. Times are
this machine's; tokens, bytes and quality would be the same on any.
"""


class Results:
    """Shows one benchmark file's tables."""

    def __init__(self, file: Path, *, record: bool) -> None:
        self._file = file
        self._record = record

    def show(self, title: str, rows: Iterable[Mapping[str, Any]], note: str = "", picture: str = "") -> None:
        """One table with the keys of its first row as heads; `picture`: a file beside RESULTS.md."""
        rows = [{name: _written(value) for name, value in row.items()} for row in rows]
        table = Table(title=title)
        for name, value in rows[0].items():
            table.add_column(name, justify="right" if _is_number(value) else "left")
        for row in rows:
            table.add_row(*row.values())
        Console(width=140).print(table)
        if self._record:
            body = [note, self._source(), _markdown(rows), f"![{title}]({picture})" if picture else ""]
            _replace(title, "\n\n".join(part for part in body if part))

    def picture(self, name: str) -> Path | None:
        """Where to draw a figure, if results are recorded."""
        return HERE / name if self._record else None

    def _source(self) -> str:
        machine = describe()["machine"]
        day = datetime.date.today().isoformat()
        return f"{day}, {machine['cores']} cores of {machine['cpu']}: `python -m pytest {self._file} -s --record`"


def _written(value: Any) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _is_number(value: str) -> bool:
    return value.replace(",", "").replace(".", "").isdigit()


def _markdown(rows: list[dict[str, str]]) -> str:
    sides = ["---:" if _is_number(value) else "---" for value in rows[0].values()]
    lines = [rows[0].keys(), sides, *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _replace(title: str, body: str) -> None:
    """Put a section where one of its title was, else at the end."""
    text = FILE.read_text() if FILE.exists() else HEAD
    sections = re.split(r"\n(?=## )", text)
    mine = f"## {title}\n\n{body}\n"
    places = [at for at, section in enumerate(sections) if section.startswith(f"## {title}\n")]
    if places:
        sections[places[0]] = mine
    else:
        sections.append(mine)
    FILE.write_text("\n".join(sections))

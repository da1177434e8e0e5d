"""What a terminal shows while a study runs."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from core.lab.study import Screen


class Terminal(Screen):
    """A live line on a terminal; one line a run elsewhere."""

    def __init__(self, console: Console, budget_s: float) -> None:
        self._console = console
        self._budget_s = budget_s
        self._began = time.monotonic()
        self._live = console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]}  {task.fields[estimate]}"),
            console=console,
            disable=not self._live,
        )
        self._task = self._progress.add_task("starting", total=budget_s, left="", estimate="")
        self._where = ""
        self._of = 0
        self._ran = 0
        self._runs = 0
        self._block = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def block(self, number: int, runs: int) -> None:
        self._block, self._runs, self._ran = number + 1, runs, 0

    def trial(self, arm: str, workload: str, requests: int) -> None:
        self._ran += 1
        self._of = requests
        self._where = f"block {self._block}, run {self._ran} of {self._runs}: {arm} on {workload}"
        self._show(0)
        if not self._live:
            self._console.print(f"{self._where} ({self._left()})", markup=False, soft_wrap=True)

    def requests(self, ended: int) -> None:
        self._show(ended)

    def estimate(self, text: str) -> None:
        self._progress.update(self._task, estimate=text)
        if not self._live and text:
            self._console.print(f"so far {text}", markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self._console.print(text, style="yellow", markup=False, soft_wrap=True)

    def _show(self, ended: int) -> None:
        used = min(self._budget_s, time.monotonic() - self._began)
        text = f"{self._where}, {ended} of {self._of} requests" if self._of else self._where
        self._progress.update(self._task, description=text, completed=used, left=self._left())

    def _left(self) -> str:
        left = max(0.0, self._budget_s - (time.monotonic() - self._began))
        return f"at most {int(left // 60)}:{int(left % 60):02} left"

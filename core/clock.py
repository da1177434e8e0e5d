"""Where the time of a step goes, by seam."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from core.types import PartFault


class Clock:
    """Seconds spent in each seam since the start. Spans may nest; an inner one's time is not the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    @contextmanager
    def span(self, seam: str) -> Iterator[None]:
        self._inner.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[seam] -= self._inner.pop()
            self.add(seam, elapsed)

    @contextmanager
    def part(self, seam: str, label: str) -> Iterator[None]:
        """A span around a call into a part: what it raises becomes a PartFault that names it."""
        with self.span(seam):
            try:
                yield
            except Exception as error:
                raise PartFault(f"{label} raised {type(error).__name__}: {error}") from error

    def add(self, seam: str, elapsed: float) -> None:
        """Count a span measured elsewhere, inside the open one."""
        self.seconds[seam] += elapsed
        if self._inner:
            self._inner[-1] += elapsed

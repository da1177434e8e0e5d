"""Costs that a check can rely on while other work runs on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

SLACK = 3.0
"""Timings on a shared machine scatter; a step from linear to quadratic is 10 times, well beyond this."""


class Cost(NamedTuple):
    """Microseconds a call: by the clock, and of the processor, which other work on the machine does not lengthen."""

    wall_us: float
    cpu_us: float


def microseconds(call: Callable[[], object], *, repeats: int = 7, at_least_s: float = 0.002) -> Cost:
    """The fastest of some timings of `call`, which a busy neighbour can lengthen but never shorten."""
    loops = 1
    while True:
        taken = _time(call, loops)
        if taken.wall_us * loops >= at_least_s * 1e6 or loops >= 1 << 16:
            break
        loops *= 4
    timings = [taken, *(_time(call, loops) for _ in range(repeats - 1))]
    return Cost(min(t.wall_us for t in timings), min(t.cpu_us for t in timings))


def _time(call: Callable[[], object], loops: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(loops):
        call()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Cost(wall / loops * 1e6, cpu / loops * 1e6)


def assert_cost(cost: Cost, budget_us: float, what: str) -> None:
    us = cost.wall_us
    assert us <= budget_us, (
        f"{what} takes {us:.0f} us, more than the {budget_us:.0f} us it may; declare `cost_us:<number>` if it must"
    )


def assert_growth(small: Cost, large: Cost, power: float, what: str) -> None:
    """`large` was measured at 10 times the size of `small`; the processor time may grow as size to the `power`."""
    few, many = small.cpu_us, large.cpu_us
    times = many / max(few, 1e-3)
    assert times <= SLACK * 10**power, (
        f"{what} takes {times:.0f} times as long ({few:.0f} us of processor time, then {many:.0f} us); "
        f"growth:{power:g} allows {10**power:.0f} times, with a slack of {SLACK:g}; declare `growth:2` if that is meant"
    )

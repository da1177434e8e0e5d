"""Costs that a check can rely on while other work runs on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

SLACK = 3.0
"""Timings on a shared machine scatter; a step from linear to quadratic is 10 times, well beyond this."""


def microseconds(call: Callable[[], object], *, repeats: int = 7, at_least_s: float = 0.002) -> float:
    """The fastest of some timings of `call`, which a busy neighbour can lengthen but never shorten."""
    loops = 1
    while True:
        taken = _time(call, loops)
        if taken >= at_least_s or loops >= 1 << 16:
            break
        loops *= 4
    return min(taken, *(_time(call, loops) for _ in range(repeats - 1))) / loops * 1e6


def _time(call: Callable[[], object], loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return time.perf_counter() - start


def assert_cost(us: float, budget_us: float, what: str) -> None:
    assert us <= budget_us, (
        f"{what} takes {us:.0f} us, more than the {budget_us:.0f} us it may; declare `cost_us:<number>` if it must"
    )


def assert_growth(small_us: float, large_us: float, power: float, what: str) -> None:
    """`large_us` was measured at 10 times the size of `small_us`; the cost may grow as size to the `power`."""
    times = large_us / max(small_us, 1e-3)
    assert times <= SLACK * 10**power, (
        f"{what} takes {times:.0f} times as long ({small_us:.0f} us, then {large_us:.0f} us); growth:{power:g} allows "
        f"{10**power:.0f} times, with a slack of {SLACK:g}; declare `growth:2` if that is meant"
    )

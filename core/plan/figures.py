"""Numbers with their unit and where they come from.

Units used inside the planner: bytes, seconds, operations (one multiply-add is two), US dollars.
GB is 10^9 bytes and GiB is 2^30 bytes; a rate in TFLOP/s is 10^12 operations a second, dense.
"""

from __future__ import annotations

import re
from dataclasses import field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from core.plan.errors import PlanError

GB = 10**9
GIB = 2**30

Kind = Literal["given", "measured", "derived", "assumed"]

_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY_SCALE = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]+)(.*)")
_UNITS = {"B": ("B", 1.0), "bit": ("B", 0.125), "B/s": ("B/s", 1.0), "bit/s": ("B/s", 0.125)}
_UNITS |= {symbol: ("op/s", 1.0) for symbol in ("FLOP/s", "OP/s", "FLOPS", "OPS")}
_UNITS |= {"W": ("W", 1.0), "s": ("s", 1.0)}


def parse_quantity(text: object, unit: str) -> float:
    """Read "80 GB", "46068 MiB", "2400 Gbit/s" or "989 TFLOPS" as bytes, bytes/s or operations/s.

    `unit` is the one wanted: "B", "B/s", "op/s", "W" or "s". Raises PlanError for a bare number, for another
    unit, and for rates marked as sparse: 2:4 sparsity doubles the printed rate and no dense model reaches it.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        raise PlanError(f"'{text}' needs a number and a unit, for example '80 GB' or '3350 GB/s'")
    number, symbol, rest = match.groups()
    if "spars" in rest.lower():
        raise PlanError(f"'{text}' is a rate with sparsity; give the dense one, which is half of it")
    if rest.strip():
        raise PlanError(f"'{text}': '{rest.strip()}' after the unit is not understood")
    prefixes = {**_SCALE, **_BINARY_SCALE}
    for base, (kind, factor) in _UNITS.items():
        prefix = symbol.removesuffix(base)
        if symbol.endswith(base) and prefix in prefixes and kind == unit:
            return float(number) * prefixes[prefix] * factor
    raise PlanError(f"'{text}' is not in {unit}")


class Figure(BaseModel):
    """A number that goes into a plan, with its unit, its kind and its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float
    unit: str
    kind: Kind
    source: str
    date: str | None = None


def assumed(value: float, unit: str, source: str) -> Figure:
    return Figure(value=value, unit=unit, kind="assumed", source=source)


def derived(unit: str) -> Any:
    """A dataclass field that holds a number computed from figures, in `unit`."""
    return field(metadata={"unit": unit})


def show_bytes(n: float) -> str:
    """Bytes for people: decimal units, the ones data sheets use."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n) >= size:
            return f"{n / size:,.2f} {unit}"
    return f"{n:,.0f} B"


def show_seconds(s: float) -> str:
    if s >= 1:
        return f"{s:,.2f} s"
    return f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.1f} µs"

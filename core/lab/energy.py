"""Energy counters, where the machine has them: RAPL for CPUs, NVML for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Reading:
    """`joules` since some fixed moment; a counter that starts again does so at `wraps_at`."""

    joules: float
    wraps_at: float | None = None


def read() -> dict[str, Reading]:
    """Every counter of this machine that can be read, by name; most need rights, so often none."""
    return _cpu() | _gpu()


def joules(before: Mapping[str, Reading], after: Mapping[str, Reading]) -> float | None:
    """Energy between two looks, all packages and GPUs together; None when nothing tells."""
    used = [_between(before[name], now) for name, now in after.items() if name in before]
    return sum(used) if used else None


def _between(before: Reading, after: Reading) -> float:
    used = after.joules - before.joules
    return used + after.wraps_at if used < 0 and after.wraps_at else used


def _cpu() -> dict[str, Reading]:
    readings = {}
    for zone in RAPL.glob("intel-rapl:[0-9]*"):
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package"):
                used, most = (int((zone / file).read_text()) for file in ("energy_uj", "max_energy_range_uj"))
                readings[zone.name] = Reading(used / 1e6, most / 1e6)
        except (OSError, ValueError):
            continue
    return readings


def _gpu() -> dict[str, Reading]:
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handles = {f"gpu{i}": pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())}
        return {n: Reading(pynvml.nvmlDeviceGetTotalEnergyConsumption(h) / 1e3) for n, h in handles.items()}
    except pynvml.NVMLError:
        return {}

"""Energy counters, where the machine has them: RAPL for CPUs, NVML for NVIDIA GPUs."""

from __future__ import annotations

from pathlib import Path

RAPL = Path("/sys/class/powercap")


def joules() -> float | None:
    """Energy used since some fixed moment, all packages and GPUs together; None when nothing tells."""
    readings = [*_cpu(), *_gpu()]
    return sum(readings) if readings else None


def _cpu() -> list[float]:
    readings = []
    for package in RAPL.glob("intel-rapl:[0-9]"):
        try:
            readings.append(int((package / "energy_uj").read_text()) / 1e6)
        except (OSError, ValueError):
            continue
    return readings


def _gpu() -> list[float]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3 for handle in handles]
    except pynvml.NVMLError:
        return []

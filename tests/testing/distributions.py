"""Installed distributions that exist for one test only."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def installed(
    folder: Path, name: str, entry_points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.2.3"
) -> Iterator[None]:
    """A distribution with entry points of parts and modules of the given source, on the import path."""
    site = folder / f"site-{name}"
    about = site / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (about / "entry_points.txt").write_text(f"[partwise.plugins]\n{lines}")
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(site))
        for module in modules:
            sys.modules.pop(module, None)

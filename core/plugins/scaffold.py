"""A new distribution with one part in it, rendered from the template."""

from __future__ import annotations

import re
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path

from core.interfaces import SEAMS
from core.registry import PartError


def create(seam: str, name: str, into: Path | None = None) -> Path:
    """Write the distribution to `into` (by default a folder of its name) and return that folder.

    PartError: the name cannot be a part's, the folder has something in it, or copier is not installed.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise PartError(f"{name!r} cannot be a part's name: begin with a letter, then a to z, 0 to 9 and _")
    distribution = re.sub(r"[._]", "-", f"partwise-{seam}-{name}")
    folder = into or Path(distribution)
    if folder.exists() and any(folder.iterdir()):
        raise PartError(f"{folder} is not empty; choose another folder with --into")
    try:
        from copier import run_copy
    except ImportError:
        raise PartError("new needs copier: pip install 'partwise[test]'") from None
    with as_file(files("core.testing") / "template") as template:
        run_copy(
            str(template),
            folder,
            data={
                "seam": seam,
                "name": name,
                "distribution": distribution,
                "api": list(SEAMS[seam]),
                "partwise": version("partwise"),
            },
            defaults=True,
            overwrite=True,
            quiet=True,
        )
    return folder

"""The page for authors names every seam, and every capability that a suite reads."""

import re
from pathlib import Path

import core.testing
from core.interfaces import SEAMS

FOLDER = Path(core.testing.__file__).parent
PAGE = (FOLDER / "README.md").read_text()


def test_every_seam_is_explained():
    for seam in SEAMS:
        assert f"| `{seam}` |" in PAGE


def test_every_capability_is_explained():
    source = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    found = set(re.findall(r'(?:skip_if|needs|declared)\(\s*"(\w+)"', source))
    found |= set(re.findall(r'"(\w+)" (?:not )?in self\.(?:suite\.)?card\.provides', source))
    assert {"lossless", "unfair", "keeps_nothing", "growth", "sinks", "whole_prompts_only"} <= found
    missing = {name for name in found if not re.search(rf"`{name}[`:]", PAGE)}
    assert not missing, f"core/testing/README.md does not explain {missing}"

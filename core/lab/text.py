"""Text to measure with, made from what Python ships: its language reference and its own source."""

from __future__ import annotations

import functools
import random
import sysconfig
from pathlib import Path
from typing import Literal

CHARS_PER_TOKEN = 4
"""Rough size of a token of English or Python; the server's own count is what gets reported."""

Kind = Literal["prose", "code"]
_SOURCES = ("argparse", "ast", "collections/__init__", "datetime", "difflib", "doctest", "inspect", "pdb")


@functools.cache
def corpus(kind: Kind) -> str:
    """All text of one kind. Some systems package Python without its reference; then prose is code as well."""
    if kind == "prose":
        try:
            from pydoc_data.topics import topics
        except ImportError:
            return corpus("code")
        return "\n".join(topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_paths()["stdlib"])
    return "\n".join((library / f"{name}.py").read_text(encoding="utf-8") for name in _SOURCES)


def passage(rng: random.Random, tokens: int, kind: Kind = "prose") -> str:
    """About `tokens` tokens of running text from a random place; longer than the corpus wraps around."""
    text = corpus(kind)
    wanted = max(tokens, 1) * CHARS_PER_TOKEN
    start = text.find(" ", rng.randrange(len(text) - 1)) + 1
    whole = text[start:] + text * (wanted // len(text) + 1)
    return whole[:wanted]


def tokens_in(text: str) -> int:
    """About how many tokens `text` is; at least one."""
    return max(1, round(len(text) / CHARS_PER_TOKEN))

"""Errors that say what was wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class PlanError(ValueError):
    """A plan cannot be made from what was given. The text is written for the person who gave it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a name that is not known: the nearest known names, or all of them when none is near."""
    names = sorted(known)
    wanted = name.lower()
    starting = [n for n in names if n.startswith(wanted)]
    close = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    same_family = [n for n in names if difflib.get_close_matches(wanted, [n.partition("-")[0]], cutoff=0.75)]
    near = list(dict.fromkeys([*starting, *close, *same_family]))[:5]
    hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(names)}"
    return PlanError(f"unknown {kind} '{name}'; {hint}")


def explain(error: ValidationError) -> str:
    """The first reason of a pydantic error, without the library's own words."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")

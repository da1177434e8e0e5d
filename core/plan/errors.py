"""Errors that say what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import ValidationError

from core.names import nearest


class PlanError(ValueError):
    """A plan cannot be made from what was given. The text is written for the person who gave it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> PlanError:
    """The error for a name that is not known: the nearest known names, or all of them when none is near."""
    names = sorted(known)
    close = nearest(name, names, most=5, cutoff=0.6)
    hint = f"did you mean {', '.join(close)}?" if close else f"known: {', '.join(names)}"
    return PlanError(f"unknown {kind} '{name}'; {hint}")


def explain(error: ValidationError) -> str:
    """The first reason of a pydantic error, without the library's own words."""
    return str(error.errors()[0]["msg"]).removeprefix("Value error, ")

"""The lab's errors: one clear sentence for a person, and the exit code the command ends with."""

from __future__ import annotations

from collections.abc import Iterable

from core.names import nearest


class LabError(Exception):
    """What was wrong, where, and what to do, in one sentence; `exit_code` is the command's."""

    exit_code = 1


class UsageError(LabError):
    """The command line, a trace or a recipe is wrong: nothing was started."""

    exit_code = 2


class TargetError(LabError):
    """The engine under test did not start, answered errors, or went away."""

    exit_code = 3


class BudgetError(LabError):
    """The budget ran out before one block of arms was complete."""

    exit_code = 4


def unknown(what: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a misspelt name: says the nearest one, and all that exist."""
    names = sorted(known)
    close = nearest(name, names, most=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return UsageError(f"unknown {what} {name!r}: {hint}There are: {', '.join(names)}.")

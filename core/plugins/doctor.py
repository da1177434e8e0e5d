"""What cannot work among the installed parts, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from core.interfaces import BuildContext
from core.registry import ApiError, Found, PartError, Registry


@dataclass(frozen=True, slots=True)
class Finding:
    """One part's trouble, in words that say whose it is and what to do."""

    seam: str
    name: str
    distribution: str
    kind: str
    message: str


def examine(registry: Registry) -> list[Finding]:
    """Read every card and import every class; all that is wrong, none left out."""
    counts = Counter((found.seam, found.name) for found in registry.all if not found.problem)
    findings: list[Finding] = []
    for found in registry.all:
        clash = counts[found.seam, found.name] > 1
        problem = _clash(registry, found) if clash else _problem(registry, found)
        if problem:
            kind, message = problem
            finding = Finding(found.seam, found.name, found.distribution, kind, message)
            if not clash or all((f.seam, f.name) != (found.seam, found.name) for f in findings):
                findings.append(finding)
    return findings


def _clash(registry: Registry, found: Found) -> tuple[str, str] | None:
    try:
        registry.find(found.seam, found.name)
    except PartError as error:
        return "clash", str(error)
    return None


def _problem(registry: Registry, found: Found) -> tuple[str, str] | None:
    from core.testing.suite import BASES

    if found.problem:
        return "name", f"{found.distribution} {found.version}: {found.problem}"
    try:
        card = registry.info(found.seam, found.name)
    except ApiError as error:
        return "api", str(error)
    except PartError as error:
        return "card", str(error)
    try:
        part = registry.load(found.seam, found.name)
    except PartError as error:
        return "import", str(error)
    base, options = BASES[found.seam]
    if not issubclass(part, base):
        return "class", f"{found.label}: {part.__name__} must derive from core.interfaces.{base.__name__}"
    if not issubclass(card.options, options):
        return "options", f"{found.label}: {card.options.__name__} must derive from core.interfaces.{options.__name__}"
    missing = sorted(getattr(part, "__abstractmethods__", ()))
    if missing:
        return "class", f"{found.label}: {part.__name__} lacks {', '.join(missing)}"
    return _unfit(registry, found)


def _unfit(registry: Registry, found: Found) -> tuple[str, str] | None:
    """A part whose own defaults do not fit together, as far as it can be asked."""
    try:
        options = registry.options(found.seam, found.name, {})
    except PartError:
        return None  # options without defaults are set by a recipe
    try:
        reasons = registry.load(found.seam, found.name).unfit(options, BuildContext())
    except Exception as error:
        return "class", f"{found.label}: `unfit` raised {type(error).__name__}: {error}"
    return ("sizes", f"{found.label}: {'; '.join(reasons)}") if reasons else None

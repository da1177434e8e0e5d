"""What is known of every part that is found, without importing any."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from core.interfaces import SEAMS, Options, PluginInfo
from core.names import near
from core.registry import Found, PartError, Registry


@dataclass(frozen=True, slots=True)
class Line:
    """One part as a table shows it; `problem` says why it cannot be used."""

    found: Found
    card: PluginInfo | None
    active: bool | None
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        about = {
            "seam": self.found.seam,
            "name": self.found.name,
            "distribution": self.found.distribution,
            "version": self.found.version,
            "active": self.active,
            "problem": self.problem,
        }
        if self.card is None:
            return about
        return about | {
            "api": version(self.card.api),
            "accepted_api": accepted(self.card.seam),
            "provides": sorted(self.card.provides),
            "requires": sorted(self.card.requires),
            "conflicts": sorted(self.card.conflicts),
            "summary": self.card.summary,
            "options": options_of(self.card.options),
        }


def lines(registry: Registry, active: Mapping[str, str] | None = None) -> list[Line]:
    """Every part, by seam and name. `active` is the part of each seam in some recipe; None: not known."""
    order = {seam: n for n, seam in enumerate(SEAMS)}
    parts = sorted(registry.all, key=lambda found: (order.get(found.seam, len(order)), found.name))
    return [_line(registry, found, active) for found in parts]


def _line(registry: Registry, found: Found, active: Mapping[str, str] | None) -> Line:
    is_active = None if active is None else active.get(found.seam) == found.name
    if found.problem:
        return Line(found, None, is_active, found.problem)
    try:
        return Line(found, registry.info(found.seam, found.name), is_active)
    except PartError as error:
        return Line(found, None, is_active, str(error))


def find(registry: Registry, word: str) -> Found:
    """The part meant by `scheduler.static`, `scheduler=static`, or `static` where only one seam has one.

    PartError: there is none, or several.
    """
    exact = [found for found in registry.all if word in (f"{found.seam}.{found.name}", f"{found.seam}={found.name}")]
    parts = exact or [found for found in registry.all if found.name == word]
    if not parts:
        names = sorted({f"{found.seam}.{found.name}" for found in registry.all})
        short = sorted({found.name for found in registry.all})
        raise PartError(f"there is no part {word!r}{near(word, names if '.' in word else short)}")
    seams = sorted({found.seam for found in parts})
    if len(seams) > 1:
        raise PartError(f"several seams have a part {word!r}: say {' or '.join(f'{seam}.{word}' for seam in seams)}")
    return parts[0]


def options_of(model: type[Options]) -> dict[str, dict[str, Any]]:
    """An options model's keys with their types and defaults, as far as JSON can show them."""
    schema = model.model_json_schema().get("properties", {})
    found = {}
    for key, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        about = {name: value for name, value in schema.get(key, {}).items() if name not in ("title", "default")}
        found[key] = about | ({"required": True} if default is PydanticUndefined else {"default": default})
    return found


def documentation(value: Any) -> str:
    return inspect.cleandoc(value.__doc__ or "")


def version(pair: tuple[int, int]) -> str:
    return f"{pair[0]}.{pair[1]}"


def accepted(seam: str) -> str:
    """The versions of a seam's interface that load."""
    major, minor = SEAMS[seam]
    first = f"{major - 1}.x" if major > 1 else f"{major}.0"
    return first if first == f"{major}.{minor}" else f"{first} to {major}.{minor}"

"""The public surface of each seam as plain data, and how much of a version step a change of it needs.

`python -m tests.contract.surface` writes the snapshot anew; do that together with the version step in
core.interfaces.plugin.SEAMS that the change calls for.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import BaseModel

from core import types
from core.interfaces import SEAMS, plugin

SNAPSHOT = Path(__file__).with_name("surface.json")
Step = Literal["none", "minor", "major"]
Surface = dict[str, dict[str, str]]
"""Class (or "functions") -> member -> what it is; a part must give those that end in REQUIRED."""
REQUIRED = " [required]"

MODULES = {
    "attention.structure": ("attention", "model"),
    "attention.kernel": ("attention",),
    "kv_allocator": ("kv_allocator",),
    "scheduler": ("scheduler", "scheduling"),
    "quantizer.weights": ("quantizer", "model"),
    "quantizer.kv": ("quantizer",),
    "prefix_cache": ("prefix_cache", "eviction"),
    "prefix_cache.eviction": ("prefix_cache",),
    "drafter": ("drafter",),
    "context_reduction": ("context_reduction",),
}
"""Where each seam's names lie in core.interfaces; those of core.types that they mention belong to it as well."""


def surface(seam: str) -> Surface:
    modules = [importlib.import_module(f"core.interfaces.{name}") for name in MODULES[seam]]
    found: Surface = {}
    waiting = [value for module in [*modules, plugin] for value in _public(module)]
    while waiting:
        value = waiting.pop()
        if inspect.isfunction(value):
            found.setdefault("functions", {})[value.__name__] = _signature(value)
        elif value.__name__ not in found:
            found[value.__name__] = _members(value)
            waiting += _mentioned(found[value.__name__])
    return {name: dict(sorted(found[name].items())) for name in sorted(found)}


def change(before: Surface, after: Surface) -> Step:
    """The step that going from one surface to the other calls for."""
    if before == after:
        return "none"
    for owner, members in before.items():
        for name, member in members.items():
            if after.get(owner, {}).get(name) != member:
                return "major"
    added = [
        member
        for owner, members in after.items()
        if owner in before
        for name, member in members.items()
        if name not in before[owner]
    ]
    return "major" if any(member.endswith(REQUIRED) for member in added) else "minor"


def stepped(before: tuple[int, int], after: tuple[int, int]) -> Step:
    if after[0] > before[0]:
        return "major"
    return "minor" if after > before else "none"


def snapshot() -> dict[str, Any]:
    return {seam: {"version": list(SEAMS[seam]), "surface": surface(seam)} for seam in SEAMS}


def _public(module: ModuleType) -> list[Any]:
    return [
        value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module.__name__
    ]


def _members(cls: type) -> dict[str, str]:
    if issubclass(cls, BaseModel):
        return {key: _option(info) for key, info in cls.model_fields.items()}
    members: dict[str, str] = {}
    if dataclasses.is_dataclass(cls):
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            members[field.name] = _text(field.type) + REQUIRED * required
    for name, value in vars(cls).items():
        if name in members or (name.startswith("_") and name != "__call__"):
            continue
        about = _member(value)
        if about:
            members[name] = about + REQUIRED * bool(getattr(value, "__isabstractmethod__", False))
    return members


def _option(info: Any) -> str:
    if info.is_required():
        return _text(info.annotation) + REQUIRED
    return f"{_text(info.annotation)} = {info.get_default(call_default_factory=True)!r}"


def _member(value: Any) -> str | None:
    if isinstance(value, property):
        assert value.fget is not None
        return f"property{_signature(value.fget)}"
    if isinstance(value, (classmethod, staticmethod)):
        return f"{type(value).__name__}{_signature(value.__func__)}"
    if inspect.isfunction(value):
        return _signature(value)
    if isinstance(value, (tuple, str, int)) and not isinstance(value, bool):
        return f"= {value!r}"
    return None


def _signature(function: Any) -> str:
    return str(inspect.signature(function)).replace("'", "")


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _mentioned(members: dict[str, str]) -> list[Any]:
    words = {word for member in members.values() for word in re.findall(r"\w+", member)}
    return [value for value in _public(types) if inspect.isclass(value) and value.__name__ in words]


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(snapshot(), indent=1) + "\n")

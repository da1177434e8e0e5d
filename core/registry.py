"""Finds parts by their entry points, reads their cards, and imports only those that a recipe names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from core.interfaces.plugin import ENTRY_POINT_GROUP, SEAMS, BuildContext, Options, Part, PluginInfo
from core.names import near
from core.types import PartwiseError


class PartError(PartwiseError):
    """A part that cannot be found, loaded or set as asked; the message names its distribution."""


class ApiError(PartError):
    """A part written for another version of its seam's interface."""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry point, not imported yet. `problem` says why it can never be used."""

    seam: str
    name: str
    distribution: str
    version: str
    target: EntryPoint | PluginInfo
    problem: str | None = None

    @property
    def label(self) -> str:
        return f"{self.seam} part {self.name!r} of {self.distribution} {self.version}"


class Registry:
    """All parts that are installed, and those in the file `plugin_path` if one is given."""

    def __init__(self, plugin_path: str | Path | None = None) -> None:
        self.plugin_path = plugin_path

    @cached_property
    def all(self) -> tuple[Found, ...]:
        """Every part found, also those that cannot be used."""
        points = entry_points(group=ENTRY_POINT_GROUP)
        owners = {dist: _owner(dist) for dist in {point.dist for point in points}}
        installed = [_found(point, *owners[point.dist]) for point in points]
        return tuple(installed + (_found_in_file(Path(self.plugin_path)) if self.plugin_path else []))

    def names(self, seam: str) -> list[str]:
        return sorted({part.name for part in self.all if part.seam == seam and not part.problem})

    def find(self, seam: str, name: str) -> Found:
        """The one part of this name. PartError: none, or several."""
        parts = [part for part in self.all if part.seam == seam and part.name == name]
        if not parts:
            raise PartError(f"there is no {seam} part named {name!r}{near(name, self.names(seam))}")
        if len(parts) > 1:
            owners = " and ".join(f"{part.distribution} {part.version}" for part in parts)
            raise PartError(f"{seam} part {name!r} is offered by {owners}; uninstall all but one")
        if parts[0].problem:
            raise PartError(f"{parts[0].label}: {parts[0].problem}")
        return parts[0]

    def info(self, seam: str, name: str) -> PluginInfo:
        """The part's card. PartError: its module does not import, or the card is not one or is of another API."""
        part = self.find(seam, name)
        card = part.target if isinstance(part.target, PluginInfo) else _import(part, part.target.value)
        if not isinstance(card, PluginInfo):
            raise PartError(f"{part.label}: its entry point must give a PluginInfo, not {type(card).__name__}")
        if (card.seam, card.name) != (seam, name):
            raise PartError(f"{part.label}: its card says {card.seam}.{card.name}; entry point and card must agree")
        _check_api(part, card)
        return card

    def load(self, seam: str, name: str) -> type[Part[Any]]:
        """Import the part's class."""
        part = self.find(seam, name)
        cls = _import(part, self.info(seam, name).part)
        if not (isinstance(cls, type) and issubclass(cls, Part)):
            raise PartError(f"{part.label}: {self.info(seam, name).part} is not a class derived from its seam's base")
        return cls

    def options(self, seam: str, name: str, given: Mapping[str, Any]) -> Options:
        """Its options with `given` set. PartError: an unknown key or a wrong value, with near names."""
        model = self.info(seam, name).options
        try:
            return model.model_validate(dict(given))
        except ValidationError as error:
            problems = [_option_problem(seam, model, item) for item in error.errors()]
            raise PartError(f"{self.find(seam, name).label}: " + "; ".join(problems)) from None

    def build(self, seam: str, name: str, options: Options, context: BuildContext) -> Any:
        """The part itself. PartError: its constructor raised."""
        cls = self.load(seam, name)
        try:
            return cls(options, context)
        except Exception as error:
            raise PartError(f"{self.find(seam, name).label} cannot be built: {_told(error)}") from error


def _owner(distribution: Distribution | None) -> tuple[str, str]:
    return (distribution.name, distribution.version) if distribution else ("an unnamed distribution", "?")


def _found(point: EntryPoint, distribution: str, version: str) -> Found:
    seam = next((s for s in sorted(SEAMS, key=len, reverse=True) if point.name.startswith(s + ".")), None)
    if seam is None or not point.name[len(seam) + 1 :]:
        problem = f"entry point {point.name!r} must be named <seam>.<name>; the seams are {', '.join(SEAMS)}"
        return Found("", point.name, distribution, version, point, problem)
    return Found(seam, point.name[len(seam) + 1 :], distribution, version, point)


def _found_in_file(path: Path) -> list[Found]:
    cards = [value for value in vars(_import_file(path)).values() if isinstance(value, PluginInfo)]
    if not cards:
        raise PartError(f"plugin_path {path} holds no PluginInfo; write the part's card in it as a module variable")
    return [Found(card.seam, card.name, str(path), "file", card) for card in cards]


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise PartError(f"plugin_path {path} is not a file")
    known = sys.modules.get(path.stem)
    if known is not None:
        if getattr(known, "__file__", None) == str(path):
            return known
        raise PartError(f"plugin_path {path}: a module named {path.stem!r} is loaded already; rename the file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise PartError(f"plugin_path {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        if not isinstance(error, Exception):
            raise
        raise PartError(f"plugin_path {path} does not import: {_told(error)}") from error
    return module


def _import(part: Found, reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for name in attribute.split("."):
            value = getattr(value, name)
        return value
    except Exception as error:
        raise PartError(f"{part.label} does not load from {reference}: {_told(error)}") from error


def _check_api(part: Found, card: PluginInfo) -> None:
    """The current major version up to its minor one, and the major version before it; the first one was 1.0."""
    (major, minor), current = card.api, SEAMS[card.seam]
    if major >= 1 and (major == current[0] - 1 or (major == current[0] and minor <= current[1])):
        return
    said, have = f"{major}.{minor}", f"{current[0]}.{current[1]}"
    cure = "update partwise" if card.api > current else "update the part"
    raise ApiError(f"{part.label} is written for API {said} of its seam; this is {have}: {cure}")


def _option_problem(seam: str, model: type[Options], item: Any) -> str:
    key = ".".join(str(piece) for piece in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"it has no option {seam}.{key}{near(key, list(model.model_fields))}"
    return f"{seam}.{key}: {item['msg']} (given: {item['input']!r})"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__

"""A recipe: which part fills each slot, with which options. Checked whole before any weight is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, field_validator, model_validator

from core.interfaces.plugin import BuildContext, Options, PluginInfo
from core.registry import PartError, Registry
from core.twins import TWINS
from core.types import PartwiseError


class RecipeError(PartwiseError):
    """A recipe that cannot work; the message lists every reason found."""


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PartChoice(_Config):
    """One slot: the part's name and what the recipe sets of it. With `books_only` it does its work and gives no
    benefit (core.twins). `otherwise` is the part to take, with its defaults, where this one cannot be used: a
    compiled kernel without a compiler, say. `static` and `{name: static, max_running: 4}` mean what they look like."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    books_only: bool = False
    otherwise: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping):
            own = {key: item for key, item in value.items() if key in cls.model_fields and key != "options"}
            rest = {key: item for key, item in value.items() if key not in cls.model_fields}
            return {**own, "options": {**value.get("options", {}), **rest}}
        return value


class CacheChoice(PartChoice):
    """A prefix cache's slot has another in it, the policy that chooses what the cache gives up."""

    eviction: PartChoice = PartChoice(name="lru")


class AttentionSlots(_Config):
    structure: PartChoice = PartChoice(name="native")
    kernel: PartChoice = PartChoice(name="eager")


class QuantizerSlots(_Config):
    weights: PartChoice = PartChoice(name="none")
    kv: PartChoice = PartChoice(name="none")


class MemoryConfig(_Config):
    """`kv_bytes`: bytes of all KV pools together, as a number, a size (`512MiB`, `2GB`), or a share (`25%`) of the
    memory that is free when the engine starts."""

    kv_bytes: int | str = "1GiB"

    @field_validator("kv_bytes")
    @classmethod
    def _readable(cls, value: int | str) -> int | str:
        parse_bytes(value, available=1 << 40)
        return value


class EngineConfig(_Config):
    """`max_model_len`: the longest a sequence may become (None: what the model allows, at most 8,192); `max_waiting`:
    requests that may wait before new ones are refused; `threads`: None takes the machine's cores; `dtype`: of
    activations, and of all that no quantizer stores otherwise; `seed`: what unseeded requests are drawn from (None: by
    chance)."""

    max_model_len: PositiveInt | None = None
    max_waiting: PositiveInt = 1024
    threads: PositiveInt | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int | None = None


class ServerConfig(_Config):
    """`api_key` guards every route but /health and /metrics. `max_body`: bytes of one request. `drain_seconds`: how
    long running requests may go on after SIGTERM. `hang_seconds`: an engine that neither answers nor computes for so
    long counts as hung."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: str | None = Field(default=None, min_length=1)
    max_body: PositiveInt = 16 << 20
    drain_seconds: float = Field(default=60.0, ge=0)
    hang_seconds: float = Field(default=4.0, gt=0)


class Recipe(_Config):
    """The validated form of what Hydra composed."""

    name: str = "unnamed"
    model: dict[str, Any]
    attention: AttentionSlots = AttentionSlots()
    kv_allocator: PartChoice = PartChoice(name="contiguous")
    scheduler: PartChoice = PartChoice(name="static")
    quantizer: QuantizerSlots = QuantizerSlots()
    prefix_cache: CacheChoice = CacheChoice(name="none")
    drafter: PartChoice = PartChoice(name="none")
    context_reduction: PartChoice = PartChoice(name="none")
    memory: MemoryConfig = MemoryConfig()
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    observers: tuple[str, ...] = ()
    plugin_path: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _absolute_path(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("plugin_path"):
            return {**data, "plugin_path": os.path.abspath(os.path.expanduser(str(data["plugin_path"])))}
        return data

    def slots(self) -> Iterator[tuple[str, PartChoice]]:
        """Every slot with the part in it."""
        yield "attention.structure", self.attention.structure
        yield "attention.kernel", self.attention.kernel
        yield "kv_allocator", self.kv_allocator
        yield "scheduler", self.scheduler
        yield "quantizer.weights", self.quantizer.weights
        yield "quantizer.kv", self.quantizer.kv
        yield "prefix_cache", self.prefix_cache
        yield "prefix_cache.eviction", self.prefix_cache.eviction
        yield "drafter", self.drafter
        yield "context_reduction", self.context_reduction

    def registry(self) -> Registry:
        return Registry(self.plugin_path)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A slot resolved: the part's card and its options."""

    seam: str
    info: PluginInfo
    options: Options
    distribution: str
    version: str
    books_only: bool = False


def resolve(recipe: Recipe, registry: Registry) -> dict[str, Chosen]:
    """Every slot's card and options. RecipeError lists all that cannot be found, loaded or set, at once."""
    chosen: dict[str, Chosen] = {}
    problems: list[str] = []
    for seam, choice in recipe.slots():
        try:
            chosen[seam] = _chosen(registry, seam, choice)
            if choice.otherwise is not None:
                registry.find(seam, choice.otherwise)
        except PartError as error:
            problems.append(str(error))
        if choice.books_only and seam not in TWINS:
            problems.append(f"{seam} cannot be books_only; what can is {' and '.join(TWINS)}")
    if problems:
        raise RecipeError(_listed(f"recipe {recipe.name} cannot be built", problems))
    return chosen


def _chosen(registry: Registry, seam: str, choice: PartChoice) -> Chosen:
    info = registry.info(seam, choice.name)
    found = registry.find(seam, choice.name)
    options = registry.options(seam, choice.name, choice.options)
    return Chosen(seam, info, options, found.distribution, found.version, choice.books_only)


def settle(
    recipe: Recipe, chosen: Mapping[str, Chosen], registry: Registry, context: BuildContext
) -> tuple[dict[str, Chosen], list[str]]:
    """The parts with those that are unfit here replaced by what their slots name `otherwise`, and what was replaced,
    a sentence each."""
    settled, told = dict(chosen), []
    for seam, choice in recipe.slots():
        if choice.otherwise is None or choice.otherwise == choice.name:
            continue
        reasons = _unfit(chosen[seam], registry, context)
        if reasons:
            settled[seam] = _chosen(registry, seam, PartChoice(name=choice.otherwise, books_only=choice.books_only))
            told.append(f"{seam}={choice.otherwise} in place of {choice.name}: {'; '.join(reasons)}")
    return settled, told


def incompatibilities(
    chosen: Mapping[str, Chosen],
    registry: Registry,
    context: BuildContext,
    needs: Iterable[str] = (),
    gives: Iterable[str] = (),
) -> list[str]:
    """All reasons why these parts cannot work together or with a model that `needs` and `gives` capabilities."""
    given = {f"{part.seam}:{part.info.name}" for part in chosen.values()}.union(
        gives, *(part.info.provides for part in chosen.values())
    )
    reasons = []
    for part in chosen.values():
        label = f"{part.seam}={part.info.name}"
        missing = [need for need in sorted(part.info.requires) if not _met(need, given)]
        reasons += [f"{label} needs {need}, which nothing gives; {_offers(need, registry)}" for need in missing]
        clashes = [clash for clash in sorted(part.info.conflicts) if _met(clash, given - part.info.provides)]
        reasons += [f"{label} does not work with {clash}; change one of them" for clash in clashes]
        reasons += [f"{label}: {text}" for text in _unfit(part, registry, context)]
    reasons += [
        f"the model needs {need}, which nothing gives; {_offers(need, registry)}"
        for need in sorted(needs)
        if not _met(need, given)
    ]
    return reasons


def check(reasons: list[str], recipe: Recipe) -> None:
    """RecipeError with all reasons, if there are any."""
    if reasons:
        raise RecipeError(_listed(f"recipe {recipe.name} cannot work", reasons))


def parse_bytes(value: int | str, available: int) -> int:
    """Bytes from a number, a size or a share of `available` bytes. ValueError says what is readable."""
    if isinstance(value, int) and not isinstance(value, bool):
        number, unit = float(value), "B"
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z%]*)\s*", str(value))
        if not match:
            raise ValueError(f"cannot read {value!r} as a size; write 512MiB, 2GB or 25%")
        number, unit = float(match[1]), match[2] or "B"
    if unit == "%":
        if not 0 < number <= 100:
            raise ValueError(f"a share must be above 0% and at most 100%, not {value}")
        return int(available * number / 100)
    scale = {"b": 1} | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
    scale |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
    if unit.lower() not in scale:
        raise ValueError(f"unknown unit {unit!r} in {value!r}; write B, kB, MB, GB, KiB, MiB, GiB or %")
    size = int(number * scale[unit.lower()])
    if size < 1:
        raise ValueError(f"a size must be above 0, not {value!r}")
    return size


def kv_bytes(recipe: Recipe) -> int:
    """The bytes that the KV pools get. RecipeError: more than this machine has."""
    memory = psutil.virtual_memory()
    size = parse_bytes(recipe.memory.kv_bytes, memory.available)
    if size > memory.total:
        raise RecipeError(f"memory.kv_bytes is {size:,} bytes, but this machine has {memory.total:,}; ask for fewer")
    return size


def _met(need: str, given: set[str]) -> bool:
    return any(option in given or f"{option.split(':')[0]}:any" in given for option in need.split("|"))


def _offers(need: str, registry: Registry) -> str:
    offers = []
    for part in registry.all:
        if part.problem:
            continue
        try:
            provides = registry.info(part.seam, part.name).provides
        except PartError:
            continue
        if _met(need, {*provides, f"{part.seam}:{part.name}"}):
            offers.append(f"{part.seam}={part.name}")
    return f"try {' or '.join(sorted(set(offers)))}" if offers else "no installed part gives it"


def _unfit(part: Chosen, registry: Registry, context: BuildContext) -> list[str]:
    return list(registry.load(part.seam, part.info.name).unfit(part.options, context))


def _listed(head: str, items: list[str]) -> str:
    return f"{head}: {items[0]}" if len(items) == 1 else f"{head}:\n" + "\n".join(f"  - {item}" for item in items)

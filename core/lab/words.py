"""The lab's own words on a command line, apart from a recipe's: `workload=agents budget=4min output=study`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from core.lab import cost
from core.lab.errors import UsageError, unknown
from core.lab.plan import Price
from core.lab.workloads import WORKLOADS

SLOT_WORDS = ("recipe", "model", "memory", "engine", "server", "observers", "plugin_path")


@dataclass(frozen=True, slots=True)
class Words:
    """`lab`: values of the lab's words; `loads`: options by workload; `recipe`: everything else, as it came."""

    lab: dict[str, Any] = field(default_factory=dict)
    loads: dict[str, dict[str, Any]] = field(default_factory=dict)
    recipe: list[str] = field(default_factory=list)

    @property
    def recipe_name(self) -> str:
        return next((w.partition("=")[2] for w in self.recipe if w.startswith("recipe=")), "premium_chat")

    @property
    def overrides(self) -> list[str]:
        return [w for w in self.recipe if not w.startswith("recipe=")]


def split(words: Sequence[str], known: Collection[str]) -> Words:
    """Sorts words by who they are for. UsageError for one that is no `key=value`, or is given twice.

    `known` are the lab's words. A key with a dot belongs to what stands before it: `agents.n=4`,
    `workload.turns=2` (the one workload), `goodput.ttft=200`.
    """
    found = Words()
    seen: set[str] = set()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise UsageError(f"cannot read {word!r}: write key=value.")
        if key in seen:
            raise UsageError(f"{key} is given twice: give it once.")
        seen.add(key)
        head, _, option = key.partition(".")
        if key in known:
            found.lab[key] = value(text)
        elif option and head in ("workload", *WORKLOADS):
            _nest(found.loads.setdefault(head, {}), option, value(text))
        elif option and head in known:
            found.lab.setdefault(f"{head}.", {})[option] = value(text)
        else:
            _suspect(key, known)
            found.recipe.append(word)
    return found


def _suspect(key: str, known: Collection[str]) -> None:
    """A misspelt word of the lab would end up as an unknown key of the recipe, where no hint names it."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if near and key not in SLOT_WORDS:
        raise unknown("word", key, known)


def _nest(options: dict[str, Any], dotted: str, given: Any) -> None:
    *heads, last = dotted.split(".")
    for head in heads:
        options = options.setdefault(head, {})
    options[last] = given


def value(text: str) -> Any:
    """A word's value: a number, true or false, a list in brackets, or the text itself."""
    try:
        return yaml.safe_load(text) if text else ""
    except yaml.YAMLError:
        return text


def names(given: Any) -> list[str]:
    """`chat,agents` or `[chat,agents]` as a list."""
    if isinstance(given, str):
        return [name.strip() for name in given.split(",") if name.strip()]
    return [str(name) for name in given] if isinstance(given, list) else [str(given)]


def workloads(words: Words, default: str) -> dict[str, dict[str, Any]]:
    """Options by workload, of all workloads that `workload=` names. `path=`, `load=` and `load.X=` go to each."""
    chosen = names(words.lab.get("workload", default))
    general = dict(words.loads.get("workload", {}))
    if "path" in words.lab:
        general["path"] = words.lab["path"]
    load = dict(words.lab.get("load.", {}))
    if "load" in words.lab:
        load["process"] = words.lab["load"]
    if load:
        general["load"] = {**general.get("load", {}), **load}
    for name in words.loads:
        if name not in (*chosen, "workload"):
            raise UsageError(f"{name}.{next(iter(words.loads[name]))} is given, but workload={','.join(chosen)}.")
    return {name: {**general, **words.loads.get(name, {})} for name in chosen}


def targets(words: Words) -> dict[str, float]:
    """Milliseconds by latency name from `goodput.ttft=200`."""
    given: Mapping[str, Any] = words.lab.get("goodput.", {})
    for name, limit in given.items():
        if name not in ("ttft", "tpot", "e2e"):
            raise unknown("goodput target", name, ("ttft", "tpot", "e2e"))
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or limit <= 0:
            raise UsageError(f"goodput.{name} is a time in milliseconds, not {limit!r}.")
    return {name: float(limit) for name, limit in given.items()}


def price(words: Words) -> Price | None:
    """From `price=0.50` (dollars an hour) or `gpu=l4` (the planner's dated catalogue)."""
    own, gpu = words.lab.get("price"), words.lab.get("gpu")
    if own is not None and gpu is not None:
        raise UsageError("price and gpu both say what an hour costs: give one of them.")
    if gpu is not None:
        return cost.price_of(str(gpu))
    if own is None:
        return None
    if not isinstance(own, (int, float)) or isinstance(own, bool) or own <= 0:
        raise UsageError(f"price is dollars an hour, such as price=0.50, not {own!r}.")
    return Price(usd_per_hour=float(own))


def output(words: Words, kind: str) -> Path:
    """`output=DIR`, or a folder of its own under the user's data folder: nothing is left in the current one."""
    if "output" in words.lab:
        return Path(str(words.lab["output"])).expanduser()
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "partwise" / kind / datetime.now().strftime("%Y-%m-%d-%H%M%S")


def whole(words: Words, key: str, default: int, least: int = 1) -> int:
    """A whole number from the lab's words."""
    return natural(key, words.lab.get(key, default), least)


def natural(key: str, given: Any, least: int = 1) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < least:
        raise UsageError(f"{key} is a whole number from {least} on, not {given!r}.")
    return given


def yes(words: Words, key: str, default: bool = False) -> bool:
    given = words.lab.get(key, default)
    if not isinstance(given, bool):
        raise UsageError(f"{key} is true or false, not {given!r}.")
    return given

"""Recipes as a study sees them: which parts they switch on, whether they can work, which model they serve."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from core.compose import compose_words
from core.lab.designs import Arm, Switch
from core.lab.errors import UsageError, unknown
from core.models.source import ModelSpec, resolve
from core.recipe import PartChoice, Recipe
from core.recipe import resolve as resolve_parts
from core.types import PartwiseError

ORDER = (
    "quantizer.weights",
    "quantizer.kv",
    "kv_allocator",
    "scheduler",
    "prefix_cache",
    "prefix_cache.eviction",
    "drafter",
    "attention.structure",
    "context_reduction",
    "attention.kernel",
)
"""Slots in the order of the published ladder: weight quantization, paged KV, continuous batching, prefix cache,
speculation, fused attention. A kernel that fuses needs what stands before it, so it works at its rung."""


def compose(words: Sequence[str]) -> Recipe:
    """The recipe that the words of a command line make; UsageError says what is wrong with them."""
    return _composed(tuple(words))


@functools.cache
def _composed(words: tuple[str, ...]) -> Recipe:
    try:
        return compose_words(list(words))
    except PartwiseError as error:
        raise UsageError(str(error)) from None


def switches(recipe: str, overrides: Sequence[str], slots: Sequence[str] = ()) -> list[Switch]:
    """The parts in which a recipe differs from `baseline`, in the ladder's order or in that of `slots`.

    `slots` may name a slot by its last word. Words of `overrides` that fill or set a switched slot become the
    switch's own. UsageError for an unknown slot or one that holds a null part.
    """
    made = compose([f"recipe={recipe}", *overrides])
    full, null = _parts(made), _parts(compose(["recipe=baseline"]))
    chosen = [_slot(name) for name in slots] or [s for s in ORDER if full[s].name != null[s].name]
    for slot in chosen:
        if full[slot].name == null[slot].name:
            raise UsageError(f"{slot} is {null[slot].name} in {recipe} as in baseline: there is nothing to switch.")
    named = Counter(_title(full[slot]) for slot in chosen)
    own = {slot: [word for word in overrides if _slot_of(word) == slot] for slot in chosen}
    shared = {slot: made.registry().info(slot, null[slot].name).options.model_fields for slot in chosen}
    off = {slot: [f"{slot.replace('.', '/')}={null[slot].name}"] for slot in chosen}
    for slot in chosen:
        off[slot] += [word for word in own[slot] if _key(word).removeprefix(f"{slot}.") in shared[slot]]
    rest = [word for word in overrides if _slot_of(word) not in own]
    bottom = _parts(compose([f"recipe={recipe}", *rest, *itertools.chain.from_iterable(off.values())]))
    found = []
    for slot in chosen:
        part = _title(full[slot])
        left = [f"~{slot}.{option}" for option in bottom[slot].options if option not in shared[slot]]
        part = part if named[part] == 1 else f"{slot}={part}"
        found.append(Switch(slot, part, on=tuple(own[slot]), off=(*off[slot], *left)))
    return found


def _title(choice: PartChoice) -> str:
    return f"{choice.name} (books only)" if choice.books_only else choice.name


def common(overrides: Sequence[str], found: Sequence[Switch]) -> list[str]:
    """The words that no switch has made its own."""
    return [word for word in overrides if not any(word in switch.on for switch in found)]


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~").replace("/", ".")


def _slot_of(word: str) -> str | None:
    """The innermost slot that a word fills or sets."""
    key = _key(word)
    return max((s for s in ORDER if key == s or key.startswith(f"{s}.")), key=len, default=None)


def _slot(name: str) -> str:
    found = [s for s in ORDER if s == name or s.rpartition(".")[2] == name]
    if not found:
        raise unknown("slot", name, ORDER)
    return found[0]


def _parts(recipe: Recipe) -> dict[str, PartChoice]:
    return dict(recipe.slots())


def lossless(recipe: str, overrides: Sequence[str], found: Sequence[Switch]) -> tuple[str, ...]:
    """Names of the switched parts that say that they do not change greedy output."""
    made = compose([f"recipe={recipe}", *overrides])
    chosen = resolve_parts(made, made.registry())
    return tuple(s.part for s in found if "lossless" in chosen[s.slot].info.provides)


def reasons(words: Sequence[str]) -> list[str]:
    """Why a recipe cannot work, without loading weights; empty when it can."""
    from core import build  # torch, which a look at the words does not need

    try:
        return build.reasons(compose_words(list(words)))
    except PartwiseError as error:
        return [line.strip(" -") for line in str(error).splitlines() if line.strip()]


def different_settings(arm: Arm) -> list[str]:
    """Settings beside parts in which an arm whose parts are all null differs from `recipe=baseline`."""
    mine, theirs = _settings(compose(arm.words)), _settings(compose(["recipe=baseline"]))
    keys = sorted(mine.keys() | theirs.keys())
    return [f"{k} is {mine.get(k)}, not {theirs.get(k)}" for k in keys if mine.get(k) != theirs.get(k)]


def _settings(recipe: Recipe) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for slot, choice in recipe.slots():
        found |= {f"{slot}.{key}": value for key, value in choice.options.items() if not isinstance(value, Mapping)}
    for group in ("memory", "engine"):
        found |= {f"{group}.{key}": value for key, value in getattr(recipe, group).model_dump().items()}
    return found


def model_facts(words: Sequence[str]) -> dict[str, str]:
    """The model's name and the hash of its file, for the environment of a study."""
    try:
        source = resolve(ModelSpec(**compose(words).model))
    except PartwiseError as error:
        raise UsageError(str(error)) from None
    facts = {"name": source.name}
    if source.gguf is not None:
        with source.gguf.open("rb") as file:
            facts["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return facts

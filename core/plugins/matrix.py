"""Which parts work together, from what their cards say: a page of Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.interfaces import SEAMS, BuildContext
from core.recipe import Chosen, Recipe, incompatibilities
from core.registry import Registry

PAGE = Path(__file__).with_name("COMPATIBILITY.md")

Key = tuple[str, str]
"""A seam and a part's name."""


def page(registry: Registry, distribution: str | None = "partwise") -> str:
    """The page for the parts of one distribution; None: of all. A pair works if the other slots can be filled so that
    nothing speaks against it; what has to be filled in is said."""
    parts = _choices(registry, distribution)
    keys = list(parts)
    notes: dict[str, str] = {}
    cells = {(a, b): _cell(parts, registry, a, b, notes) for a, b in itertools.combinations_with_replacement(keys, 2)}
    cells |= {(b, a): cell for (a, b), cell in cells.items()}
    rows = [f"| {n} | {a[0]}={a[1]} | {' | '.join(cells[a, b] for b in keys)} |" for n, a in enumerate(keys, 1)]
    head = ["| | part | " + " | ".join(str(n) for n in range(1, len(keys) + 1)) + " |"]
    head.append("|---|---|" + "---|" * len(keys))
    return (
        "\n".join([*_ABOUT, *head, *rows, "", *(f"- {mark}: {note}" for note, mark in notes.items())]).rstrip() + "\n"
    )


_ABOUT = (
    "# Which parts work together",
    "",
    "Made by `python -m core.plugins matrix --write` from what each part's card provides, requires and conflicts with.",
    "A dot: the two work together. A letter: they do if another slot is filled as the note says, or not at all. Blank:",
    "one slot holds one part. What a model asks of parts (windows, sinks, a latent) is not here: that is checked when",
    "a recipe names the model.",
    "",
)


def _cell(parts: Mapping[Key, Chosen], registry: Registry, a: Key, b: Key, notes: dict[str, str]) -> str:
    if a[0] == b[0]:
        return " " if a != b else "="
    note = _note(parts, registry, a, b)
    if not note:
        return "·"
    return notes.setdefault(note, _letters(len(notes)))


def _note(parts: Mapping[Key, Chosen], registry: Registry, a: Key, b: Key) -> str:
    """Nothing if the pair works beside null parts; what else is needed, or why it cannot work."""
    reasons: list[str] = []
    hopeless = not all(_offered(need, parts) for key in (a, b) for need in parts[key].info.requires)
    for others in itertools.islice(_fillings(parts, a, b), 1 if hopeless else None):
        chosen = {seam: parts[seam, name] for seam, name in (*others, a, b)}
        found = incompatibilities(chosen, registry, BuildContext())
        if not found:
            changed = [f"{seam}={name}" for seam, name in others if name != _null()[seam]]
            return f"with {' and '.join(changed)}" if changed else ""
        reasons = reasons or found
    return "; ".join(sorted(reasons))


def _offered(need: str, parts: Mapping[Key, Chosen]) -> bool:
    """Whether any part gives what another needs."""
    offers = {name for part in parts.values() for name in (*part.info.provides, f"{part.seam}:{part.info.name}")}
    return not offers.isdisjoint(need.split("|"))


def _fillings(parts: Mapping[Key, Chosen], a: Key, b: Key) -> Iterator[list[Key]]:
    """The other slots with null parts, then with one and with two of them filled otherwise."""
    null = {seam: name for seam, name in _null().items() if seam not in (a[0], b[0])}
    yield list(null.items())
    changes = [key for key in parts if key[0] in null and null[key[0]] != key[1]]
    for some in itertools.chain(itertools.combinations(changes, 1), itertools.combinations(changes, 2)):
        if len({seam for seam, _ in some}) == len(some):
            yield list({**null, **dict(some)}.items())


def _choices(registry: Registry, distribution: str | None) -> dict[Key, Chosen]:
    found = {}
    for part in sorted(registry.all, key=lambda part: (list(SEAMS).index(part.seam), part.name)):
        if distribution in (None, part.distribution):
            card = registry.info(part.seam, part.name)
            options = registry.options(part.seam, part.name, {})
            found[part.seam, part.name] = Chosen(part.seam, card, options, part.distribution, part.version)
    return found


def _null() -> dict[str, str]:
    """The parts that a recipe has when it names none."""
    return {seam: choice.name for seam, choice in Recipe(model={}).slots()}


def _letters(n: int) -> str:
    return chr(ord("a") + n) if n < 26 else _letters(n // 26 - 1) + _letters(n % 26)

"""Which arms a study runs, and which weighted sums of them are its effects.

A switch turns one part of the recipe on (the recipe's part) or off (the null part of its slot). A design maps
switches to arms and effects; all arithmetic is on the log scale, so effects are ratios and interactions are
departures from multiplying. Two-level fractions follow Box, Hunter and Hunter, Statistics for Experimenters:
added factors are products of the base factors, chosen for the longest shortest word of the defining relation.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from core.lab.errors import UsageError, unknown

EffectKind = Literal["step", "total", "main", "interaction", "noise"]
MOST_FACTORS = 10
AGAIN = " (again)"


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration of a study: a recipe and the words that change it."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return [f"recipe={self.recipe}", *self.overrides]


@dataclass(frozen=True, slots=True)
class Switch:
    """One part under study: `part` in `slot`, and the words that put the recipe's or the null part there."""

    slot: str
    part: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Effect:
    """`weights` by arm name; their sum over log measurements is the effect. They add to zero."""

    name: str
    kind: EffectKind
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Design:
    """`reference` is the arm that is run twice for the noise floor and that quality is compared with.
    `slots`: where each switched part stands. `levels` and `parts` are a factorial's signs by arm, and the parts they
    switch."""

    name: str
    arms: tuple[Arm, ...]
    effects: tuple[Effect, ...]
    reference: str
    notes: tuple[str, ...] = ()
    slots: Mapping[str, str] = field(default_factory=dict)
    parts: tuple[str, ...] = ()
    levels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def without(self, missing: Set[str]) -> Design:
        """What is left to learn when the arms named in `missing` cannot run."""
        arms = tuple(a for a in self.arms if a.name not in missing)
        effects = tuple(e for e in self.effects if not missing & e.weights.keys())
        notes = self.notes
        if self.levels and missing & self.levels.keys():
            left = {name: row for name, row in self.levels.items() if name not in missing}
            fitted, notes = factorial_effects(self.parts, left) if left else ((), ())
            effects = (*fitted, *(e for e in effects if e.kind == "noise"))
        return replace(self, arms=arms, effects=effects, notes=notes)


def build(name: str, recipe: str, switches: Sequence[Switch], fraction: int = 0) -> Design:
    """The design called `name` over `switches`, in their order.

    `fraction`: p of a 1/2^p fraction, for `factorial` only. UsageError for an unknown name, no switches, or
    too many factors.
    """
    if name not in (*ONE_BY_ONE, "factorial"):
        raise unknown("design", name, (*ONE_BY_ONE, "factorial", "pair"))
    if not switches:
        raise UsageError(
            f"recipe {recipe!r} differs from its null parts nowhere, so {name} has nothing to switch: "
            "name another recipe, or the parts with parts=[slot,...]."
        )
    if fraction and name != "factorial":
        raise UsageError(f"fraction={fraction} is for design=factorial; {name} has no fractions.")
    made = _factorial(recipe, switches, fraction) if name == "factorial" else ONE_BY_ONE[name](recipe, switches)
    return replace(made, slots={s.part: s.slot for s in switches})


def pair(a: Arm, b: Arm) -> Design:
    """B against A."""
    return _with_noise_floor("pair", [a, b], [Effect(b.name, "step", {b.name: 1.0, a.name: -1.0})], a)


def _arm(name: str, recipe: str, switches: Sequence[Switch], on: Sequence[bool]) -> Arm:
    chosen = [switch.on if is_on else switch.off for switch, is_on in zip(switches, on, strict=True)]
    return Arm(name, recipe, tuple(itertools.chain.from_iterable(chosen)))


def _ladder(recipe: str, switches: Sequence[Switch]) -> Design:
    names = ["baseline", *(f"+ {s.part}" for s in switches)]
    k = len(switches)
    arms = [_arm(n, recipe, switches, [i < rung for i in range(k)]) for rung, n in enumerate(names)]
    steps = [
        Effect(s.part, "step", {above: 1.0, below: -1.0})
        for s, below, above in zip(switches, names, names[1:], strict=False)
    ]
    total = Effect(f"{recipe} over baseline", "total", {names[-1]: 1.0, names[0]: -1.0})
    return _with_noise_floor("ladder", arms, [*steps, total] if k > 1 else steps, arms[0])


def _leave_one_out(recipe: str, switches: Sequence[Switch]) -> Design:
    full = Arm(recipe, recipe, tuple(w for s in switches for w in s.on))
    arms, effects = [full], []
    for i, switch in enumerate(switches):
        arm = _arm(f"without {switch.part}", recipe, switches, [j != i for j in range(len(switches))])
        arms.append(arm)
        effects.append(Effect(switch.part, "step", {full.name: 1.0, arm.name: -1.0}))
    return _with_noise_floor("leave_one_out", arms, effects, full)


def _one_at_a_time(recipe: str, switches: Sequence[Switch]) -> Design:
    baseline = _arm("baseline", recipe, switches, [False] * len(switches))
    arms, effects = [baseline], []
    for i, switch in enumerate(switches):
        arm = _arm(f"only {switch.part}", recipe, switches, [j == i for j in range(len(switches))])
        arms.append(arm)
        effects.append(Effect(switch.part, "step", {arm.name: 1.0, baseline.name: -1.0}))
    return _with_noise_floor("one_at_a_time", arms, effects, baseline)


ONE_BY_ONE: dict[str, Callable[[str, Sequence[Switch]], Design]] = {
    "ladder": _ladder,
    "leave_one_out": _leave_one_out,
    "one_at_a_time": _one_at_a_time,
}


def _with_noise_floor(name: str, arms: Iterable[Arm], effects: Iterable[Effect], reference: Arm) -> Design:
    again = Arm(reference.name + AGAIN, reference.recipe, reference.overrides)
    noise = Effect("A/A", "noise", {again.name: 1.0, reference.name: -1.0})
    return Design(name, (*arms, again), (*effects, noise), reference.name)


def fraction_columns(k: int, p: int) -> NDArray[np.int_]:
    """Signs (-1 off, 1 on) [2^(k-p) runs, k factors] of the 1/2^p fraction of highest resolution.

    UsageError when no fraction of at least resolution III exists.
    """
    base = k - p
    runs = np.array(list(itertools.product((-1, 1), repeat=base)), dtype=np.int_)
    words = [set(c) for size in range(base, 1, -1) for c in itertools.combinations(range(base), size)]
    best = max(itertools.combinations(words, p), key=lambda chosen: _resolution(chosen, base), default=None)
    if best is None:
        raise UsageError(f"{k} parts have no 1/{2**p} fraction: use a smaller fraction or more parts.")
    return np.column_stack([runs, *(runs[:, sorted(word)].prod(axis=1) for word in best)])


def _resolution(generators: Sequence[set[int]], base: int) -> tuple[int, int]:
    """Length of the shortest word in the defining relation, then minus the count of such words."""
    full = [word | {base + i} for i, word in enumerate(generators)]
    lengths = [
        len(functools.reduce(set.symmetric_difference, chosen))
        for size in range(1, len(full) + 1)
        for chosen in itertools.combinations(full, size)
    ]
    return (min(lengths), -lengths.count(min(lengths))) if lengths else (0, 0)


def _factorial(recipe: str, switches: Sequence[Switch], fraction: int) -> Design:
    k = len(switches)
    if not 2 <= k <= MOST_FACTORS:
        raise UsageError(f"factorial takes 2 to {MOST_FACTORS} parts, not {k}: choose with parts=[slot,...].")
    if not 0 <= fraction <= k - 2:
        raise UsageError(f"fraction={fraction} is not possible with {k} parts: use 0 to {k - 2}.")
    signs = fraction_columns(k, fraction)
    arms = [_arm(_cell_name(switches, row), recipe, switches, [x > 0 for x in row]) for row in signs]
    levels = {arm.name: tuple(int(x) for x in row) for arm, row in zip(arms, signs, strict=True)}
    effects, notes = factorial_effects([s.part for s in switches], levels)
    reference = arms[int(signs.sum(axis=1).argmin())]
    made = _with_noise_floor("factorial", arms, effects, reference)
    return replace(made, notes=notes, parts=tuple(s.part for s in switches), levels=levels)


def _cell_name(switches: Sequence[Switch], row: NDArray[np.int_]) -> str:
    return " + ".join(s.part for s, sign in zip(switches, row, strict=True) if sign > 0) or "baseline"


def factorial_effects(
    parts: Sequence[str], levels: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Effect, ...], tuple[str, ...]]:
    """Main effects and pairwise interactions from `levels` (arm name to signs), and notes on what they hide.

    A main effect is the mean log ratio of on over off; an interaction is by how much two parts together
    differ from the product of their separate gains. Least squares on both kinds of term, so arms may be
    missing; of terms that the arms cannot tell apart the first is kept, and a note says so.
    """
    signs = np.array(list(levels.values()), dtype=np.float64)
    terms = [(i,) for i in range(len(parts))] + list(itertools.combinations(range(len(parts)), 2))
    kept: dict[str, NDArray[np.float64]] = {"the mean of all arms": np.ones(len(signs))}
    size: dict[str, int] = {}
    notes = []
    for term in terms:
        name = " x ".join(parts[i] for i in term)
        column = signs[:, list(term)].prod(axis=1)
        twin = next((n for n, c in kept.items() if abs(c @ column) == len(column)), None)
        if twin:
            notes.append(f"{twin} and {name} cannot be told apart by these arms")
        else:
            kept[name], size[name] = column, len(term)
    matrix = np.column_stack(list(kept.values()))
    inverse = np.linalg.pinv(matrix)
    reached = np.diagonal(inverse @ matrix)
    effects = []
    for i, (name, order) in enumerate(size.items(), start=1):
        if not np.isclose(reached[i], 1.0):
            notes.append(f"{name} cannot be told from the others by these arms")
            continue
        scaled = zip(levels, 2.0**order * inverse[i], strict=True)
        weights = {arm: float(w) for arm, w in scaled if abs(w) > 1e-12}
        effects.append(Effect(name, "main" if order == 1 else "interaction", weights))
    return tuple(effects), tuple(notes)

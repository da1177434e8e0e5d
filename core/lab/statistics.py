"""Effects with their uncertainty: paired over blocks, on the log scale, through scipy.

Every block runs every arm once, in random order, so whatever the machine does slowly falls out of the
differences inside a block. An effect is a weighted sum of log measurements whose weights add to zero; its
value in each block is one independent observation, and Student's t over the blocks gives the interval. No
variance is pooled between arms: a noisy arm widens its own intervals only.

Looks. A study looks after every block and stops an effect when its interval is narrow enough. The rule asks
for width, never for the sign, so it cannot hunt for significance; what is left is that stopping prefers a
variance that came out small. Two things make up for it: one more block is run after the rule is met, and what
could have been stopped is held to `LOOK_LEVEL` instead of 95 %. Simulated over noise of 0.5 to 10 %, effects of
0 to 35 % and budgets of 3 to 60 blocks, the reported intervals then cover in 94.7 to 97.5 % of studies.

Many effects. "Real" is decided by the procedure of Benjamini and Hochberg (1995) over all effects of one
metric in a study: of the effects called real, at most 5 % are expected not to be.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95
LOOK_LEVEL = 0.97
MIN_BLOCKS = 4
"""Blocks before an effect may stop by its width; a budget may end a study sooner."""
CONFIRMING_BLOCKS = 1
LARGE = 0.25
"""An effect is also known well enough when its half width is under this share of it."""
FLOAT_NOISE = 1e-12
"""Spread of logarithms below which values are equal."""

Array = NDArray[np.float64]
Kind = Literal["real", "none", "undecided"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """An effect on the log scale: mean over `n` blocks, its 95 % interval, p of "no effect"."""

    mean: float
    low: float
    high: float
    p: float
    sd: float
    n: int

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """`excluded`: the largest effect that the interval rules out, as a ratio (0.03 is 3 %), for "none".
    `runs_needed`: blocks in all after which the effect would be decided, for "undecided"."""

    kind: Kind
    excluded: float | None = None
    runs_needed: int | None = None


def level(n: int) -> float:
    """Nominal level of an interval over `n` blocks: higher once an earlier look could have stopped it."""
    return LEVEL if n <= MIN_BLOCKS else LOOK_LEVEL


def t_interval(values: Array) -> tuple[Array, Array, Array, Array]:
    """Mean, low, high and p over the last axis of `values` [..., n blocks]; nan bounds under two blocks.

    Interval and p make up for the looks taken so far. Equal values throughout are an exact result: a point
    interval, with p 1 at zero and 0 elsewhere.
    """
    mean = values.mean(axis=-1)
    if values.shape[-1] < 2:
        nothing = np.full_like(mean, np.nan)
        return mean, nothing, nothing, np.ones_like(mean)
    exact = np.ptp(values, axis=-1) < FLOAT_NOISE
    spread = np.where(exact[..., None], np.arange(values.shape[-1]), values)
    test = stats.ttest_1samp(spread, 0.0, axis=-1)
    interval = test.confidence_interval(level(values.shape[-1]))
    low = np.where(exact, mean, interval.low)
    high = np.where(exact, mean, interval.high)
    looks = (1 - LEVEL) / (1 - level(values.shape[-1]))
    p = np.where(exact, np.where(np.abs(mean) < FLOAT_NOISE, 1.0, 0.0), np.minimum(1.0, test.pvalue * looks))
    return mean, low, high, p


def estimate(values: Sequence[float] | Array) -> Estimate:
    """The estimate from one effect's values, one a block, on the log scale."""
    array = np.asarray(values, dtype=np.float64)
    mean, low, high, p = t_interval(array)
    sd = float(array.std(ddof=1)) if array.size > 1 else math.nan
    return Estimate(float(mean), float(low), float(high), float(p), sd, array.size)


def narrow(mean: Array, low: Array, high: Array, resolution: float) -> NDArray[np.bool_]:
    """Is the interval narrow enough? `resolution`: wanted half width on the log scale."""
    return (high - low) / 2 <= np.maximum(resolution, LARGE * np.abs(mean))


def stopping_block(values: Array, resolution: float) -> NDArray[np.int_]:
    """Blocks [...] after which the stopping rule lets each effect in `values` [..., n] rest: `CONFIRMING_BLOCKS`
    after its interval was narrow enough at a look; 0 when it has to go on."""
    n_blocks = values.shape[-1]
    stop = np.zeros(values.shape[:-1], dtype=np.int_)
    for n in range(MIN_BLOCKS, n_blocks + 1 - CONFIRMING_BLOCKS):
        mean, low, high, _ = t_interval(values[..., :n])
        stop[(stop == 0) & narrow(mean, low, high, resolution)] = n + CONFIRMING_BLOCKS
    return stop


def adjusted(p_values: Sequence[float] | Array) -> Array:
    """p-values adjusted for looking at several effects (Benjamini and Hochberg, 1995), last axis."""
    return np.asarray(stats.false_discovery_control(np.asarray(p_values, dtype=np.float64), axis=-1))


def verdict(effect: Estimate, adjusted_p: float, margin: float) -> Verdict:
    """Reads an estimate. `margin`: the effect (log scale) below which a difference does not matter."""
    if adjusted_p <= 1 - LEVEL:
        return Verdict("real")
    bound = max(abs(effect.low), abs(effect.high))
    if bound <= margin:
        return Verdict("none", excluded=math.expm1(bound))
    return Verdict("undecided", runs_needed=runs_needed(effect, margin))


def runs_needed(effect: Estimate, margin: float, most: int = 100_000) -> int | None:
    """Blocks in all after which the interval would exclude either zero or `margin`, if mean and spread stay
    as they are; None when they are not known yet or `most` would not do."""
    if not math.isfinite(effect.sd) or effect.sd < FLOAT_NOISE:
        return None
    wanted = max(abs(effect.mean), margin - abs(effect.mean))

    def decides(n: int) -> bool:
        return bool(stats.t.ppf((1 + level(n)) / 2, n - 1) * effect.sd / math.sqrt(n) < wanted)

    choices = range(max(effect.n + 1, 2), most)
    found = bisect.bisect_left(choices, True, key=decides)
    return choices[found] if found < len(choices) else None


@dataclass(frozen=True, slots=True)
class Difference:
    """An effect in study A against the same effect in study B, on the log scale (Welch's t)."""

    change: float
    p: float


def compare(a: Estimate, b: Estimate) -> Difference:
    """How an effect changed from study `a` to study `b`."""
    if min(a.n, b.n) < 2 or max(a.sd, b.sd) < FLOAT_NOISE:
        return Difference(b.mean - a.mean, 1.0 if math.isclose(a.mean, b.mean) else math.nan)
    test = stats.ttest_ind_from_stats(a.mean, a.sd, a.n, b.mean, b.sd, b.n, equal_var=False)
    return Difference(b.mean - a.mean, float(test.pvalue))

"""The statistics on simulated studies whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from core.lab import statistics
from core.lab.statistics import adjusted, compare, estimate, runs_needed, stopping_block, t_interval, verdict

MARGIN = math.log1p(0.05)
RESOLUTION = MARGIN / 2
STUDIES = 2000


def stopped(values):
    """Blocks [studies] after which the stopping rule ends each study of `values` [studies, most blocks]."""
    ends = stopping_block(values, RESOLUTION)
    return np.where(ends == 0, values.shape[1], ends)


def intervals(values, ends):
    """Mean, low, high, p [studies] of each study at its own end."""
    found = np.empty((4, len(values)))
    for n in np.unique(ends):
        chosen = ends == n
        found[:, chosen] = t_interval(values[chosen, :n])
    return found


def noise(rng, shape, sd, kind):
    if kind == "normal":
        return rng.normal(0, sd, shape)
    return rng.standard_t(4, shape) / math.sqrt(2) * sd


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("budget", [3, 6, 30])
@pytest.mark.parametrize("sd", [0.01, 0.03, 0.05, 0.1])
@pytest.mark.parametrize("effect", [0.0, 0.1, 0.35])
def test_intervals_cover_as_often_as_they_claim(kind, budget, sd, effect):
    rng = np.random.default_rng([budget, int(sd * 100), int(effect * 100), kind == "heavy"])
    values = effect + noise(rng, (STUDIES, budget), sd, kind)
    _, low, high, _ = intervals(values, stopped(values))
    covered = np.mean((low <= effect) & (effect <= high))
    assert 0.92 <= covered <= (0.98 if kind == "normal" else 0.985), covered


@pytest.mark.parametrize("kind", ["normal", "heavy"])
@pytest.mark.parametrize("budget", [3, 6, 12, 40])
@pytest.mark.parametrize("sd", [0.005, 0.02, 0.04, 0.06, 0.1])
def test_an_arm_against_itself_is_seldom_called_real(kind, budget, sd):
    rng = np.random.default_rng([7, budget, int(sd * 1000), kind == "heavy"])
    values = noise(rng, (STUDIES, budget), sd, kind)
    p = intervals(values, stopped(values))[3]
    assert np.mean(p <= 1 - statistics.LEVEL) <= 0.06


def test_looking_at_every_block_without_the_rule_would_lie():
    """The danger is there: stopping when p is small would call far more A/A studies real."""
    rng = np.random.default_rng(3)
    values = rng.normal(0, 0.05, (STUDIES, 30))
    real = np.zeros(STUDIES, bool)
    for n in range(3, 31):
        real |= t_interval(values[:, :n])[3] <= 0.05
    assert real.mean() > 0.2


def ladder_values(rng, effects, sd, blocks):
    """Step effects [studies, steps, blocks] of a ladder whose rungs share arms, in a machine that drifts."""
    rungs = np.concatenate([[0.0], np.cumsum(effects)])
    arms = rungs[:, None] + rng.normal(0, sd, (STUDIES, len(rungs), blocks))
    arms += np.cumsum(rng.normal(0, 0.2, (STUDIES, 1, blocks)), axis=-1)
    return np.diff(arms, axis=1)


@pytest.mark.parametrize("truth", [[0.0] * 8, [0.5, 0.0, 0.3, 0.0, 0.0, 0.8, 0.0, 0.4]])
def test_false_reals_among_many_effects_stay_rare(truth):
    """Of what is called real at most 5 % is false on average, though steps of a ladder share arms."""
    truth = np.array(truth)
    values = ladder_values(np.random.default_rng(11), truth, 0.04, 6)
    called = adjusted(t_interval(values)[3]) <= 1 - statistics.LEVEL
    false = (called & (truth == 0)).sum(axis=1) / np.maximum(1, called.sum(axis=1))
    assert false.mean() <= 0.05
    if truth.any():
        assert called[:, truth >= 0.5].mean() > 0.95


def test_drift_between_blocks_falls_out():
    values = ladder_values(np.random.default_rng(5), np.array([0.1, 0.0]), 0.02, 6)
    _, low, high, _ = t_interval(values)
    covered = np.mean((low <= [0.1, 0.0]) & (high >= [0.1, 0.0]))
    assert 0.95 <= covered <= 0.985
    assert np.median(high - low) < 0.15, "the drift of 20 % a block is not in the intervals"


@pytest.mark.parametrize("truth", [0.0, 0.015])
def test_none_is_seldom_wrong_and_is_reached(truth):
    rng = np.random.default_rng(2)
    values = rng.normal(truth, 0.04, (120, 60))
    ends = stopped(values)
    kinds = []
    for row, n in zip(values, ends, strict=True):
        e = estimate(row[:n])
        v = verdict(e, e.p, MARGIN)
        kinds.append(v.kind)
        if v.kind == "none":
            assert math.log1p(v.excluded) <= MARGIN + 1e-12
            assert v.excluded >= math.expm1(abs(e.mean))
    assert kinds.count("none") > (0.8 if truth == 0 else 0.3) * 120
    at_margin = rng.normal(MARGIN, 0.04, (400, 20))
    wrong = [verdict(e, 1.0, MARGIN).kind == "none" for e in map(estimate, at_margin)]
    assert np.mean(wrong) <= 0.04


def test_undecided_says_how_many_blocks_would_decide():
    e = estimate([0.12, -0.09, 0.06, -0.05, 0.03])
    v = verdict(e, 0.5, MARGIN)
    assert v.kind == "undecided" and v.runs_needed > 6
    n, wanted = v.runs_needed, max(abs(e.mean), MARGIN - abs(e.mean))
    half = [stats.t.ppf((1 + statistics.LOOK_LEVEL) / 2, k - 1) * e.sd / math.sqrt(k) for k in (n - 1, n)]
    assert half[1] < wanted <= half[0]
    assert runs_needed(estimate([0.1]), MARGIN) is None, "one block tells nothing of the spread"


def test_the_t_interval_is_scipys():
    values = np.random.default_rng(1).normal(0.2, 0.1, 7)
    e = estimate(values)
    test = stats.ttest_1samp(values, 0.0)
    interval = test.confidence_interval(statistics.LOOK_LEVEL)
    assert (e.low, e.high, e.p) == pytest.approx((interval.low, interval.high, test.pvalue * 5 / 3))
    first = stats.ttest_1samp(values[:4], 0.0)
    assert estimate(values[:4]).p == pytest.approx(first.pvalue)
    assert estimate(values[:4]).low == pytest.approx(first.confidence_interval(0.95).low)
    assert e.half_width == pytest.approx((e.high - e.low) / 2)


def test_exact_results_need_no_interval():
    same = estimate([0.0, 0.0, 0.0])
    assert (same.low, same.high, same.p) == (0.0, 0.0, 1.0)
    assert verdict(same, same.p, MARGIN) == statistics.Verdict("none", excluded=0.0)
    shifted = estimate([0.3, 0.3 + 1e-15, 0.3])
    assert shifted.p == 0.0 and shifted.low == pytest.approx(0.3)
    one = estimate([0.3])
    assert math.isnan(one.low) and verdict(one, one.p, MARGIN).kind == "undecided"


def test_two_studies_are_compared_by_welch():
    rng = np.random.default_rng(4)
    a, b = rng.normal(0.1, 0.02, 6), rng.normal(0.3, 0.05, 9)
    found = compare(estimate(a), estimate(b))
    assert found.p == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue)
    assert found.change == pytest.approx(b.mean() - a.mean())
    null = [compare(estimate(rng.normal(0, 0.03, 5)), estimate(rng.normal(0, 0.06, 5))).p for _ in range(500)]
    assert np.mean(np.array(null) <= 0.05) <= 0.08


def test_an_effect_rests_after_enough_blocks_and_one_more():
    narrow = np.array([0.5, 0.501, 0.499, 0.5, 0.5, 0.5])
    assert stopping_block(narrow[:3], RESOLUTION) == 0
    assert stopping_block(narrow[:4], RESOLUTION) == 0, "narrow, but not confirmed by another block"
    assert stopping_block(narrow[:5], RESOLUTION) == 5
    assert stopping_block(narrow, RESOLUTION) == 5
    wide = np.array([0.0, 0.4, -0.3, 0.2, 0.1, -0.2])
    assert stopping_block(wide, RESOLUTION) == 0

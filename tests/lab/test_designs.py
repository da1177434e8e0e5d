import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.lab.designs import AGAIN, Arm, Switch, build, fraction_columns, pair
from core.lab.errors import UsageError

PARTS = ["int8", "paged", "continuous", "radix", "ngram", "sdpa"]


def switches(k):
    return [Switch(f"slot{i}", p, (f"slot{i}={p}",), (f"slot{i}=none",)) for i, p in enumerate(PARTS[:k])]


def measured(design, gains, synergies=None):
    """Log measurements of each arm for parts with known gains and pairwise synergies."""
    values = {}
    for arm in design.arms:
        on = {p for p in gains if any(w.endswith(f"={p}") for w in arm.overrides)}
        values[arm.name] = sum(math.log(gains[p]) for p in on)
        values[arm.name] += sum(math.log(s) for pair_, s in (synergies or {}).items() if set(pair_) <= on)
    return values


def value(effect, logs):
    return sum(w * logs[arm] for arm, w in effect.weights.items())


def effects(design):
    return {e.name: e for e in design.effects}


def test_ladder_adds_one_part_at_a_time_in_order():
    d = build("ladder", "full", switches(3))
    assert [a.name for a in d.arms] == ["baseline", "+ int8", "+ paged", "+ continuous", f"baseline{AGAIN}"]
    assert d.arms[2].words == ["recipe=full", "slot0=int8", "slot1=paged", "slot2=none"]
    logs = measured(d, {"int8": 2.0, "paged": 1.5, "continuous": 3.0})
    assert math.exp(value(effects(d)["paged"], logs)) == pytest.approx(1.5)
    assert math.exp(value(effects(d)["full over baseline"], logs)) == pytest.approx(9.0)


def test_leave_one_out_and_one_at_a_time_tell_synergy_apart():
    gains, synergy = {"int8": 2.0, "paged": 1.5, "continuous": 3.0}, {("int8", "paged"): 1.25}
    out = build("leave_one_out", "full", switches(3))
    assert math.exp(value(effects(out)["int8"], measured(out, gains, synergy))) == pytest.approx(2.0 * 1.25)
    alone = build("one_at_a_time", "full", switches(3))
    assert math.exp(value(effects(alone)["int8"], measured(alone, gains, synergy))) == pytest.approx(2.0)
    assert out.reference == "full" and alone.reference == "baseline"


@pytest.mark.parametrize("k,fraction", [(2, 0), (3, 0), (4, 0), (5, 1), (6, 1)])
def test_factorial_finds_mains_and_interactions(k, fraction):
    d = build("factorial", "full", switches(k), fraction)
    assert len(d.arms) == 2 ** (k - fraction) + 1
    gains = dict(zip(PARTS[:k], (2.0, 1.5, 3.0, 1.1, 0.9, 1.3), strict=False))
    logs = measured(d, gains, {("int8", "paged"): 1.25})
    found = effects(d)
    assert len(found) == k + k * (k - 1) // 2 + 1 and not d.notes
    assert math.exp(value(found["int8 x paged"], logs)) == pytest.approx(1.25)
    others = [e for e in d.effects if e.kind == "interaction" and e.name != "int8 x paged"]
    assert all(value(e, logs) == pytest.approx(0, abs=1e-9) for e in others)
    half = math.sqrt(1.25)
    assert math.exp(value(found["int8"], logs)) == pytest.approx(2.0 * half), "half of it when the other is on"
    for name in set(PARTS[2:k]):
        assert math.exp(value(found[name], logs)) == pytest.approx(gains[name])


def test_coarse_fractions_say_what_they_cannot_tell_apart():
    d = build("factorial", "full", switches(3), fraction=1)
    assert len(d.arms) == 5
    assert any("int8" in note and "cannot be told apart" in note for note in d.notes)


@given(st.integers(2, 7), st.integers(0, 3))
def test_fractions_are_balanced(k, p):
    if p > k - 2:
        return
    try:
        columns = fraction_columns(k, p)
    except UsageError:
        return
    assert columns.shape == (2 ** (k - p), k)
    assert (columns.sum(axis=0) == 0).all() or p == 0
    for i, j in itertools.combinations(range(k), 2):
        assert abs(columns[:, i] @ columns[:, j]) < len(columns), "two factors would be one"
    assert (columns == 1).all(axis=1).any(), "the whole recipe is among the arms"


def test_half_fraction_of_five_is_of_resolution_five():
    columns = fraction_columns(5, 1)
    pairs = [columns[:, i] * columns[:, j] for i, j in itertools.combinations(range(5), 2)]
    every = np.column_stack([columns, *pairs])
    assert np.allclose(every.T @ every, len(columns) * np.eye(15))


def test_missing_arms_leave_what_can_still_be_known():
    ladder = build("ladder", "full", switches(3)).without({"+ paged"})
    assert {e.name for e in ladder.effects} == {"int8", "full over baseline", "A/A"}
    full = build("factorial", "full", switches(3))
    holed = full.without({"int8 + paged"})
    logs = measured(holed, {"int8": 2.0, "paged": 1.5, "continuous": 3.0}, {("paged", "continuous"): 0.8})
    found = effects(holed)
    assert math.exp(value(found["paged x continuous"], logs)) == pytest.approx(0.8)
    assert "int8 + paged" not in {arm for e in holed.effects for arm in e.weights}


@given(st.sampled_from(["ladder", "leave_one_out", "one_at_a_time", "factorial"]), st.integers(2, 5))
def test_every_design_is_a_set_of_contrasts_with_a_noise_floor(name, k):
    d = build(name, "full", switches(k))
    names = [a.name for a in d.arms]
    assert len(set(names)) == len(names)
    for e in d.effects:
        assert sum(e.weights.values()) == pytest.approx(0, abs=1e-9)
        assert set(e.weights) <= set(names)
    noise = [e for e in d.effects if e.kind == "noise"]
    assert len(noise) == 1
    twins = [a for a in d.arms if a.name in noise[0].weights]
    assert twins[0].words == twins[1].words


def test_pair():
    d = pair(Arm("a", "baseline"), Arm("b", "premium_chat", ("drafter=none",)))
    assert value(effects(d)["b"], {"a": 1.0, "b": 3.0}) == 2.0


@pytest.mark.parametrize(
    "call,says",
    [
        (lambda: build("laddr", "full", switches(2)), "did you mean 'ladder'"),
        (lambda: build("ladder", "full", []), "nothing to switch"),
        (lambda: build("ladder", "full", switches(3), 1), "is for design=factorial"),
        (lambda: build("factorial", "full", switches(1)), "2 to 10 parts"),
        (lambda: build("factorial", "full", switches(3), 2), "use 0 to 1"),
    ],
)
def test_bad_designs_are_refused(call, says):
    with pytest.raises(UsageError, match=says):
        call()

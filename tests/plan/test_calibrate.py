"""Calibration against a machine whose true efficiencies are known, and against itself."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from core.plan import Efficiency, Load, PlanError, Roofline, load_device, load_model, make_plan
from core.plan.calibrate import (
    FITTED,
    Point,
    Run,
    calibration_table,
    fit,
    load_calibration,
    measure_machine,
    measure_steps,
    measured,
)
from core.plan.catalogue import Device
from core.plan.figures import assumed
from core.plan.recipe import Recipe

MODEL = load_model("smollm2-135m")
RECIPE = Recipe(weights="fp32", kv="fp32")
MACHINE = (measured(24e9, "B", ""), measured(28e9, "B/s", ""), measured(150e9, "op/s", ""))
TRUE = {
    "bandwidth": 0.7, "rate": 0.5, "kv_bandwidth": 0.3, "attention_rate": 0.1,
    "overhead": 4e-3, "sequence_overhead": 2e-4,
}  # fmt: skip
GRID = [(b, c) for b in (1, 2, 4, 8, 16, 32) for c in (128, 256, 512, 1024, 2048)]


def true_machine() -> Roofline:
    memory, bandwidth, rate = MACHINE
    device = Device("true", "", memory, bandwidth, {"bf16": rate, "fp32": rate})
    start = Efficiency()
    figures = {n: assumed(v, getattr(start, n).unit, "") for n, v in TRUE.items()}
    return Roofline(MODEL, device, RECIPE, start.model_copy(update=figures))


def points(noise: float, grid: list[tuple[int, int]]) -> list[Point]:
    rng, true = np.random.default_rng(0), true_machine()
    out = []
    for sequences, context in grid:
        seconds = true.step(Load(sequences=sequences, context=context)).seconds
        out.append(
            Point(sequences=sequences, context=context, seconds=seconds * (1 + noise * rng.uniform(-1, 1)))
        )
    for chunk in (128, 512, 2048):
        out.append(Point(chunk=chunk, seconds=true.step(Load(chunk=chunk)).seconds))
    return out


def test_an_exact_machine_is_recovered() -> None:
    calibration = fit(MODEL, RECIPE, MACHINE, points(0.0, GRID))
    assert max(abs(e) for e in calibration.errors) < 0.01
    for name in ("kv_bandwidth", "attention_rate", "rate"):
        assert getattr(calibration.efficiency, name).value == pytest.approx(TRUE[name], rel=0.05)
    assert all(getattr(calibration.efficiency, name).kind == "measured" for name in FITTED)


def test_steps_that_were_not_measured_are_predicted() -> None:
    """Twelve noisy points predict batches 1 to 32 and contexts 128 to 2,048 within 25 %."""
    few = [(b, c) for b in (1, 4, 16, 32) for c in (128, 512, 2048)]
    calibration = fit(MODEL, RECIPE, MACHINE, points(0.1, few))
    guess = Roofline(MODEL, calibration.as_device(), RECIPE, calibration.efficiency)
    true = true_machine()
    for sequences, context in GRID:
        load = Load(sequences=sequences, context=context)
        assert guess.step(load).seconds == pytest.approx(true.step(load).seconds, rel=0.25)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(PlanError, match="no measured step"):
        fit(MODEL, RECIPE, MACHINE, [])


def scripted(at_once: int, seen: list[list[int]]) -> Run:
    """An engine that prefills two sequences a step, 1 s, and decodes what runs, 0.01 s a sequence."""

    def run(prompts: list[list[int]], tokens: int) -> Generator[tuple[int, float]]:
        seen.extend(prompts)
        waiting, left = len(prompts), []
        while waiting or left:
            new = min(2, waiting, at_once - len(left))
            waiting -= new
            left = [n - 1 for n in left if n > 1] + [tokens - 1] * new
            yield len(left), 1.0 if new else 0.01 * len(left)

    return run


def test_decode_steps_are_told_from_prefill() -> None:
    seen: list[list[int]] = []
    found = measure_steps(scripted(99, seen), [(1, 100), (3, 100), (16, 512)], steps=4)
    assert [(p.sequences, p.seconds) for p in found if p.sequences] == [(1, 0.01), (3, 0.03), (16, 0.16)]
    alone, three, sixteen = (len(seen[i]) for i in (0, 1, 4))
    # Pairs start a step apart; the first full step does not count, the mean of the four after it does.
    written = [1 + 1.5, (2 + 2 + 1) / 3 + 1.5, 4.5 + 1.5]
    decodes = [p for p in found if p.sequences]
    for point, prompt, mean in zip(decodes, (alone, three, sixteen), written, strict=True):
        assert point.context == prompt + round(mean)
    (prefill,) = (p for p in found if p.chunk)
    assert prefill.chunk == len(seen[0])
    assert prefill.seconds == 1.0
    assert len({tuple(p) for p in seen}) == len(seen) == 20


def test_an_engine_that_runs_fewer_at_once_is_told() -> None:
    with pytest.raises(PlanError, match=r"ran 8 sequences at once where 16 .*scheduler\.max_running=16"):
        measure_steps(scripted(8, []), [(16, 128)])


def test_this_machine_has_figures() -> None:
    memory, bandwidth, rate = measure_machine()
    assert memory.value > 2**30
    assert 1e8 < bandwidth.value < 1e14
    assert 1e9 < rate.value < 1e16
    assert {f.kind for f in (memory, bandwidth, rate)} == {"measured"}


def test_a_saved_calibration_plans(tmp_path: Path) -> None:
    calibration = fit(MODEL, RECIPE, MACHINE, points(0.0, [(1, 128), (32, 128), (32, 2048)]), "baseline")
    file = tmp_path / "machine.json"
    file.write_text(calibration.model_dump_json())
    loaded = load_calibration(file)
    assert loaded == calibration
    plan = make_plan(MODEL, loaded.as_device(), RECIPE, efficiency=loaded.efficiency)
    assert plan.ok
    assert plan.efficiency.bandwidth.kind == "measured"
    table = calibration_table(loaded)
    assert "largest error" in table[1].title
    assert len(table[1].rows) == len(loaded.points)


@pytest.mark.parametrize("text", ["", "{}", '{"date": 1}'])
def test_a_broken_calibration_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)
    with pytest.raises(PlanError, match="is no calibration"):
        load_calibration(file)
    with pytest.raises(PlanError, match="cannot be read"):
        load_calibration(tmp_path / "none.json")


def test_the_catalogue_is_not_touched_by_a_calibration() -> None:
    assert load_device("l4").bandwidth.kind == "given"

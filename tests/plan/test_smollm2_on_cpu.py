"""SmolLM2 on this machine: steps that were not measured are predicted from those that were."""

from __future__ import annotations

import pytest

from core.plan import Roofline
from core.plan.calibrate import GRID, fit, measure_machine, measure_steps, start_engine
from core.plan.recipe import Recipe

HELD_OUT = ((1, 256), (1, 1024), (2, 128), (2, 2048), (8, 256), (8, 1024), (16, 256), (32, 256))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_steps_are_predicted_within_a_quarter() -> None:
    """Batches 1 to 32, contexts 128 to 2,048, measured points and others, on a machine without other work."""
    model, run = start_engine("baseline", ["scheduler.max_running=32", "memory.kv_bytes=4GiB"])
    recipe = Recipe(weights="fp32", kv="fp32")
    calibration = fit(model, recipe, measure_machine(), measure_steps(run, GRID), "baseline")
    roofline = Roofline(model, calibration.as_device(), recipe, calibration.efficiency)
    points = [p for p in (*calibration.points, *measure_steps(run, HELD_OUT)) if p.sequences]
    errors = {(p.sequences, p.context): roofline.step(p.load).seconds / p.seconds - 1 for p in points}
    print({at: f"{error:+.0%}" for at, error in errors.items()})
    assert max(map(abs, errors.values())) <= 0.25

"""Calibration: this machine's figures, a few real steps of the engine, and the efficiencies they give."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from datetime import date
from itertools import count
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from core.plan.catalogue import Device, load_model
from core.plan.errors import PlanError, explain
from core.plan.figures import Figure, show_seconds
from core.plan.latency import Efficiency, Load, Roofline
from core.plan.models import Model
from core.plan.recipe import Recipe
from core.plan.report import Table, show_figure

GRID = (*((batch, context) for context in (128, 512) for batch in (1, 4, 16, 32)), (1, 2048), (8, 2048))
FITTED = ("bandwidth", "rate", "kv_bandwidth", "attention_rate", "overhead", "sequence_overhead")

SMALLEST_CHUNK = 64

Run = Callable[[list[list[int]], int], Generator[tuple[int, float]]]
"""Runs the engine on prompts of token ids until each has written so many tokens, or until it is closed.

Yields for every step how many sequences wrote in it, and its seconds.
"""


class Point(BaseModel):
    """One measured step: `sequences` decoding at `context`, or `chunk` prompt tokens, in `seconds`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequences: int = 0
    context: int = 0
    chunk: int = 0
    seconds: float

    @property
    def load(self) -> Load:
        return Load(sequences=self.sequences, context=self.context, chunk=self.chunk)


class Calibration(BaseModel):
    """What `calibrate` found: the machine, the efficiencies, and the steps they were fitted to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    date: str
    model: str
    engine: str
    memory: Figure
    bandwidth: Figure
    rate: Figure
    efficiency: Efficiency
    points: tuple[Point, ...]
    predicted: tuple[float, ...]

    def as_device(self) -> Device:
        return Device(
            "this-machine", "the calibrated machine", self.memory, self.bandwidth,
            {"bf16": self.rate, "fp32": self.rate},
        )  # fmt: skip

    @property
    def errors(self) -> list[float]:
        """Predicted against measured, as a fraction: 0.1 is ten per cent too slow."""
        return [p / m.seconds - 1 for p, m in zip(self.predicted, self.points, strict=True)]


def calibrate(recipe: Recipe, engine: str, overrides: Sequence[str] = ()) -> Calibration:
    """Measure this machine and steps of an engine recipe with its own model, and fit efficiencies.

    `recipe` names the formats that the engine keeps weights and KV in. It takes minutes on a CPU.
    """
    machine = measure_machine()
    model, run = start_engine(engine, overrides)
    return fit(model, recipe, machine, measure_steps(run), engine)


def measured(value: float, unit: str, how: str) -> Figure:
    return Figure(value=value, unit=unit, kind="measured", source=how, date=str(date.today()))


def measure_machine() -> tuple[Figure, Figure, Figure]:
    """Memory in bytes, read bandwidth in bytes/s, and FP32 matrix rate in operations/s of this machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    add, multiply = _kernels()
    return (
        measured(memory, "B", "physical memory of this machine"),
        measured(_best_rate(*add), "B/s", "sum of 256 MB"),
        measured(_best_rate(*multiply), "op/s", "FP32 product of two 1024 x 1024 matrices"),
    )


def _kernels() -> tuple[tuple[Callable[[], Any], float], tuple[Callable[[], Any], float]]:
    """A bandwidth-bound and a compute-bound function, with their bytes and operations."""
    large = np.ones(2**26, dtype=np.float32)
    square = np.ones((1024, 1024), dtype=np.float32)
    sizes = float(large.nbytes), 2.0 * 1024**3
    try:
        import torch
    except ImportError:
        return (large.sum, sizes[0]), (lambda: square @ square, sizes[1])
    a, b = torch.from_numpy(large), torch.from_numpy(square)
    return (a.sum, sizes[0]), (lambda: b @ b, sizes[1])


def _best_rate(run: Callable[[], Any], work: float, repeats: int = 7) -> float:
    return work / min(_seconds(run) for _ in range(repeats))


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def start_engine(engine: str, overrides: Sequence[str]) -> tuple[Model, Run]:
    """The model of an engine recipe, and its engine as a function of prompts and tokens to write."""
    from core import LLM
    from core.models.source import ModelSpec, resolve
    from core.types import PartwiseError, Request, SamplingParams

    try:
        llm = LLM(recipe=engine, overrides=list(overrides))
    except PartwiseError as error:
        raise PlanError(f"engine recipe {engine}: {error}") from error
    source = resolve(ModelSpec(**llm.recipe.model))
    numbers = count()

    def run(prompts: list[list[int]], tokens: int) -> Generator[tuple[int, float]]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ids = [f"calibrate-{next(numbers)}" for _ in prompts]
        for name, prompt in zip(ids, prompts, strict=True):
            llm.engine.add(Request(name, tuple(prompt), params, time.monotonic()))
        try:
            while llm.engine.has_work:
                start = time.perf_counter()
                events = llm.engine.step()
                seconds = time.perf_counter() - start
                if failed := next((e.error for e in events if e.error), None):
                    raise PlanError(f"the engine could not run a step to measure: {failed}")
                yield sum(bool(e.tokens) for e in events), seconds
        finally:
            for name in ids:
                llm.engine.abort(name)

    return load_model(str(source.gguf or source.folder)), run


def measure_steps(run: Run, grid: Iterable[tuple[int, int]] = GRID, steps: int = 8) -> tuple[Point, ...]:
    """The median of `steps` decode steps for each (batch, context) of the grid, and single prefills.

    Only steps in which the whole batch writes count, and not the first of them, which may hold a prefill.
    Sequences start one after the other and write on meanwhile, so the context is the mean one of the steps
    that count.
    """
    points: list[Point] = []
    for batch, context in grid:
        wait = ceil(batch * context / SMALLEST_CHUNK)
        prompt = max(1, context - (wait + steps) // 2)
        counted, prefill, most = _full_steps(run, batch, prompt, wait, steps)
        if len(counted) < steps:
            raise PlanError(
                f"the engine ran {most} sequences at once where {batch} were asked for; "
                f"give it room with engine_overrides=['scheduler.max_running={batch}']"
            )
        mean = round(sum(written for written, _ in counted) / steps / batch)
        points.append(Point(sequences=batch, context=prompt + mean, seconds=median(s for _, s in counted)))
        if batch == 1:
            points.append(Point(chunk=prompt, seconds=prefill))
    return tuple(points)


def _full_steps(
    run: Run, batch: int, prompt: int, wait: int, steps: int
) -> tuple[list[tuple[int, float]], float, int]:
    """Of each full step the tokens written before it and its seconds; seconds of prefill; most at once."""
    counted: list[tuple[int, float]] = []
    total, most, prefill = 0, 0, 0.0
    with closing(run(_prompts(batch, prompt), wait + steps + 2)) as done:
        for written, seconds in done:
            if written == most == batch:
                counted.append((total, seconds))
            prefill += 0.0 if total else seconds
            total, most = total + written, max(most, written)
            if len(counted) == steps:
                break
    return counted, prefill, most


def _prompts(batch: int, length: int) -> list[list[int]]:
    """Different in every sequence and length, so that no prefix cache helps."""
    rng = np.random.default_rng((batch, length))
    prompts: list[list[int]] = rng.integers(1000, 20000, (batch, length)).tolist()
    return prompts


def fit(
    model: Model,
    recipe: Recipe,
    machine: tuple[Figure, Figure, Figure],
    points: Sequence[Point],
    engine: str = "",
) -> Calibration:
    """Efficiencies that bring the roofline closest to the points, by least squares of log ratios.

    What the points do not decide stays at its assumed value, by a weak pull towards it.
    """
    from scipy.optimize import least_squares

    if not points:
        raise PlanError("there is no measured step to calibrate with")
    memory, bandwidth, rate = machine
    start = Efficiency()
    initial = np.log([getattr(start, name).value for name in FITTED])
    measured_log = np.log([p.seconds for p in points])
    device = Device("this-machine", "", memory, bandwidth, {"bf16": rate, "fp32": rate})

    def efficiency(parameters: np.ndarray) -> Efficiency:
        values = zip(FITTED, np.exp(parameters), strict=True)
        return start.model_copy(
            update={
                n: measured(float(v), getattr(start, n).unit, "fitted to measured steps") for n, v in values
            }
        )

    def predict(parameters: np.ndarray) -> list[float]:
        roofline = Roofline(model, device, recipe, efficiency(parameters))
        return [roofline.step(p.load).seconds for p in points]

    def residuals(parameters: np.ndarray) -> np.ndarray:
        pull = 1e-3 * (parameters - initial)
        return np.concatenate([np.log(predict(parameters)) - measured_log, pull])

    best = min((least_squares(residuals, initial + shift) for shift in (0.0, -2.0)), key=lambda r: r.cost)
    return Calibration(
        date=str(date.today()),
        model=model.name,
        engine=engine,
        memory=memory,
        bandwidth=bandwidth,
        rate=rate,
        efficiency=efficiency(best.x),
        points=tuple(points),
        predicted=tuple(predict(best.x)),
    )


def load_calibration(path: Path) -> Calibration:
    try:
        return Calibration.model_validate_json(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise PlanError(f"{path} is no calibration: {explain(error)}") from error


def calibration_table(calibration: Calibration) -> list[Table]:
    figures = [(n, getattr(calibration, n)) for n in ("memory", "bandwidth", "rate")]
    figures += [(f"efficiency: {n}", getattr(calibration.efficiency, n)) for n in FITTED]
    machine = tuple((name, show_figure(f), f.kind, f.source) for name, f in figures)
    rows = []
    for point, predicted, error in zip(
        calibration.points, calibration.predicted, calibration.errors, strict=True
    ):
        what = f"prefill of {point.chunk}" if point.chunk else f"decode, {point.sequences} x {point.context}"
        rows.append((what, show_seconds(point.seconds), show_seconds(predicted), f"{error:+.0%}"))
    worst = max(abs(e) for e in calibration.errors)
    return [
        Table("This machine", ("figure", "value", "kind", "source"), machine),
        Table(
            f"Steps of {calibration.model}, engine recipe {calibration.engine} (largest error {worst:.0%})",
            ("step", "measured", "predicted", "error"),
            tuple(rows),
        ),
    ]

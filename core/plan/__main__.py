"""`python -m core.plan`: plan, list what is known, and calibrate."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from core.plan.calibrate import Calibration, calibrate, calibration_table, load_calibration
from core.plan.catalogue import Device, known_devices, known_models, load_device, load_model, own_price
from core.plan.errors import PlanError, explain, unknown
from core.plan.figures import show_bytes
from core.plan.formats import kv_format
from core.plan.latency import Efficiency
from core.plan.memory import kv_growth
from core.plan.plan import Plan, make_plan, rank
from core.plan.recipe import RECIPES, Recipe, read_recipe
from core.plan.report import (
    Table,
    plan_to_plain,
    print_tables,
    ranking_table,
    ranking_to_plain,
    show_figure,
    summary,
    tables,
)

CONF = Path(__file__).parent / "conf"
COMMANDS = ("plan", "models", "devices", "calibrate")


class Options(BaseModel):
    """What the command line says beside the recipe."""

    model_config = ConfigDict(extra="forbid", coerce_numbers_to_str=True)

    command: Literal["plan", "models", "devices", "calibrate"]
    model: str | None
    gpu: str | list[str] | None
    users: int | None = Field(ge=1)
    context: int | None = Field(ge=1)
    traffic: float | None = Field(gt=0)
    price: float | None
    price_date: str | None
    provider: str | None
    models: str | None
    devices: str | None
    calibration: str | None
    engine: str
    engine_overrides: list[str]
    save: str | None
    output: str | None
    json_: bool = Field(alias="json")


@dataclass
class Job:
    """One job of a sweep, or the only one: its overrides, its options, and its plans by device."""

    overrides: list[str]
    options: Options
    recipe: Recipe
    plans: list[tuple[str, Plan | PlanError]]
    calibration: Calibration | None = None


def main() -> None:
    words = {"--json": "json=true", **{command: f"command={command}" for command in COMMANDS}}
    arguments = [words.get(a, a) for a in sys.argv[1:]]
    arguments.sort(key=lambda a: a not in ("-m", "--multirun"))
    try:
        _check_names(arguments)
        sys.exit(_show(_run(arguments)))
    except PlanError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _check_names(arguments: Sequence[str]) -> None:
    """Refuse unknown keys and recipes with the nearest names, before Hydra refuses them without."""
    known = [str(key) for key in OmegaConf.load(CONF / "config.yaml") if key not in ("defaults", "hydra")]
    for argument in arguments:
        key, equals, value = argument.partition("=")
        key = key.lstrip("+~")
        if argument.startswith("-") or key.startswith("hydra"):
            continue
        if not equals:
            raise unknown("command", argument, COMMANDS)
        top, _, rest = key.partition(".")
        if top == "recipe":
            if rest and rest.split(".")[0] not in Recipe.model_fields:
                raise unknown("recipe key", rest, Recipe.model_fields)
            names = [p.stem for p in RECIPES.glob("*.yaml")]
            for name in () if rest else value.split(","):
                if name not in names:
                    raise unknown("recipe", name, names)
        elif top not in known:
            if top in Recipe.model_fields:
                raise PlanError(f"'{key}' belongs to the recipe: write recipe.{key}={value}")
            raise unknown("option", key, [*known, "recipe"])


def _run(arguments: Sequence[str]) -> list[Job]:
    jobs: list[Job] = []
    errors: list[PlanError] = []

    @hydra.main(version_base=None, config_path=str(CONF), config_name="config")
    def job(config: DictConfig) -> None:
        try:
            jobs.append(_job(config))
        except PlanError as error:
            errors.append(error)

    with tempfile.TemporaryDirectory() as scratch:
        sys.argv[1:] = [*arguments, f"hydra.sweep.dir={scratch}"]
        job()
    if errors:
        raise errors[0]
    return jobs


def _job(config: DictConfig) -> Job:
    values: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    overrides = list(HydraConfig.get().overrides.task)
    recipe = read_recipe(values.pop("recipe"))
    try:
        options = Options(**values)
    except ValidationError as error:
        raise PlanError(f"{error.errors()[0]['loc'][0]}: {explain(error)}") from error
    job = Job(overrides, options, recipe, [])
    if options.command == "plan":
        job.plans = _plans(options, recipe)
    elif options.command == "calibrate":
        if options.model is not None or options.gpu is not None:
            raise PlanError(
                "calibrate measures the engine recipe's own model here: leave out model= and gpu=, "
                "or write engine_overrides=['model=NAME']"
            )
        job.calibration = calibrate(recipe, options.engine, options.engine_overrides)
    return job


def _plans(options: Options, recipe: Recipe) -> list[tuple[str, Plan | PlanError]]:
    if options.model is None:
        raise PlanError(
            "name a model, for example model=mistral-7b; `python -m core.plan models` lists the known ones"
        )
    model = load_model(options.model, options.models)
    devices, efficiency = _devices(options)
    price = None if options.price is None else own_price(options.price, options.price_date)
    plans: list[tuple[str, Plan | PlanError]] = []
    for device in devices:
        try:
            plan = make_plan(
                model,
                device,
                recipe,
                efficiency=efficiency,
                price=price or device.price(options.provider),
                users=options.users,
                context=options.context,
                traffic=options.traffic,
            )
            plans.append((device.name, plan))
        except PlanError as error:
            plans.append((device.name, error))
    return plans


def _devices(options: Options) -> tuple[list[Device], Efficiency | None]:
    if options.calibration is not None:
        calibration = load_calibration(Path(options.calibration))
        if options.gpu is not None:
            raise PlanError("a calibration brings its own device: leave out gpu=")
        return [calibration.as_device()], calibration.efficiency
    if options.gpu is None:
        raise PlanError(
            "name a device, for example gpu=h100-sxm; `python -m core.plan devices` lists the known ones"
        )
    names = [options.gpu] if isinstance(options.gpu, str) else options.gpu
    if names == ["all"]:
        names = list(known_devices(options.devices))
    return [load_device(name, options.devices) for name in names], None


def _show(jobs: Sequence[Job]) -> int:
    options = jobs[0].options
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.command == "plan":
        return _show_plans(jobs, console)
    if options.command == "calibrate":
        return _show_calibration(jobs[0], console)
    table = _models_table(options) if options.command == "models" else _devices_table(options)
    if options.json_:
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        print(json.dumps(rows, indent=2))
    else:
        print_tables(console, [table])
    return 0


def _show_plans(jobs: Sequence[Job], console: Console) -> int:
    options = jobs[0].options
    plans = _labelled(jobs)
    if all(isinstance(plan, PlanError) for _, plan in plans):
        raise PlanError("; ".join(dict.fromkeys(str(plan) for _, plan in plans)))
    ranking = rank(plans)
    best = [entry.plan for entry in ranking if entry.plan is not None]
    if options.json_:
        single = plan_to_plain(best[0])
        print(json.dumps(single if len(plans) == 1 else ranking_to_plain(ranking), indent=2))
    else:
        console.print(summary(best[0]), highlight=False, soft_wrap=True)
        for note in best[0].model.notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
        print_tables(console, [ranking_table(ranking)] if len(plans) > 1 else list(tables(best[0])))
    if options.output is not None:
        from core.plan.pictures import write_report

        for path in write_report(Path(options.output), best, ranking):
            print(f"wrote {path}", file=sys.stderr)
    return 0 if any(plan.ok for plan in best) else 1


def _labelled(jobs: Sequence[Job]) -> list[tuple[str, Plan | PlanError]]:
    """Plans named by what differs between them: the overrides that not all jobs share, else the device."""
    common = set(jobs[0].overrides).intersection(*(job.overrides for job in jobs))
    out = []
    for job in jobs:
        own = [o.partition("=")[2] if o.startswith("gpu=") else o for o in job.overrides if o not in common]
        for device, plan in job.plans:
            out.append((" ".join([*([device] if len(job.plans) > 1 or not own else []), *own]), plan))
    return out


def _show_calibration(job: Job, console: Console) -> int:
    calibration = job.calibration
    assert calibration is not None
    if job.options.save is not None:
        Path(job.options.save).write_text(calibration.model_dump_json(indent=2))
    if job.options.json_:
        print(calibration.model_dump_json(indent=2))
    else:
        print_tables(console, calibration_table(calibration))
    return 0


def _models_table(options: Options) -> Table:
    rows = []
    for name in known_models(options.models):
        m = load_model(name, options.models)
        rows.append(
            (
                name,
                f"{m.parameters / 1e9:,.2f} B",
                f"{m.active_parameters / 1e9:,.2f} B",
                m.checkpoint,
                f"{kv_growth(m, kv_format('bf16')):,.0f} B",
                f"{m.shape.max_context:,}",
                m.source,
            )
        )
    columns = ("model", "parameters", "active", "checkpoint", "KV growth a token, bf16", "context", "source")
    return Table("Known models", columns, tuple(rows))


def _devices_table(options: Options) -> Table:
    rows = []
    for name in known_devices(options.devices):
        d = load_device(name, options.devices)
        rates = ", ".join(f"{k} {show_figure(v)}" for k, v in d.rates.items())
        price = d.price(options.provider)
        rows.append(
            (
                name,
                show_bytes(d.memory.value),
                show_figure(d.bandwidth),
                rates,
                price.label() if price else "",
                f"{d.memory.source}, {d.memory.date}",
            )
        )
    columns = ("device", "memory", "bandwidth", "dense rates", "price", "source")
    return Table("Known devices", columns, tuple(rows))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()

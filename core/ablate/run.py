"""A study from the words of a command line: plan it, run it, write it up; or replay, compare, write up again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from core.lab import designs, environment, plan, recipes, report, words
from core.lab.designs import AGAIN, Arm, Design
from core.lab.errors import LabError, TargetError, UsageError
from core.lab.hosts import Host, server
from core.lab.ledger import Header, Ledger, read
from core.lab.metrics import metric
from core.lab.plan import StudyPlan
from core.lab.quality import QualityPlan
from core.lab.screen import Terminal
from core.lab.study import Study, failures
from core.lab.words import Words
from core.lab.workloads import workload

KNOWN = (
    "design", "parts", "fraction", "a", "b", "workload", "path", "load", "goodput", "metric", "margin", "budget",
    "blocks", "warmup", "seed", "price", "gpu", "quality", "output", "replay", "diff", "report",
)  # fmt: skip
DEFAULT_BUDGET = "20min"


class OwnServers:
    """Each arm in a fresh `core.serve` process."""

    @contextmanager
    def start(self, arm: Arm) -> Iterator[Host]:
        with server([*arm.words, "server.port=0"]) as host:
            yield host

    def reasons(self, arm: Arm) -> list[str]:
        return recipes.reasons(arm.words)


def main(given: Sequence[str], console: Console) -> int:
    """Does what the words say; the exit code. LabError says in one sentence what went wrong."""
    found = words.split(given, KNOWN)
    if "report" in found.lab:
        return _report_again(Path(str(found.lab["report"])), console)
    if "diff" in found.lab:
        from core.ablate.diff import show

        return show([Path(p) for p in words.names(found.lab["diff"])], console)
    made = _replayed(found, console) if "replay" in found.lab else planned(found)
    return _study(made, words.output(found, "studies"), console)


def planned(found: Words) -> StudyPlan:
    """The plan that the words describe; everything in it is checked before anything is started."""
    lab = found.lab
    loads = words.workloads(found, "chat")
    for name, options in loads.items():
        workload(name, options).sessions(0)
    metric(str(lab.get("metric", "requests_per_s")))
    given: dict[str, Any] = {
        "recipe": found.recipe_name,
        "workloads": loads,
        "metric": str(lab.get("metric", "requests_per_s")),
        "margin": _share(lab.get("margin", 0.05)),
        "budget_s": plan.duration(lab.get("budget", DEFAULT_BUDGET)),
        "blocks": words.whole(found, "blocks", 40),
        "warmup": words.whole(found, "warmup", 1, least=0),
        "seed": words.whole(found, "seed", 0, least=0),
        "targets": words.targets(found),
        "price": words.price(found),
        "quality": _quality(found),
    }
    design, lossless = _design(found)
    try:
        return StudyPlan(**given, design=design, lossless=lossless)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.") from None


def _share(given: Any) -> float:
    try:
        return float(str(given).removesuffix("%")) / (100 if str(given).endswith("%") else 1)
    except ValueError:
        raise UsageError(f"margin is a share, such as 0.05 or 5%, not {given!r}.") from None


def _quality(found: Words) -> QualityPlan | None:
    options = found.lab.get("quality.", {})
    for key in options:
        if key not in ("path", "tokens"):
            raise UsageError(f"there is no quality.{key}: there are quality.path and quality.tokens.")
    if not words.yes(found, "quality", default=True):
        return None
    made = QualityPlan(str(options.get("path", "")), words.natural("quality.tokens", options.get("tokens", 800)))
    made.windows()
    return made


def _design(found: Words) -> tuple[Design, tuple[str, ...]]:
    name = str(found.lab.get("design", "ladder"))
    if name == "pair":
        return _pair(found), ()
    for side in ("a", "b"):
        if side in found.lab:
            raise UsageError(f"{side}= is for design=pair; design={name} finds its arms by itself.")
    switches = recipes.switches(found.recipe_name, found.overrides, words.names(found.lab.get("parts", "")))
    made = designs.build(name, found.recipe_name, switches, words.whole(found, "fraction", 0, least=0))
    rest = recipes.common(found.overrides, switches)
    arms = tuple(replace(arm, overrides=(*rest, *arm.overrides)) for arm in made.arms)
    made = replace(made, arms=arms)
    notes = list(made.notes)
    bottom = next(arm for arm in made.arms if arm.name == made.reference)
    everything = recipes.switches(found.recipe_name, found.overrides)
    if name != "leave_one_out" and len(switches) == len(everything):
        notes += [f"the baseline here keeps the recipe's settings: {s}" for s in recipes.different_settings(bottom)]
    return replace(made, notes=tuple(notes)), recipes.lossless(found.recipe_name, found.overrides, switches)


def _pair(found: Words) -> Design:
    """`a` and `b` are a recipe's name, or words: `a=baseline`, `b=[scheduler=static,drafter=none]`."""
    arms = []
    for side in ("a", "b"):
        if side not in found.lab:
            raise UsageError(
                f"design=pair needs a= and b=, each a recipe or words such as [scheduler=static]; {side} is missing."
            )
        given = words.names(found.lab[side])
        names = [g for g in given if "=" not in g]
        if len(names) > 1:
            raise UsageError(f"{side}= names {len(names)} recipes: {', '.join(names)}; an arm has one.")
        recipe = names[0] if names else found.recipe_name
        arms.append(Arm(" ".join(given), recipe, tuple([*found.overrides, *(g for g in given if "=" in g)])))
    if arms[0].name == arms[1].name:
        raise UsageError(f"a and b are both {arms[0].name}: every study compares an arm with itself anyway (A/A).")
    for arm in arms:
        recipes.compose(arm.words)
    return designs.pair(*arms)


def _replayed(found: Words, console: Console) -> StudyPlan:
    extra = [k for k in found.lab if k not in ("replay", "output", "budget")] + found.recipe
    if extra:
        raise UsageError(f"a replay runs what its lock says: leave out {extra[0]} (budget= and output= are free).")
    made, then = plan.read_lock(Path(str(found.lab["replay"])))
    now = _environment(made)
    for line in environment.differences(then, now):
        console.print(f"not as when it was first run: {line}", style="yellow", markup=False, soft_wrap=True)
    if "budget" in found.lab:
        made = made.model_copy(update={"budget_s": plan.duration(found.lab["budget"])})
    return made


def _environment(made: StudyPlan) -> dict[str, Any]:
    arm = next(a for a in made.design.arms if not a.name.endswith(AGAIN))
    here = environment.describe()
    here["threads"]["engine"] = recipes.compose(arm.words).engine.threads or here["machine"]["cores"]
    return here | {"model": recipes.model_facts(arm.words)}


def _study(made: StudyPlan, folder: Path, console: Console) -> int:
    here = _environment(made)
    with Ledger(folder / "ledger.jsonl") as ledger:
        _same_study(made, ledger)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        ledger.append(Header(made.model_dump(mode="json"), here, now))
        plan.write_lock(folder / "lock.yaml", made, here)
        stopped: BaseException | None = None
        with Terminal(console, made.budget_s) as screen:
            try:
                why = Study(made, ledger, OwnServers(), screen).run()
            except (LabError, KeyboardInterrupt) as error:
                stopped, why = error, "stopped"
        written = _write(made, ledger, console)
    if isinstance(stopped, LabError):
        raise stopped
    if stopped is not None:
        why = "Stopped by you; the same command goes on from here"
        console.print(f"{why}. So far: {written}", markup=False, soft_wrap=True)
        return 130
    console.print(f"Done: {why}. The report is {written}", markup=False, soft_wrap=True)
    return TargetError.exit_code if failures(ledger) else 0


def _same_study(made: StudyPlan, ledger: Ledger) -> None:
    headers = [e for e in ledger.entries if isinstance(e, Header)]
    free = {"budget_s", "blocks", "price", "margin"}
    now = made.model_dump(mode="json", exclude=free)
    for header in headers:
        then = {k: v for k, v in header.plan.items() if k not in free}
        changed = [k for k in now if now[k] != then.get(k)]
        if changed:
            raise UsageError(
                f"{ledger.path} holds another study ({', '.join(changed)} differ): name another output, or repeat "
                "the words that it was started with."
            )


def _write(made: StudyPlan, ledger: Ledger, console: Console) -> Path:
    written = report.write(made, ledger)
    built = report.build(made, ledger)
    for line in built.warnings:
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    for line in [*built.findings, *(f"noise floor, {line}" for line in built.noise)]:
        console.print(f"• {line}", markup=False, soft_wrap=True)
    return written


def _report_again(folder: Path, console: Console) -> int:
    made, _ = plan.read_lock(folder / "lock.yaml")
    read(folder / "ledger.jsonl")
    with Ledger(folder / "ledger.jsonl") as ledger:
        console.print(str(_write(made, ledger, console)), markup=False, soft_wrap=True)
    return 0

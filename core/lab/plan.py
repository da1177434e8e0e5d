"""The plan of a study: everything that decides what is run. This is what lock.yaml holds and `replay` reads."""

from __future__ import annotations

import math
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from core.lab.arrivals import Count, Positive
from core.lab.designs import Design
from core.lab.errors import UsageError
from core.lab.quality import QualityPlan
from core.lab.workloads import Workload, workload

LOCK_VERSION = 1
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)(?:min|m))?(?:(\d+(?:\.\d+)?)s)?")


class Price(BaseModel):
    """Dollars for the machine for one hour, and where the figure is from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    usd_per_hour: Positive
    source: str = "given"


class StudyPlan(BaseModel):
    """`margin`: an effect smaller than this share does not matter. `blocks`: most blocks that are run.

    `metric` decides the verdicts and when to stop; all others are reported beside it. `lossless`: names of the
    effects whose part says that it does not change greedy output.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    recipe: str
    design: Design
    workloads: dict[str, dict[str, Any]]
    metric: str = "requests_per_s"
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.05
    budget_s: Positive = 1200.0
    blocks: Count = 40
    warmup: Annotated[int, Field(ge=0)] = 1
    seed: int = 0
    targets: dict[str, float] = {}
    price: Price | None = None
    quality: QualityPlan | None = None
    lossless: tuple[str, ...] = ()

    @cached_property
    def loads(self) -> dict[str, Workload]:
        return {name: workload(name, options) for name, options in self.workloads.items()}

    @property
    def log_margin(self) -> float:
        return math.log1p(self.margin)

    @property
    def resolution(self) -> float:
        """Half width (log scale) of an interval that needs no more blocks: it can show an effect to lie
        within the margin."""
        return self.log_margin / 2


def duration(value: str | float) -> float:
    """Seconds from `90`, `90s`, `4min`, `1h30min`. UsageError says what can be read."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        match = _DURATION.fullmatch(str(value).strip().replace(" ", ""))
        if not match or not any(match.groups()):
            raise UsageError(f"cannot read {value!r} as a time: write 90s, 4min or 1h30min.")
        hours, minutes, rest = (float(x or 0) for x in match.groups())
        seconds = hours * 3600 + minutes * 60 + rest
    if not seconds > 0:
        raise UsageError(f"a time must be above zero, not {value!r}.")
    return seconds


def write_lock(path: Path, plan: StudyPlan, environment: dict[str, Any]) -> None:
    """Writes what `replay` needs, and the environment that it will be compared with."""
    content = {"partwise_study": LOCK_VERSION, "plan": plan.model_dump(mode="json"), "environment": environment}
    path.write_text(yaml.safe_dump(content, sort_keys=False, width=110, allow_unicode=True), encoding="utf-8")


def read_lock(path: Path) -> tuple[StudyPlan, dict[str, Any]]:
    """The plan and the environment of an earlier study. UsageError when the file is not a lock."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if content["partwise_study"] != LOCK_VERSION:
            raise UsageError(f"{path} was written by another version of the lab ({content['partwise_study']}).")
        return StudyPlan.model_validate(content["plan"]), content["environment"]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, LookupError, TypeError, ValidationError) as error:
        raise UsageError(f"{path} is not a study's lock.yaml: {' '.join(str(error).split())[:200]}.") from None

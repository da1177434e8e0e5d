"""What is served and how: formats, cache, speculation, traffic of one request, and the targets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.plan.errors import PlanError, explain, unknown
from core.plan.formats import kv_format, weight_format

RECIPES = Path(__file__).parent / "conf" / "recipe"


class Speculation(BaseModel):
    """A drafter: `tokens` a step, each accepted with chance `accept` and costing `cost` of a step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    accept: float = Field(ge=0, lt=1)
    tokens: int = Field(ge=1, le=64)
    cost: float = Field(ge=0, le=1)


class Recipe(BaseModel):
    """Everything a plan needs beside the model and the device. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "custom"
    goal: Literal["latency", "throughput"] = "throughput"
    weights: str = "checkpoint"
    kv: str = "bf16"
    structure: str = "native"
    allocator: Literal["paged", "contiguous"] = "paged"
    page: int = Field(16, ge=1, le=4096)
    prefix_share: float = Field(
        0.0, ge=0, lt=1, description="share of each prompt that all requests have in common"
    )
    speculation: Speculation | None = None
    tp: int = Field(1, ge=1, le=64, description="devices that one model is split over")
    prompt: int = Field(1024, ge=1, description="tokens")
    output: int = Field(256, ge=1, description="tokens a request writes on average")
    output_limit: int | None = Field(None, ge=1, description="tokens a request may write; default: output")
    chunk: int | None = Field(
        512, ge=1, description="prompt tokens a step; null prefills a prompt in one step"
    )
    min_batch: int = Field(1, ge=1, description="smallest batch worth planning for")
    max_batch: int = Field(1024, ge=1, description="largest batch the engine runs")
    itl_ms: float | None = Field(None, gt=0, description="longest time between tokens of a running stream")
    ttft_ms: float | None = Field(
        None, gt=0, description="longest time to the first token, waiting not included"
    )
    utilization: float = Field(0.7, gt=0, le=1, description="share of the full rate that traffic may use")
    memory_fraction: float = Field(0.9, gt=0, le=1, description="share of the memory the engine may take")

    @model_validator(mode="after")
    def _consistent(self) -> Recipe:
        kv_format(self.kv)
        if self.weights not in ("checkpoint", "file"):
            weight_format(self.weights)
        if self.output_limit is not None and self.output_limit < self.output:
            raise ValueError(
                f"output_limit ({self.output_limit}) is below the average output ({self.output})"
            )
        if self.prefix_share and self.allocator == "contiguous":
            raise ValueError("prefix_share needs allocator=paged: contiguous sequences cannot share memory")
        if self.min_batch > self.max_batch:
            raise ValueError(f"min_batch ({self.min_batch}) is above max_batch ({self.max_batch})")
        return self

    @property
    def longest(self) -> int:
        """Tokens that the longest request comes to hold."""
        return self.prompt + (self.output_limit or self.output)

    @property
    def shared(self) -> int:
        """Prompt tokens that all requests have in common and that are computed and kept once."""
        return int(self.prompt * self.prefix_share)

    @property
    def verified(self) -> int:
        """Tokens that one decode step computes for each sequence."""
        return 1 + (self.speculation.tokens if self.speculation else 0)


def read_recipe(fields: Mapping[str, Any]) -> Recipe:
    """A recipe from plain values. Raises PlanError that says which key is wrong and why."""
    for key in fields:
        if key not in Recipe.model_fields:
            raise unknown("recipe key", str(key), Recipe.model_fields)
    try:
        return Recipe(**fields)
    except ValidationError as error:
        where = ".".join(["recipe", *map(str, error.errors()[0]["loc"])])
        raise PlanError(f"{where}: {explain(error)}") from error


def load_recipe(name: str, **overrides: Any) -> Recipe:
    """A recipe by its name, with keys replaced: `load_recipe("premium_chat", kv="fp8")`."""
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise unknown("recipe", name, (p.stem for p in RECIPES.glob("*.yaml")))
    return read_recipe({**yaml.safe_load(path.read_text()), **overrides})

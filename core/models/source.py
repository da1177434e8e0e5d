"""Where a model comes from: a folder, a GGUF file, a hub, or registry packages that carry one. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from core.models.fetch import fetch_hub, fetch_packages
from core.names import near
from core.types import PartwiseError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ModelSpec(BaseModel):
    """The `model` part of a recipe. Exactly one of `path`, `hf` and `packages` says where it lies.

    `path`: a folder with config.json and safetensors, or a .gguf file. `hf`: org/name on the hub, with `revision`.
    `packages`: registry packages (`name==version`) which together carry `file`, as a whole or as its parts in order
    (`file` + `.part00`, `.part01`, ...), checked against `sha256`. `name` is what the server calls the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = None
    path: Path | None = None
    hf: str | None = None
    revision: str | None = None
    packages: tuple[str, ...] = ()
    file: str | None = None
    sha256: Sha256 | None = None

    @model_validator(mode="after")
    def _one_place(self) -> ModelSpec:
        given = [key for key in ("path", "hf", "packages") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(f"a model needs exactly one of path, hf and packages; given: {', '.join(given) or 'none'}")
        if self.packages and not (self.file and self.sha256):
            raise ValueError("a model from packages needs file and sha256")
        unpinned = [package for package in self.packages if "==" not in package]
        if unpinned:
            raise ValueError(f"packages must read name==version: {', '.join(unpinned)}")
        if self.revision and not self.hf:
            raise ValueError("revision goes with hf only")
        return self


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: a `folder` or a `gguf` file. `cache`: where what is derived from it may be kept."""

    name: str
    folder: Path | None = None
    gguf: Path | None = None
    cache: Path | None = None


def spec_from_word(word: str) -> dict[str, str] | None:
    """What `model=WORD` means: `hf:org/name`, a .gguf file or a path. None: it names a recipe."""
    if word.startswith("hf:"):
        return {"hf": word.removeprefix("hf:")}
    if word.endswith(".gguf") or word.startswith((".", "~")) or os.sep in word:
        return {"path": word}
    return None


def read_spec(values: Mapping[str, Any]) -> ModelSpec:
    """A recipe's `model` as a ModelSpec. PartwiseError names each field at fault, with a near name for a typo."""
    known = list(ModelSpec.model_fields)
    problems = []
    for key in values:
        if key not in known:
            problems.append(f"unknown field {key!r}{near(str(key), known)}")
    if not problems:
        try:
            return ModelSpec.model_validate(dict(values))
        except ValidationError as error:
            problems = [_problem(item["loc"], item["msg"]) for item in error.errors()]
    raise PartwiseError(f"model: {'; '.join(problems)}")


def _problem(place: tuple[int | str, ...], message: str) -> str:
    text = message.removeprefix("Value error, ")
    return f"{'.'.join(map(str, place))}: {text}" if place else text


def cache_folder() -> Path:
    """Where models are kept: $PARTWISE_CACHE, or partwise in the user's cache folder."""
    chosen = os.environ.get("PARTWISE_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "partwise"


def resolve(spec: ModelSpec) -> ModelSource:
    """Find the model, fetching it first when it is not here. PartwiseError says what to do."""
    models = cache_folder() / "models"
    if spec.packages:
        assert spec.file and spec.sha256
        path = fetch_packages(spec.packages, spec.file, spec.sha256, models)
        return ModelSource(spec.name or path.stem, gguf=path, cache=models)
    if spec.hf:
        return ModelSource(spec.name or spec.hf, folder=fetch_hub(spec.hf, spec.revision), cache=models)
    assert spec.path
    return _local(spec.path.expanduser().absolute(), spec.name, models)


def _local(path: Path, name: str | None, cache: Path) -> ModelSource:
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(name or path.stem, gguf=path, cache=cache)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise PartwiseError(f"{path} has no config.json, so it is not a model folder")
        return ModelSource(name or path.name, folder=path, cache=cache)
    if path.is_file():
        raise PartwiseError(f"{path} is neither a folder with config.json nor a .gguf file")
    raise PartwiseError(f"there is no model at {path}")

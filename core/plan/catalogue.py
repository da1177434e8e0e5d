"""Models, devices and prices by name, from the YAML files beside this module and the user's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date as Date
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from core.plan.errors import PlanError, explain, unknown
from core.plan.figures import Figure, parse_quantity
from core.plan.gguf_file import read_gguf
from core.plan.models import FILE, Model
from core.plan.shape import read_shape

HERE = Path(__file__).parent
_DATE = re.compile(r"\d{4}-\d{2}(-\d{2})?")


class Price(BaseModel):
    """US dollars for one device for one hour, on the day `date` says. There is no price without a date."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    usd_per_hour: float
    date: str
    provider: str = "yours"
    source: str = "given"

    @field_validator("date", mode="before")
    @classmethod
    def _dated(cls, value: object) -> str:
        if not _DATE.fullmatch(str(value)):
            raise ValueError(f"a price needs the date it was seen, as YYYY-MM-DD or YYYY-MM, not {value!r}")
        return str(value)

    @field_validator("usd_per_hour")
    @classmethod
    def _positive(cls, value: float) -> float:
        if not value > 0:
            raise ValueError("a price must be above 0")
        return value

    def label(self) -> str:
        return f"${self.usd_per_hour:g}/h, {self.provider}, {self.date}"


@dataclass(frozen=True)
class Device:
    """One accelerator: bytes of memory, bytes a second, and dense operations a second by format.

    `link` is the bandwidth in one direction to another device of the same kind, if known.
    """

    name: str
    title: str
    memory: Figure
    bandwidth: Figure
    rates: Mapping[str, Figure]
    power: Figure | None = None
    link: Figure | None = None
    prices: tuple[Price, ...] = ()

    def rate(self, formats: tuple[str, ...]) -> Figure:
        """The dense matrix rate of the first of `formats` that the device has."""
        for name in formats:
            if name in self.rates:
                return self.rates[name]
        raise PlanError(
            f"{self.name} has no dense matrix rate for {' or '.join(formats)} in the catalogue; "
            f"give the device in a file of your own (devices=FILE)"
        )

    def price(self, provider: str | None = None) -> Price | None:
        """The latest price (of one day, the lowest), of one provider if a part of its name is given."""
        offers = [p for p in self.prices if provider is None or provider.lower() in p.provider.lower()]
        return max(offers, key=lambda p: (p.date, -p.usd_per_hour), default=None)


def load_model(name: str, extra: str | Path | None = None) -> Model:
    """A model by its name, `hf:owner/name`, or the path of a config.json, its folder or a GGUF file.

    `extra` is a YAML file of the user's own with more models. Raises PlanError for an unknown name (with the
    nearest ones), a file that cannot be read, and a config that lacks a field (naming it).
    """
    if name.startswith("hf:"):
        path = _from_hub(name[3:])
        return _from_config(name, _read_json(path), str(path))
    entries = known_models(extra)
    key = {alias: n for n, e in entries.items() for alias in (n, *e.get("aliases", ()))}.get(name.lower())
    if key is not None:
        return _from_config(key, entries[key].get("config"), str(entries[key].get("source", "given")))
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    if "/" in name or name.endswith((".json", ".gguf")):
        hub = f"; for a model on the hub write hf:{name}" if re.fullmatch(r"[\w-]+/[\w.-]+", name) else ""
        raise PlanError(f"there is no file {path}{hub}")
    raise unknown("model", name, entries)


def _from_file(path: Path) -> Model:
    if path.suffix != ".gguf":
        return _from_config(path.parent.name or path.name, _read_json(path), str(path))
    config, sizes = read_gguf(path)
    shape = read_shape(config, str(path))
    return Model(path.stem, str(path), shape, FILE, file_bytes=sizes, notes=shape.notes)


def _from_config(name: str, config: Any, source: str) -> Model:
    shape = read_shape(config, f"the config of {name}")
    quantization = config.get("quantization_config") or {}
    kept = " ".join(quantization.get("modules_to_not_convert") or ())
    keep = {"attention"} if "attn" in kept else set()
    checkpoint = _checkpoint_format(config, quantization)
    return Model(name, source, shape, checkpoint, frozenset(keep), notes=shape.notes)


def _checkpoint_format(config: Mapping[str, Any], quantization: Mapping[str, Any]) -> str:
    """The weight format a config states; a method that is not known is returned as it is named."""
    method = quantization.get("quant_method")
    if method is None:
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        return {"float32": "fp32", "float16": "fp16"}.get(dtype, "bf16")
    if method == "fp8":
        return "fp8-block128" if quantization.get("weight_block_size") else "fp8"
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        return "nf4-double" if quantization.get("bnb_4bit_use_double_quant") else "nf4"
    bits = {"gptq": quantization.get("bits"), "awq": quantization.get("bits", 4), "bitsandbytes": 8}.get(
        method
    )
    return {4: "int4", 8: "int8"}.get(bits or 0, str(method))


def _from_hub(repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:
        raise PlanError(
            f"the config of hf:{repository} could not be fetched: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON: {error}") from error


@cache
def _read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is not valid YAML: {error}") from error


def _entries(built_in: str, extra: str | Path | None) -> dict[str, Any]:
    entries = dict(_read_yaml(HERE / "catalogue" / built_in))
    if extra is not None:
        more = _read_yaml(Path(extra).expanduser())
        if not isinstance(more, Mapping) or not all(isinstance(e, Mapping) for e in more.values()):
            raise PlanError(f"{extra} must map names to entries")
        entries.update({str(name).lower(): entry for name, entry in more.items()})
    return entries


def known_models(extra: str | Path | None = None) -> dict[str, Any]:
    return _entries("models.yaml", extra)


def known_devices(extra: str | Path | None = None) -> dict[str, Any]:
    return _entries("devices.yaml", extra)


def load_device(name: str, extra: str | Path | None = None) -> Device:
    """A device by its name in the catalogue or in the user's own file `extra`.

    Raises PlanError for an unknown name (with the nearest ones), for a figure without unit, source or date,
    for rates with sparsity, and for prices without a date.
    """
    entries = known_devices(extra)
    if name.lower() not in entries:
        raise unknown("device", name, entries)
    return read_device(name.lower(), entries[name.lower()])


def read_device(name: str, entry: Mapping[str, Any]) -> Device:
    where = f"device {name}"
    if odd := set(entry) - {
        "title",
        "source",
        "date",
        "memory",
        "bandwidth",
        "rates",
        "power",
        "link",
        "prices",
    }:
        raise PlanError(f"{where}: unknown fields {', '.join(sorted(odd))}")
    figures = {
        key: _figure(entry, entry[key], unit, f"{where}, {key}")
        for key, unit in (("memory", "B"), ("bandwidth", "B/s"), ("power", "W"), ("link", "B/s"))
        if key in entry
    }
    if lacking := {"memory", "bandwidth"} - figures.keys():
        raise PlanError(f"{where} lacks {' and '.join(sorted(lacking))}")
    rates = {
        key: _figure(entry, value, "op/s", f"{where}, rate {key}")
        for key, value in entry.get("rates", {}).items()
    }
    prices = tuple(read_price(p, where) for p in entry.get("prices", ()))
    title = str(entry.get("title", name))
    return Device(
        name,
        title,
        figures["memory"],
        figures["bandwidth"],
        rates,
        figures.get("power"),
        figures.get("link"),
        prices,
    )


def _figure(entry: Mapping[str, Any], value: Any, unit: str, where: str) -> Figure:
    own = value if isinstance(value, Mapping) else {"value": value}
    source, date = own.get("source", entry.get("source")), own.get("date", entry.get("date"))
    if source is None or date is None:
        raise PlanError(f"{where}: a figure needs a source and a date")
    try:
        number = parse_quantity(own["value"], unit)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    return Figure(value=number, unit=unit, kind=own.get("kind", "given"), source=str(source), date=str(date))


def read_price(fields: Mapping[str, Any], where: str) -> Price:
    if fields.get("date") is None:
        raise PlanError(f"{where}: a price without a date is refused, prices change; add date: YYYY-MM-DD")
    try:
        return Price(**fields)
    except ValidationError as error:
        raise PlanError(f"{where}: {explain(error)}") from error


def own_price(usd_per_hour: float, date: str | Date | None) -> Price:
    """The user's own price for a device and hour."""
    return read_price({"usd_per_hour": usd_per_hour, "date": date}, "your price")

"""What all suites share: finding the part, building it, the checks of its card, and running the checks."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal

from core.interfaces import (
    AllocatorOptions,
    AttentionKernel,
    AttentionStructure,
    BuildContext,
    ContextReduction,
    Drafter,
    DrafterOptions,
    EvictionPolicy,
    KVAllocator,
    KVQuantizer,
    Options,
    Part,
    PluginInfo,
    PrefixCache,
    Scheduler,
    SchedulerOptions,
    WeightQuantizer,
)
from core.registry import PartError, Registry

LEVELS = {0: "card", 1: "invariants", 2: "meaning", 3: "any order", 4: "cost"}

BASES: dict[str, tuple[type[Part[Any]], type[Options]]] = {
    "attention.structure": (AttentionStructure, Options),
    "attention.kernel": (AttentionKernel, Options),
    "kv_allocator": (KVAllocator, AllocatorOptions),
    "scheduler": (Scheduler, SchedulerOptions),
    "quantizer.weights": (WeightQuantizer, Options),
    "quantizer.kv": (KVQuantizer, Options),
    "prefix_cache": (PrefixCache, Options),
    "prefix_cache.eviction": (EvictionPolicy, Options),
    "drafter": (Drafter, DrafterOptions),
    "context_reduction": (ContextReduction, Options),
}

HEAVY = ("torch", "transformers", "triton")

PAGE_SIZES = (4, 16, 8, 32, 1, 64)

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check of one part came to; `detail` is the reason of a skip or a failure."""

    seam: str
    part: str
    check: str
    level: int
    status: Status
    detail: str = ""
    seconds: float = 0.0


class Suite:
    """The base of the suites. An author derives from a seam's suite and sets `part` to the registered name.

    Set `options` where the part cannot be built from its defaults, and `plugin_path` while it is one file. Checks are
    the methods named `test_l<level>_...`; each gets a fresh instance.
    """

    seam: ClassVar[str]
    part: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    plugin_path: ClassVar[str | None] = None
    cost_us: ClassVar[float] = 2000.0
    """Microseconds that one call may take where the card declares no `cost_us:<number>`."""

    @cached_property
    def registry(self) -> Registry:
        return _registry(self.plugin_path)

    @cached_property
    def card(self) -> PluginInfo:
        return self.registry.info(self.seam, self.part)

    @cached_property
    def page_size(self) -> int:
        """The first common page size that the part takes."""
        return self.common_page_size()

    def common_page_size(self, seam: str = "", part: str = "") -> int:
        """The first common page size that the part takes, and another part as well if one is named."""
        for size in PAGE_SIZES:
            context = BuildContext(page_size=size)
            reasons = [*self.registry.load(self.seam, self.part).unfit(self.option_values(page_size=size), context)]
            if part:
                reasons += self.registry.load(seam, part).unfit(self.registry.options(seam, part, {}), context)
            if not reasons:
                return size
        raise AssertionError(f"{self.part} {part} takes none of the page sizes {', '.join(map(str, PAGE_SIZES))}")

    def option_values(self, **given: Any) -> Options:
        """The part's options: the author's, and those of `given` that it has."""
        fields = self.card.options.model_fields
        wanted = {key: value for key, value in given.items() if key in fields}
        return self.registry.options(self.seam, self.part, {**wanted, **self.options})

    def build(self, context: BuildContext, **options: Any) -> Any:
        """A fresh part."""
        return self.registry.build(self.seam, self.part, self.option_values(**options), context)

    def skip_if(self, capability: str, why: str) -> None:
        """Skip a check that the card says does not apply."""
        if capability in self.card.provides:
            raise unittest.SkipTest(f"declares {capability}: {why}")

    def declared(self, key: str, default: float) -> float:
        """The number in a capability such as `growth:2`."""
        for capability in self.card.provides:
            name, _, value = capability.partition(":")
            if name == key and value:
                return float(value)
        return default

    @classmethod
    def checks(cls) -> list[str]:
        """The names of all checks, by level."""
        return sorted(name for name in dir(cls) if name.startswith("test_l"))

    # --- level 0: the card -----------------------------------------------------------------------------------------

    def test_l0_card_is_complete(self) -> None:
        card = self.card
        assert card.summary.strip(), f"{card.name}: the card's `summary` is empty; say in one line what the part does"
        assert card.name.isidentifier(), f"{card.name!r} cannot be written in a recipe: use letters, digits and _"
        for capability in card.provides | card.requires | card.conflicts:
            assert capability.strip() and " " not in capability, f"capability {capability!r} must be one word"

    def test_l0_class_fits_its_seam(self) -> None:
        part_class = self.registry.load(self.seam, self.part)
        base, _ = BASES[self.seam]
        assert issubclass(part_class, base), f"{part_class.__name__} must derive from core.interfaces.{base.__name__}"
        missing = sorted(getattr(part_class, "__abstractmethods__", ()))
        assert not missing, f"{part_class.__name__} lacks {', '.join(missing)}"

    def test_l0_options_are_strict(self) -> None:
        model, (_, base) = self.card.options, BASES[self.seam]
        assert issubclass(model, base), f"{model.__name__} must derive from core.interfaces.{base.__name__}"
        assert model.model_config.get("extra") == "forbid", f"{model.__name__} accepts unknown keys: keep extra=forbid"
        assert model.model_config.get("frozen"), f"{model.__name__} can be changed: keep frozen=True"
        given = {**self.options, "no_such_option": 1}
        try:
            self.registry.options(self.seam, self.part, given)
        except PartError as error:
            assert "no_such_option" in str(error), f"the error for an unknown option does not name it: {error}"
        else:
            raise AssertionError(f"{model.__name__} took the unknown option no_such_option")

    def test_l0_options_can_be_written_in_a_recipe(self) -> None:
        values = self.option_values().model_dump(mode="json")
        json.dumps(self.card.options.model_json_schema())
        again = self.registry.options(self.seam, self.part, values)
        assert again.model_dump(mode="json") == values, "options change when written out and read back"

    def test_l0_importing_the_card_is_light(self) -> None:
        if self.plugin_path:
            raise unittest.SkipTest("one file: card and class are imported together until the part is packaged")
        heavy = _new_process(self.seam, self.part, self.plugin_path)["heavy"]
        assert not heavy, (
            f"importing the card imports {', '.join(heavy)}; keep the card in a module of its own and name the class "
            "in `part`"
        )

    def test_l0_loads_in_a_spawned_process(self) -> None:
        there = _new_process(self.seam, self.part, self.plugin_path)["class"]
        here, again = (self.registry.load(self.seam, self.part) for _ in range(2))
        assert here is again, "loading twice gives two classes"
        assert there == here.__qualname__, f"a new process loads {there}, this one {here.__qualname__}"


@lru_cache
def _new_process(seam: str, part: str, plugin_path: str | None) -> dict[str, Any]:
    """What a fresh interpreter makes of a part: heavy modules that its card imports, and its class's name."""
    code = (
        "import json, sys\n"
        "from core.registry import Registry\n"
        f"seam, part, registry = {seam!r}, {part!r}, Registry({plugin_path!r})\n"
        "registry.info(seam, part)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(json.dumps({'heavy': heavy, 'class': registry.load(seam, part).__qualname__}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{part} does not load in a new process:\n{done.stderr.strip()[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@lru_cache
def _registry(plugin_path: str | None) -> Registry:
    return Registry(plugin_path)


def level_of(check: str) -> int:
    return int(check.removeprefix("test_l").split("_")[0])


def run(
    suite: type[Suite], levels: set[int] | None = None, keep: Callable[[str], bool] = lambda name: True
) -> Iterator[Outcome]:
    """Run a suite's checks without pytest, one outcome at a time."""
    for check in suite.checks():
        if (levels is None or level_of(check) in levels) and keep(check):
            yield _outcome(suite, check)


def _outcome(suite: type[Suite], check: str) -> Outcome:
    start = time.perf_counter()
    status: Status = "passed"
    detail = ""
    try:
        getattr(suite(), check)()
    except unittest.SkipTest as skip:
        status, detail = "skipped", str(skip)
    except Exception as error:
        status, detail = "failed", describe(error)
    return Outcome(suite.seam, suite.part, check, level_of(check), status, detail, time.perf_counter() - start)


def describe(error: BaseException) -> str:
    """A failure in words: an assertion's own message, or the error's kind as well."""
    text = str(error)
    if isinstance(error, AssertionError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__

"""How an author knows that a part is right: a conformance suite for each seam.

    from core.testing import SchedulerSuite

    class TestMine(SchedulerSuite):
        part = "mine"

or, in one line, `TestMine = conformance("scheduler", "mine")`. Suites load when they are named, so that pytest starts
without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from core.testing.allocators import AllocatorSuite
    from core.testing.drafters import DrafterSuite
    from core.testing.evictions import EvictionSuite
    from core.testing.kernels import KernelSuite
    from core.testing.kv_formats import KVQuantizerSuite
    from core.testing.prefix_caches import PrefixCacheSuite
    from core.testing.reductions import ReductionSuite
    from core.testing.schedulers import SchedulerSuite
    from core.testing.structures import StructureSuite
    from core.testing.suite import Suite
    from core.testing.weights import WeightQuantizerSuite

SUITES: Final[dict[str, str]] = {
    "attention.structure": "structures:StructureSuite",
    "attention.kernel": "kernels:KernelSuite",
    "kv_allocator": "allocators:AllocatorSuite",
    "scheduler": "schedulers:SchedulerSuite",
    "quantizer.weights": "weights:WeightQuantizerSuite",
    "quantizer.kv": "kv_formats:KVQuantizerSuite",
    "prefix_cache": "prefix_caches:PrefixCacheSuite",
    "prefix_cache.eviction": "evictions:EvictionSuite",
    "drafter": "drafters:DrafterSuite",
    "context_reduction": "reductions:ReductionSuite",
}
"""Where each seam's suite lies, within this package."""

__all__ = [
    "SUITES",
    "AllocatorSuite",
    "DrafterSuite",
    "EvictionSuite",
    "KVQuantizerSuite",
    "KernelSuite",
    "PrefixCacheSuite",
    "ReductionSuite",
    "SchedulerSuite",
    "StructureSuite",
    "WeightQuantizerSuite",
    "conformance",
    "suite_for",
]


def suite_for(seam: str) -> type[Suite]:
    """The seam's suite. KeyError: there is no such seam."""
    module, _, name = SUITES[seam].partition(":")
    suite: type[Suite] = getattr(importlib.import_module(f"core.testing.{module}"), name)
    return suite


def conformance(seam: str, part: str, *, plugin_path: str | None = None, **options: Any) -> type[Suite]:
    """A test class of every check for one part, built with `options`."""
    name = f"Test_{seam.replace('.', '_')}_{part}"
    return type(name, (suite_for(seam),), {"part": part, "options": options, "plugin_path": plugin_path})


def __getattr__(name: str) -> Any:
    for where in SUITES.values():
        module, _, suite = where.partition(":")
        if suite == name:
            return getattr(importlib.import_module(f"core.testing.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

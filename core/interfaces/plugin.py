"""What a part says of itself before it is imported: name, seam, API version, capabilities, options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from core.types import KVGroup

if TYPE_CHECKING:
    from core.interfaces.prefix_cache import EvictionPolicy

ENTRY_POINT_GROUP: Final = "partwise.plugins"

SEAMS: Final[dict[str, tuple[int, int]]] = {
    "attention.structure": (1, 0),
    "attention.kernel": (1, 0),
    "kv_allocator": (1, 0),
    "scheduler": (1, 0),
    "quantizer.weights": (1, 0),
    "quantizer.kv": (1, 0),
    "prefix_cache": (1, 0),
    "prefix_cache.eviction": (1, 0),
    "drafter": (1, 0),
    "context_reduction": (1, 0),
}
"""Each slot of a recipe with the version of its interface. A method added with a default steps the minor number,
anything else the major one; the major version before still loads."""


class Options(BaseModel):
    """What a recipe may set of a part; its fields are the keys. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """A part's card, kept in a module that imports nothing heavy. Its entry point in the group `partwise.plugins` is
    named `<seam>.<name>` and points here.

    `part` is where the class lies (`package.module:Class`), imported only when a recipe names it. `options` is its
    pydantic model. `provides`, `requires` and `conflicts` are capabilities, such as `kv:int8` or `hidden_states`;
    `requires` may hold alternatives, `a|b`. Capabilities starting with `lossless` or `lossy` say what a part does to
    greedy output.
    """

    name: str
    seam: str
    part: str
    api: tuple[int, int] = (1, 0)
    options: type[Options] = Options
    provides: frozenset[str] = field(default_factory=frozenset)
    requires: frozenset[str] = field(default_factory=frozenset)
    conflicts: frozenset[str] = field(default_factory=frozenset)
    summary: str = ""

    def __post_init__(self) -> None:
        if self.seam not in SEAMS:
            raise ValueError(f"part {self.name!r}: unknown seam {self.seam!r}; the seams are {', '.join(SEAMS)}")
        if ":" not in self.part:
            raise ValueError(f"part {self.name!r}: `part` must read package.module:Class, not {self.part!r}")


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    """What a part is built with, and all it learns of the rest. Sizes in tokens unless said otherwise.

    `page_bytes` is what a page holds in all layers of the first group; `dtype` is the activations'.
    """

    page_size: int = 16
    max_model_len: int = 2048
    max_running: int = 16
    token_budget: int = 256
    vocab_size: int = 0
    page_bytes: int = 0
    threads: int = 1
    dtype: str = "float32"


@dataclass(frozen=True, kw_only=True)
class PoolContext(BuildContext):
    """For an allocator: the pool of one KV group."""

    n_pages: int = 0
    group: KVGroup | None = None


@dataclass(frozen=True, kw_only=True)
class CacheContext(BuildContext):
    """For a prefix cache: the policy that chooses what it gives up first."""

    eviction: EvictionPolicy | None = None


OptionsT_co = TypeVar("OptionsT_co", bound=Options, covariant=True)


class Part(Generic[OptionsT_co]):
    """The base of every part. The registry builds it as `cls(options, context)`."""

    def __init__(self, options: OptionsT_co, context: BuildContext) -> None:
        self.options = options
        self.context = context

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        """Reasons why these sizes cannot work, each with what to change; asked before any weight is loaded."""
        return ()

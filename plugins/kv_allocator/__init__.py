"""Cards of the allocators."""

from typing import Literal

from pydantic import PositiveFloat

from core.interfaces.kv_allocator import AllocatorOptions
from core.interfaces.plugin import PluginInfo


class ContiguousOptions(AllocatorOptions):
    """`fit`: which free run a sequence takes, the `first` that is long enough or the shortest such (`best`)."""

    fit: Literal["first", "best"] = "first"


class TieredOptions(AllocatorOptions):
    """`host_ratio`: pages in host memory for each page of the pool."""

    host_ratio: PositiveFloat = 2.0


CONTIGUOUS = PluginInfo(
    name="contiguous",
    seam="kv_allocator",
    part="plugins.kv_allocator.contiguous:ContiguousAllocator",
    options=ContiguousOptions,
    provides=frozenset({"lossless", "unbroken"}),
    summary="One unbroken run, as long as the sequence may ever become",
)

PAGED = PluginInfo(
    name="paged",
    seam="kv_allocator",
    part="plugins.kv_allocator.paged:PagedAllocator",
    options=AllocatorOptions,
    provides=frozenset({"lossless"}),
    summary="Pages from a free list as tokens arrive",
)

PAGED_PER_HEAD = PluginInfo(
    name="paged_per_head",
    seam="kv_allocator",
    part="plugins.kv_allocator.per_head:PerHeadAllocator",
    options=AllocatorOptions,
    provides=frozenset({"lossless"}),
    summary="Pages for each KV head, so that each can forget other tokens",
)

TIERED = PluginInfo(
    name="tiered",
    seam="kv_allocator",
    part="plugins.kv_allocator.tiered:TieredAllocator",
    options=TieredOptions,
    provides=frozenset({"lossless", "swap"}),
    summary="Pages, and a tier in host memory for sequences that were preempted",
)

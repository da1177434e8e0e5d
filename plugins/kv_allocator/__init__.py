"""Cards of the allocators."""

from typing import Literal

from core.interfaces.kv_allocator import AllocatorOptions
from core.interfaces.plugin import PluginInfo


class ContiguousOptions(AllocatorOptions):
    """`fit`: which free run a sequence takes, the `first` that is long enough or the shortest such (`best`)."""

    fit: Literal["first", "best"] = "first"


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

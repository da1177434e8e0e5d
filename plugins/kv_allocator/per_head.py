"""Pages for each KV head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from core.interfaces.free_pages import StackedPages
from core.types import KVGroup


class PerHeadAllocator(StackedPages):
    """Paged, with page tables of its own for each KV head, so that a context reduction which forgets by head frees
    that head's pages, as in "KV-Compress" (Rehg, 2024). Layers with a window forget all heads at once and stay
    together."""

    @classmethod
    def regroup(cls, groups: Sequence[KVGroup]) -> list[KVGroup]:
        return [part for group in groups for part in _heads(group)]


def _heads(group: KVGroup) -> list[KVGroup]:
    if group.window is not None or group.kv_heads == 1:
        return [group]
    return [
        replace(group, name=f"{group.name}.head{head}", kv_heads=1, first_head=group.first_head + head)
        for head in range(group.kv_heads)
    ]

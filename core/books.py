"""What memory holds, counted: the rule of conservation, and bytes by KV group."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from core.cached import CachedPages
from core.pages import Pages
from core.sequence import Sequence
from core.types import KVStats, PartFault


def check_conservation(groups: list[Pages], cached: CachedPages, sequences: Iterable[Sequence]) -> None:
    """Every reference is a sequence's or the cache's, and the rest is free. PartFault."""
    sequences = list(sequences)
    for index, pages in enumerate(groups):
        held = (page for seq in sequences for page in seq.tables[index].pages)
        pages.check(itertools.chain(held, cached.in_group(index)), pages.pool.group.name)
    if cached.cache.n_pages != len(cached.pages):
        raise PartFault(f"{cached.label} says it keeps {cached.cache.n_pages} pages of {len(cached.pages)}")


def group_stats(index: int, pages: Pages, cached: CachedPages, sequences: list[Sequence]) -> dict[str, int]:
    """Pages and bytes of one group. `used` counts written tokens once, however many share their page."""
    filled: dict[int, int] = {}
    for seq in sequences:
        table = seq.tables[index]
        for position, page in enumerate(table.pages):
            tokens = min(pages.page_size, seq.num_computed - table.start - position * pages.page_size)
            filled[page] = max(filled.get(page, 0), tokens)
    n_cached = sum(page not in filled for page in cached.in_group(index))
    used_tokens = sum(tokens for tokens in filled.values() if tokens > 0) + n_cached * pages.page_size
    stats: KVStats = pages.allocator.stats(used_tokens)
    return {
        "pages": pages.n_pages,
        "free": pages.allocator.n_free,
        "held": pages.n_held - n_cached,
        "cached": n_cached,
        "total_bytes": stats.total,
        "used_bytes": stats.used,
        "reserved_bytes": stats.reserved,
        "internal_waste_bytes": stats.internal_waste,
        "external_waste_bytes": stats.external_waste,
    }

"""Pages in two tiers: the pool, and host memory behind it."""

from __future__ import annotations

from dataclasses import replace

from core.interfaces.free_pages import StackedPages
from core.interfaces.plugin import PoolContext
from plugins.kv_allocator import TieredOptions


class TieredAllocator(StackedPages):
    """Paged, with `host_ratio` host pages for each of the pool's. Under pressure the core moves sequences to the host
    tier instead of computing them again; when that is full as well, they are computed again."""

    options: TieredOptions

    def __init__(self, options: TieredOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        n_host_pages = max(1, int(self.n_pages * options.host_ratio))
        self._host = StackedPages(options, replace(context, n_pages=n_host_pages))

    @property
    def host(self) -> StackedPages:
        return self._host

"""Whole prompts only: the static cache that teaching material describes."""

from __future__ import annotations

from core.interfaces.page_chain import ChainedPage, PageChainCache


class ExactCache(PageChainCache):
    """Gives a prompt's pages to the same prompt alone, compared by its whole pages. One changed token loses all."""

    def hit(self, path: list[ChainedPage], n_pages: int) -> list[ChainedPage]:
        return path if path and len(path) == n_pages and path[-1].ends else []

    def is_of_use(self, node: ChainedPage) -> bool:
        return node.ends

"""Pages found by the hash of all tokens up to their end."""

from __future__ import annotations

from core.interfaces.page_chain import ChainedPage, PageChainCache


class HashCache(PageChainCache):
    """Gives the longest cached prefix. The scheme is that of vLLM's automatic prefix caching."""

    def hit(self, path: list[ChainedPage], n_pages: int) -> list[ChainedPage]:
        return path

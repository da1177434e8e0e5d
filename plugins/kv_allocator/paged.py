"""Pages handed out one by one as tokens arrive."""

from __future__ import annotations

from core.interfaces.free_pages import StackedPages


class PagedAllocator(StackedPages):
    """Paging as in Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (SOSP 2023): a sequence holds what it needs now, to the page."""

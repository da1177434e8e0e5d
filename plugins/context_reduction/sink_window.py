"""The first tokens and the last ones."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.context_reduction import ContextReduction, ContextView
from plugins.context_reduction import SinkWindowOptions


class SinkWindow(ContextReduction):
    """Keeps attention sinks and a window: StreamingLLM (Xiao et al., ICLR 2024), except that tokens keep the
    positions at which they were computed."""

    options: SinkWindowOptions

    def forget(self, view: ContextView) -> Sequence[int]:
        first = -(-self.options.sinks // view.page_size)
        return range(first, max(first, (view.kept - self.options.window) // view.page_size))

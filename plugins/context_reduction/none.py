"""Nothing is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.context_reduction import ContextReduction, ContextView


class NoReduction(ContextReduction):
    """Keeps the whole context."""

    def forget(self, view: ContextView) -> Sequence[int]:
        return ()

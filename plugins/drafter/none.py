"""No drafting: one token a step."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.drafter import Drafter
from core.types import Draft, DraftView


class NoDrafter(Drafter):
    """Never proposes a token."""

    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        return [Draft()] * len(views)

"""The drafter seam: which tokens to try next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from pydantic import PositiveInt

from core.interfaces.plugin import Options, Part
from core.types import Draft, DraftView


class DrafterOptions(Options):
    """`k`: the most tokens drafted at a time."""

    k: PositiveInt = 4


class Drafter(Part[DrafterOptions], ABC):
    """Proposes tokens; the core verifies them, so a draft changes speed and never output.

    Declare `hidden_states` in the card's `requires` to receive them, and return `probs` with drafts that were drawn
    at random.
    """

    @abstractmethod
    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        """One draft a view, in order, each of at most `view.k` tokens of the vocabulary; an empty one is welcome.
        Called only for sequences whose next token is to be decoded."""

    def forget(self, id: str) -> None:
        """A sequence has ended or was preempted; drop what is kept for it."""

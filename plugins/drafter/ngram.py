"""Prompt lookup: what followed the last tokens when they came before may follow again."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.drafter import Drafter
from core.interfaces.plugin import BuildContext
from core.types import Draft, DraftView
from plugins.drafter import NgramOptions


class NgramDrafter(Drafter):
    """Drafts from the latest earlier occurrence of the longest run of last tokens, n_max down to n_min.

    Method: prompt lookup decoding (Saxena, 2023). Each sequence keeps an index of its n-grams that grows with it, so a
    step costs by the tokens added and not by the context.
    """

    def __init__(self, options: NgramOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._sizes = range(options.n_max, options.n_min - 1, -1)
        self._indexes: dict[str, NgramIndex] = {}

    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        return [Draft(tokens=self._draft(view)) for view in views]

    def forget(self, id: str) -> None:
        self._indexes.pop(id, None)

    def _draft(self, view: DraftView) -> tuple[int, ...]:
        index = self._indexes.get(view.id)
        if index is None or index.n_tokens > len(view.tokens):
            index = self._indexes[view.id] = NgramIndex(self._sizes)
        index.grow(view.tokens)
        follower = index.follower(view.tokens)
        return () if follower is None else copy_from(view.tokens, follower, view.k)


class NgramIndex:
    """Where each n-gram of one sequence occurred last. An n-gram enters once a token has followed it, so the run at
    the very end finds earlier ones only."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.n_tokens = 0
        self._followers: dict[tuple[int, ...], int] = {}

    def grow(self, tokens: Sequence[int]) -> None:
        """Take in the tokens added since the last call."""
        for follower in range(max(self.n_tokens, 1), len(tokens)):
            for size in self.sizes:
                if size <= follower:
                    self._followers[tuple(tokens[follower - size : follower])] = follower
        self.n_tokens = len(tokens)

    def follower(self, tokens: Sequence[int]) -> int | None:
        """The position behind the latest earlier occurrence of the longest run of last tokens."""
        for size in self.sizes:
            if size < len(tokens):
                found = self._followers.get(tuple(tokens[len(tokens) - size :]))
                if found is not None:
                    return found
        return None


def copy_from(tokens: Sequence[int], position: int, k: int) -> tuple[int, ...]:
    """`k` tokens from `position` on. A copy that runs past the end goes on with what it has copied itself, so a loop
    is continued for as long as is wanted."""
    period = len(tokens) - position
    return tuple(tokens[position + offset % period] for offset in range(k))

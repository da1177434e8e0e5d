"""Drafters that are wrong in one way each."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from core.interfaces import BuildContext, Drafter, DrafterOptions, PluginInfo
from core.types import Draft, DraftView

VOCAB = 8


class Right(Drafter):
    """Repeats what followed the last token before; the ones below change one thing of it."""

    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        return [self.draft(view) for view in views]

    def draft(self, view: DraftView) -> Draft:
        return Draft(tuple(self.foreseen(view.tokens, view.k)))

    def foreseen(self, tokens: Sequence[int], k: int) -> list[int]:
        for start in range(len(tokens) - 1, 0, -1):
            if tokens[start - 1] == tokens[-1]:
                return list(tokens[start : start + k])
        return []


class Draws(Right):
    """Draws from a distribution that prefers what followed before."""

    def __init__(self, options: DrafterOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.generator = torch.Generator().manual_seed(0)

    def draft(self, view: DraftView) -> Draft:
        if not view.temperature:
            return super().draft(view)
        tokens = self.foreseen(view.tokens, view.k)
        probs = torch.full((len(tokens), VOCAB), 0.4 / VOCAB)
        for row, token in zip(probs, tokens, strict=True):
            row[token] += 0.6
        drawn = torch.multinomial(self.drawn_from(probs), 1, generator=self.generator)[:, 0] if tokens else probs[:, 0]
        return Draft(tuple(int(token) for token in drawn), self.claimed(probs))

    def drawn_from(self, probs: torch.Tensor) -> torch.Tensor:
        return probs

    def claimed(self, probs: torch.Tensor) -> torch.Tensor | None:
        return probs


class OneTooMany(Right):
    def draft(self, view: DraftView) -> Draft:
        return super().draft(replace(view, k=view.k + 1))


class OutsideTheVocabulary(Right):
    def foreseen(self, tokens: Sequence[int], k: int) -> list[int]:
        return [token - VOCAB for token in super().foreseen(tokens, k)]


class SkipsEmptyDrafts(Right):
    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        return [draft for draft in super().propose(views) if draft.tokens]


class WritesIntoTheView(Right):
    def foreseen(self, tokens: Sequence[int], k: int) -> list[int]:
        found = super().foreseen(tokens, k)
        if found and isinstance(tokens, list):
            tokens.append(found[0])
        return found


class ClaimsOtherProbabilities(Draws):
    def drawn_from(self, probs: torch.Tensor) -> torch.Tensor:
        return probs**3


class DrawsWithoutSaying(Draws):
    def claimed(self, probs: torch.Tensor) -> torch.Tensor | None:
        return None


class DoesNotNormalize(Draws):
    def claimed(self, probs: torch.Tensor) -> torch.Tensor | None:
        return probs * 1.3


class GivesOneRowForAll(Draws):
    def claimed(self, probs: torch.Tensor) -> torch.Tensor | None:
        return probs[:1]


class RemembersTheDead(Right):
    def __init__(self, options: DrafterOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.known: dict[str, list[int]] = {}

    def draft(self, view: DraftView) -> Draft:
        known = self.known.setdefault(view.id, [])
        known += list(view.tokens)[len(known) :]
        return Draft(tuple(self.foreseen(known, view.k)))


class MixesTheRows(Right):
    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        drafts = list(super().propose(views))
        return [Draft(draft.tokens[: view.k]) for draft, view in zip(reversed(drafts), views, strict=True)]


class ComparesAllPairs(Right):
    def propose(self, views: Sequence[DraftView]) -> Sequence[Draft]:
        for _ in views:
            for _ in views:
                sum(range(3000))
        return super().propose(views)


BROKEN = {
    OneTooMany: {
        "l3_any_order",
        "l2_serves_every_request",
        "l1_drafts_are_no_longer_than_asked",
        "l2_output_is_distributed_as_without_it",
    },
    OutsideTheVocabulary: {"l1_tokens_are_of_the_vocabulary"},
    SkipsEmptyDrafts: {
        "l1_one_draft_for_each_view",
        "l1_rows_do_not_depend_on_neighbours",
        "l2_output_is_distributed_as_without_it",
    },
    WritesIntoTheView: {"l2_output_equals_the_null_parts", "l1_views_are_not_changed"},
    ClaimsOtherProbabilities: {
        "l2_drafts_are_drawn_from_their_probabilities",
        "l2_output_is_distributed_as_without_it",
    },
    DrawsWithoutSaying: {"l2_drafts_without_probabilities_are_chosen"},
    DoesNotNormalize: {"l1_probabilities_are_distributions", "l2_drafts_are_drawn_from_their_probabilities"},
    GivesOneRowForAll: {
        "l1_probabilities_are_distributions",
        "l2_drafts_are_drawn_from_their_probabilities",
        "l2_output_is_distributed_as_without_it",
    },
    RemembersTheDead: {"l1_forget_starts_anew"},
    MixesTheRows: {"l1_rows_do_not_depend_on_neighbours"},
    ComparesAllPairs: {"l4_cost_and_growth"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="drafter",
        part=f"{__name__}:{part.__name__}",
        options=DrafterOptions,
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, Draws, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

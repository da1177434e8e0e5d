"""Conformance of a drafter: drafts that the core can verify, and probabilities that are the ones drawn from."""

from __future__ import annotations

import math
import random
import unittest
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from core.interfaces import BuildContext, Drafter
from core.sampling import Sampler, verify
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import Draft, DraftView, SamplingParams

VOCAB = 8
HIDDEN = 16
P_LEAST = 1e-4
"""How unlikely a sample must be, under what is claimed, to be held against the part."""


class DrafterSuite(SameOutput, Suite):
    """Checks of a `drafter` part."""

    seam: ClassVar[str] = "drafter"

    def drafter(self, vocab: int = VOCAB, k: int = 4) -> Drafter:
        drafter: Drafter = self.build(BuildContext(vocab_size=vocab, max_running=8), k=k)
        return drafter

    def view(
        self, tokens: Sequence[int], k: int = 4, id: str = "s0", temperature: float = 0.0, new: int | None = None
    ) -> DraftView:
        """A view of `tokens`, of which the last `new` (by default all) were computed since the call before."""
        hidden = None
        if "hidden_states" in self.card.requires:
            n = len(tokens) if new is None else new
            hidden = torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(len(tokens)))
        return DraftView(id, list(tokens), k, temperature, hidden)

    def looping(self, n: int = 24) -> list[int]:
        """Tokens that repeat, so that there is something to foresee."""
        return [(1, 4, 2, 6, 3)[i % 5] for i in range(n)]

    def proposed(self, drafter: Drafter, views: Sequence[DraftView]) -> list[Draft]:
        drafts = list(drafter.propose(views))
        assert len(drafts) == len(views), f"propose gave {len(drafts)} drafts for {len(views)} views"
        return drafts

    def many_views(self, temperature: float = 0.0) -> list[DraftView]:
        source = random.Random(0)
        texts = [[3], [3, 3], self.looping(), [source.randrange(VOCAB) for _ in range(40)], [0] * 12]
        return [self.view(text, k, f"s{n}-{k}", temperature) for n, text in enumerate(texts) for k in (1, 2, 4)]

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_one_draft_for_each_view(self) -> None:
        for views in ([], self.many_views()[:1], self.many_views()):
            self.proposed(self.drafter(), views)

    def test_l1_drafts_are_no_longer_than_asked(self) -> None:
        views = self.many_views()
        for view, draft in zip(views, self.drafter().propose(views), strict=False):
            assert len(draft.tokens) <= view.k, f"{len(draft.tokens)} tokens drafted where k is {view.k}"

    def test_l1_tokens_are_of_the_vocabulary(self) -> None:
        for draft in self.drafter().propose(self.many_views()):
            strange = [t for t in draft.tokens if type(t) is not int or not 0 <= t < VOCAB]
            assert not strange, f"drafted {strange!r}; tokens are ints from 0 to {VOCAB - 1}"

    def test_l1_probabilities_are_distributions(self) -> None:
        for draft in self.drafter().propose(self.many_views(temperature=1.0)):
            if draft.probs is None:
                continue
            shape, wanted = tuple(draft.probs.shape), (len(draft.tokens), VOCAB)
            assert shape == wanted, f"probs are {shape}; they must be {wanted} (tokens, vocabulary)"
            sums = draft.probs.double().sum(-1)
            assert bool((draft.probs >= 0).all()) and torch.allclose(sums, torch.ones_like(sums), atol=1e-4), (
                f"each row of probs must be at least 0 and sum to 1; the sums are {sums.tolist()}"
            )
            for token, row in zip(draft.tokens, draft.probs, strict=True):
                assert row[token] > 0, f"token {token} was drawn, and its own probs give it 0"

    def test_l1_views_are_not_changed(self) -> None:
        views = self.many_views()
        before = [list(view.tokens) for view in views]
        hidden = [None if view.hidden is None else view.hidden.clone() for view in views]
        self.drafter().propose(views)
        for view, tokens, states in zip(views, before, hidden, strict=True):
            assert list(view.tokens) == tokens, f"propose changed the tokens of {view.id}"
            same = states is None or view.hidden is None or torch.equal(view.hidden, states)
            assert same, f"propose changed the hidden states of {view.id}"

    def test_l1_forget_starts_anew(self) -> None:
        drafter = self.drafter()
        drafter.forget("never seen")
        self._skip_unless_chosen(drafter)
        drafter.propose([self.view(self.looping(40))])
        drafter.forget("s0")
        other = [5, 0, 5, 0, 7, 7, 5, 0]
        found = self.proposed(drafter, [self.view(other)])[0].tokens
        fresh = self.proposed(self.drafter(), [self.view(other)])[0].tokens
        assert found == fresh, f"after forget a new sequence of the same id gets {found}, a fresh drafter gives {fresh}"

    def test_l1_rows_do_not_depend_on_neighbours(self) -> None:
        self._skip_unless_chosen(self.drafter())
        together = self.proposed(self.drafter(), self.many_views())
        for view, draft in zip(self.many_views(), together, strict=True):
            alone = self.proposed(self.drafter(), [view])[0]
            assert alone.tokens == draft.tokens, f"{view.id} gets {draft.tokens} in a batch, {alone.tokens} alone"

    def _skip_unless_chosen(self, drafter: Drafter) -> None:
        if any(draft.probs is not None for draft in drafter.propose([self.view(self.looping(), id="probe")])):
            raise unittest.SkipTest("draws at random, so drafts cannot be compared one by one")

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_drafts_without_probabilities_are_chosen(self) -> None:
        drafter = self.drafter()
        for text in (self.looping(), self.looping(9)):
            views = [self.view(text, id=f"c{n}-{len(text)}", temperature=1.0) for n in range(8)]
            drafts = {draft.tokens for draft in self.proposed(drafter, views) if draft.probs is None}
            assert len(drafts) <= 1, f"drafts for one text differ ({sorted(drafts)}): drawn drafts must carry probs"

    def test_l2_drafts_are_drawn_from_their_probabilities(self) -> None:
        """By the randomized probability integral transform: draws from what is claimed come out uniform."""
        from scipy.stats import kstest

        drafter, source, points = self.drafter(), random.Random(1), []
        for n in range(400):
            draft = self.proposed(drafter, [self.view(self.looping(), id=f"d{n}", temperature=1.0)])[0]
            if draft.probs is None:
                raise unittest.SkipTest("drafts are chosen, not drawn")
            for token, row in zip(draft.tokens, draft.probs.double(), strict=True):
                points.append(float(row[:token].sum() + source.random() * row[token]))
        if points:
            p = kstest(points, "uniform").pvalue
            assert p > P_LEAST, f"tokens are not drawn from the probs that come with them (p = {p:.1g})"

    def test_l2_output_is_distributed_as_without_it(self) -> None:
        """Three tokens of a small known language, many times, verified as the core verifies."""
        from scipy.stats import chisquare

        n_texts = 1500
        found: Counter[tuple[int, ...]] = Counter()
        drafter = self.drafter(k=3)
        for n in range(n_texts):
            found[self._sample(drafter, f"t{n}", seed=n)] += 1
        expected = {text: n_texts * p for text, p in self._language().items()}
        assert found.keys() <= expected.keys(), f"texts the target never gives: {found.keys() - expected.keys()}"
        rare = sum(number for number in expected.values() if number < 5)
        common = [text for text, number in expected.items() if number >= 5]
        seen = [found[text] for text in common]
        p = chisquare([*seen, n_texts - sum(seen)], [*(expected[text] for text in common), max(rare, 1e-9)]).pvalue
        assert p > P_LEAST, f"with this drafter the output is not distributed as the target's (p = {p:.1g})"

    def _sample(self, drafter: Drafter, id: str, seed: int) -> tuple[int, ...]:
        prompt = self.looping(12)
        tokens = list(prompt)
        sampler = Sampler(SamplingParams(temperature=1.0), seed, 0, tokens, len(prompt), frozenset())
        seen = 0
        while len(tokens) < len(prompt) + 3:
            left = len(prompt) + 3 - len(tokens)
            view = self.view(tokens, left - 1, id, 1.0, new=len(tokens) - seen)
            draft = Draft() if left == 1 else self.proposed(drafter, [view])[0]
            seen = len(tokens)
            logits = torch.stack([target(token) for token in (tokens[-1], *draft.tokens)])
            tokens += verify(logits, [sampler], [draft])[0].tokens
        drafter.forget(id)
        return tuple(tokens[len(prompt) :])

    def _language(self) -> dict[tuple[int, ...], float]:
        texts: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(3):
            texts = {
                (*text, token): p * q
                for text, p in texts.items()
                for token, q in enumerate(target((text or self.looping(12))[-1]).double().softmax(-1).tolist())
            }
        return texts

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from core.testing.hypothesis_settings import run_machine
        from core.testing.machines import DrafterMachine

        run_machine(lambda: DrafterMachine(self))

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        few, many = self._propose_cost(1), self._propose_cost(10)
        assert_cost(few, self.declared("cost_us", self.cost_us), "a draft at 200 tokens")
        assert_growth(few, many, self.declared("growth", 1), "drafting for 10 times the sequences")

    def _propose_cost(self, sequences: int) -> Cost:
        drafter = self.drafter()
        texts = [self.looping(200) for _ in range(sequences)]

        def grow() -> None:
            for text in texts:
                text.append(text[-5])
            drafter.propose([self.view(text, id=f"s{n}", new=1) for n, text in enumerate(texts)])

        return microseconds(grow, repeats=5, at_least_s=0.001)


def target(token: int) -> Tensor:
    """Logits [VOCAB] of the small language after `token`: some next tokens are likely, none is certain."""
    return torch.tensor([1.5 * math.cos(token + 2.0 * n) for n in range(VOCAB)])

"""Conformance of a context reduction: it forgets whole pages that are there, and each sequence by itself."""

from __future__ import annotations

from typing import ClassVar

import torch

from core.interfaces import BuildContext, ContextReduction, ContextView
from core.testing.cost import assert_cost, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import LayerSpec

LAYERS = [LayerSpec(n, 0, q_heads=4, kv_heads=2, key_dim=8, value_dim=8, scale=8**-0.5) for n in range(2)]
LONG = 1536
CHUNK = 256


class Running:
    """One sequence as the core runs it: `keys` [kept, Hkv, D] are what its pages still hold."""

    def __init__(self, part: ContextReduction, id: str, page_size: int, prompt: int, seed: int = 0) -> None:
        self.part = part
        self.id = id
        self.page_size = page_size
        self.prompt = prompt
        self.computed = 0
        self.source = torch.Generator().manual_seed(seed)
        self.keys = torch.empty(0, 2, 8)
        self.forgotten: list[list[int]] = []

    def step(self, n_tokens: int) -> list[int]:
        """Compute `n_tokens` more; the places that were forgotten after it."""
        queries = torch.randn(n_tokens, 4, 8, generator=self.source)
        self.keys = torch.cat([self.keys, torch.randn(n_tokens, 2, 8, generator=self.source)])
        ends_prompt = self.computed < self.prompt <= self.computed + n_tokens
        self.computed += n_tokens
        if self.part.observes == "always" or (self.part.observes == "prompt_end" and ends_prompt):
            self._observe(queries)
        view = ContextView(self.id, 0, len(self.keys), self.computed, self.prompt, self.page_size)
        places = list(self.part.forget(view))
        wrong = [place for place in places if not 0 <= place < view.n_pages - 1]
        assert not wrong, f"forget gave places {wrong} of {view.n_pages} pages; the last one stays, as it is written to"
        assert places == sorted(set(places)), f"places must rise, and each come once: {places}"
        kept = torch.ones(len(self.keys), dtype=torch.bool)
        for place in places:
            kept[place * self.page_size : (place + 1) * self.page_size] = False
        self.keys = self.keys[kept]
        self.forgotten.append(places)
        return places

    def prefill(self, n_tokens: int) -> None:
        for start in range(0, n_tokens, CHUNK):
            self.step(min(CHUNK, n_tokens - start))

    def _observe(self, queries: torch.Tensor) -> None:
        for layer in LAYERS:
            given = queries.clone(), self.keys.clone()
            self.part.observe(self.id, *given, layer)
            same = torch.equal(given[0], queries) and torch.equal(given[1], self.keys)
            assert same, "observe changed the queries or keys, which are the pool's own"


class ReductionSuite(SameOutput, Suite):
    """Checks of a `context_reduction` part."""

    seam: ClassVar[str] = "context_reduction"

    def reduction(self) -> ContextReduction:
        part: ContextReduction = self.build(BuildContext(page_size=self.page_size))
        return part

    def running(self, part: ContextReduction, id: str = "a", prompt: int = 50, seed: int = 0) -> Running:
        return Running(part, id, self.page_size, prompt, seed)

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_places_are_there_and_rise(self) -> None:
        for chunk in (512, 90):
            seq = self.running(self.reduction(), prompt=LONG)
            while seq.computed < LONG:
                seq.step(min(chunk, LONG - seq.computed))
            for _ in range(40):
                seq.step(1)

    def test_l1_observes_is_one_of_three(self) -> None:
        observes = self.reduction().observes
        assert observes in ("never", "prompt_end", "always"), f"observes is {observes!r}"

    def test_l1_a_short_context_stays_whole(self) -> None:
        seq = self.running(self.reduction(), prompt=2)
        assert seq.step(2) == [], "it forgets part of a context of 2 tokens"

    def test_l1_each_sequence_by_itself(self) -> None:
        def run(names: str) -> dict[str, list[list[int]]]:
            part = self.reduction()
            rows = [self.running(part, name, LONG, seed=ord(name)) for name in names]
            for n_tokens in (LONG, 1, 1):
                for seq in rows:
                    seq.prefill(n_tokens)
            return {seq.id: seq.forgotten for seq in rows}

        together = run("ab")
        for name in "ab":
            assert run(name)[name] == together[name], f"what {name} forgets depends on the sequence beside it"

    def test_l1_one_that_ended_leaves_nothing(self) -> None:
        part = self.reduction()
        part.ended("never seen")
        first = self.running(part, prompt=LONG)
        first.prefill(LONG)
        part.ended("a")
        part.ended("a")
        again = self.running(part, prompt=LONG)
        again.prefill(LONG)
        assert again.forgotten == first.forgotten, "a new sequence of the same name is treated like the one that ended"

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_forgets_as_it_declares(self) -> None:
        seq = self.running(self.reduction(), prompt=LONG)
        seq.prefill(LONG)
        if "lossless" in self.card.provides:
            assert not any(seq.forgotten), "it declares lossless and forgets"
        else:
            assert any(seq.forgotten), f"it forgets nothing of {LONG} tokens; it should declare lossless"

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from core.testing.hypothesis_settings import run_machine
        from core.testing.machines import ReductionMachine

        run_machine(lambda: ReductionMachine(self))

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost(self) -> None:
        seq = self.running(self.reduction(), prompt=LONG)
        seq.prefill(LONG)
        view = ContextView("a", 0, len(seq.keys), LONG, LONG, self.page_size)
        cost = microseconds(lambda: self.reduction().forget(view))
        assert_cost(cost, self.declared("cost_us", self.cost_us), "building it and asking what to forget")

"""Conformance of an attention kernel: equal to attention computed the long way, whatever the memory looks like."""

from __future__ import annotations

import unittest
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.interfaces import AttentionKernel, BuildContext, KVQuantizer
from core.registry import PartError
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.paged import Case, Row, make_case
from core.testing.serving import SameOutput
from core.testing.suite import Suite

TOLERANCE = 2e-5
MIXED = (Row(1, 9), Row(5, 5), Row(3, 20), Row(1, 1), Row(1, 33))


class KernelSuite(SameOutput, Suite):
    """Checks of an `attention.kernel` part. It declares `window`, `softcap`, `sinks` and `latent` if it does them,
    and the KV formats it reads as `kv:<format>`, or `kv:any`. `error:<number>` is the largest error it makes in a
    result, where inputs are normally distributed (2e-5 if it states none)."""

    seam: ClassVar[str] = "attention.kernel"
    cost_us: ClassVar[float] = 20_000.0

    @property
    def tolerance(self) -> float:
        return self.declared("error", TOLERANCE)

    @property
    def context(self) -> BuildContext:
        return BuildContext(page_size=self.page_size)

    def quantizer(self, name: str = "none") -> KVQuantizer:
        try:
            options = self.registry.options("quantizer.kv", name, {})
            found: KVQuantizer = self.registry.build("quantizer.kv", name, options, self.context)
            return found
        except PartError as error:
            raise unittest.SkipTest(f"no KV format {name!r} to read: {error}") from None

    def kernel(self) -> AttentionKernel:
        kernel: AttentionKernel = self.build(self.context)
        return kernel

    def case(self, rows: Sequence[Row], quantizer: KVQuantizer | None = None, **settings: Any) -> Case:
        return make_case(rows, quantizer or self.quantizer(self.formats[0]), page_size=self.page_size, **settings)

    @property
    def formats(self) -> list[str]:
        """What it reads, with those installed for `*`."""
        formats = list(self.registry.load(self.seam, self.part).formats)  # type: ignore[attr-defined]
        return ["none", *(n for n in self.registry.names("quantizer.kv") if n != "none")] if "*" in formats else formats

    def compute(self, case: Case, kernel: AttentionKernel | None = None) -> Tensor:
        kernel = kernel or self.kernel()
        with torch.inference_mode():
            prepared = kernel.prepare(case.batch, [case.layer])
            return kernel.forward(case.q.clone(), case.kv, case.layer, case.batch, prepared)

    def assert_right(self, case: Case, what: str, kernel: AttentionKernel | None = None) -> None:
        found, wanted = self.compute(case, kernel), case.expected()
        assert found.shape == wanted.shape, f"{what}: the result is {tuple(found.shape)}, not {tuple(wanted.shape)}"
        assert torch.isfinite(found).all(), f"{what}: the result is not finite (it read slots that hold no token?)"
        error = (found.double() - wanted).abs().amax(dim=(1, 2))
        worst = int(error.argmax())
        assert error[worst] <= self.tolerance, f"{what}: token {worst} is off by {error[worst]:.2g}"

    def needs(self, feature: str) -> None:
        if feature not in self.card.provides:
            raise unittest.SkipTest(f"does not declare {feature}")

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_formats_are_declared(self) -> None:
        formats = self.registry.load(self.seam, self.part).formats  # type: ignore[attr-defined]
        wanted = {"kv:any" if name == "*" else f"kv:{name}" for name in formats}
        missing = wanted - self.card.provides
        assert not missing, f"the class reads {', '.join(formats)}; the card's `provides` lacks {', '.join(missing)}"

    def test_l1_inputs_are_not_changed(self) -> None:
        case = self.case(MIXED)
        q = case.q.clone()
        stored = {name: tensor.clone() for name, tensor in case.kv.storage.items()}
        table = case.batch.groups[0].page_table.clone()
        kernel = self.kernel()
        with torch.inference_mode():
            kernel.forward(case.q, case.kv, case.layer, case.batch, kernel.prepare(case.batch, [case.layer]))
        assert torch.equal(case.q, q), "forward changed q"
        assert torch.equal(case.batch.groups[0].page_table, table), "forward changed the page table"
        for name, tensor in stored.items():
            assert torch.equal(tensor.view(torch.uint8), case.kv.storage[name].view(torch.uint8)), f"changed {name!r}"

    def test_l1_layers_do_not_share_results(self) -> None:
        kernel, case, other = self.kernel(), self.case(MIXED), self.case(MIXED, seed=1)
        with torch.inference_mode():
            prepared = kernel.prepare(case.batch, [case.layer])
            first = kernel.forward(case.q, case.kv, case.layer, case.batch, prepared)
            before = first.clone()
            kernel.forward(other.q, case.kv, case.layer, case.batch, prepared)
        same = torch.equal(first.view(torch.uint8), before.view(torch.uint8))
        assert same, "the next layer's forward changed a result that was handed out"

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_prefill(self) -> None:
        for n in (1, 2, self.page_size, self.page_size + 1, 37):
            self.assert_right(self.case([Row(n, n)]), f"a prompt of {n} tokens")

    def test_l2_prefill_in_chunks(self) -> None:
        self.assert_right(self.case([Row(7, 30), Row(12, 40), Row(2, 17)]), "later chunks of prompts")

    def test_l2_decode(self) -> None:
        for length in (1, self.page_size, self.page_size + 1, 50):
            self.assert_right(self.case([Row(1, length)]), f"decode at {length} tokens")

    def test_l2_mixed_batch(self) -> None:
        self.assert_right(self.case(MIXED), "prefill and decode in one batch")

    def test_l2_rows_do_not_depend_on_neighbours(self) -> None:
        together = self.case(MIXED)
        found = self.compute(together)
        for index, row in enumerate(MIXED):
            alone = self.case([row])
            alone.kv, begin = together.kv, together.batch.query_starts[index]
            source, target = together.batch.groups[0], alone.batch.groups[0]
            target.page_table = source.page_table[index : index + 1, : source.num_pages[index]]
            target.first_slots, target.num_pages = [source.first_slots[index]], [source.num_pages[index]]
            alone.q = together.q[begin : begin + row.queries]
            error = (self.compute(alone) - found[begin : begin + row.queries]).abs().max()
            assert error <= self.tolerance, f"row {index} ({row}) differs by {error:.2g} when it is alone"

    def test_l2_neighbouring_pages(self) -> None:
        self.assert_right(self.case(MIXED, neighbours=True), "pages that are neighbours in order")
        self.assert_right(self.case([Row(1, 700), Row(40, 41)], neighbours=True), "a long unbroken run")

    def test_l2_head_layouts(self) -> None:
        for q_heads, kv_heads in ((4, 4), (8, 2), (4, 1), (6, 2)):
            self.assert_right(self.case(MIXED, q_heads=q_heads, kv_heads=kv_heads), f"{q_heads}/{kv_heads} heads")

    def test_l2_values_of_another_width(self) -> None:
        self.assert_right(self.case(MIXED, key_dim=24, value_dim=16), "values narrower than keys")

    def test_l2_window(self) -> None:
        self.needs("window")
        w = 8
        for length in (w - 1, w, w + 1, 3 * w):
            self.assert_right(self.case([Row(length, length)], window=w), f"window {w}, a prompt of {length}")
            self.assert_right(self.case([Row(1, length)], window=w), f"window {w}, decode at {length}")

    def test_l2_window_with_freed_pages(self) -> None:
        self.needs("window")
        size = self.page_size
        rows = [Row(1, 6 * size + 1, 5 * size), Row(2, 4 * size + 2, 2 * size), Row(3, 3)]
        self.assert_right(self.case(rows, window=size + 1), "a window whose passed pages were freed")

    def test_l2_softcap(self) -> None:
        self.needs("softcap")
        self.assert_right(self.case(MIXED, softcap=1.5), "a soft cap")

    def test_l2_sinks(self) -> None:
        self.needs("sinks")
        self.assert_right(self.case(MIXED, sinks=True), "sinks")
        if "window" in self.card.provides:
            self.assert_right(self.case(MIXED, sinks=True, window=6), "sinks and a window")

    def test_l2_latent(self) -> None:
        self.needs("latent")
        case = self.case(MIXED, kv_heads=1, key_dim=24, value_dim=16, value_in_key=True)
        self.assert_right(case, "values that lie in the keys")

    def test_l2_every_format(self) -> None:
        for name in self.formats:
            self.page_size = self.common_page_size("quantizer.kv", name)
            self.assert_right(self.case(MIXED, self.quantizer(name)), f"KV format {name}")

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_batch(self) -> None:
        from hypothesis import given
        from hypothesis import strategies as st

        from core.testing.hypothesis_settings import suite_settings

        window = "window" in self.card.provides
        kernel = self.kernel()
        row = st.tuples(st.integers(1, 12), st.integers(0, 40)).map(lambda n: Row(n[0], sum(n)))

        @suite_settings(examples=40)
        @given(
            rows=st.lists(row, min_size=1, max_size=6),
            width=st.sampled_from([None, 1, 3, 9]) if window else st.none(),
            neighbours=st.booleans(),
            seed=st.integers(0, 9),
        )
        def check(rows: list[Row], width: int | None, neighbours: bool, seed: int) -> None:
            case = self.case(rows, window=width, neighbours=neighbours, seed=seed)
            self.assert_right(case, f"{rows}, window {width}", kernel)

        check()

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        few, many = self._decode_cost(100), self._decode_cost(1_000)
        assert_cost(few, self.declared("cost_us", self.cost_us), "one layer's decode of 4 rows at 100 tokens")
        assert_growth(few, many, self.declared("growth", 1), "decode with 10 times the context")

    def _decode_cost(self, length: int) -> Cost:
        case, kernel = self.case([Row(1, length)] * 4), self.kernel()
        return microseconds(lambda: self.compute(case, kernel), repeats=5)

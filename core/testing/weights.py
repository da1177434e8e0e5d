"""Conformance of a weight quantizer: products within its stated error, in the bytes it says."""

from __future__ import annotations

import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from core.interfaces import BuildContext, Linear, WeightQuantizer
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite

LOSSLESS_ERROR = 1e-5
LOSSY_ERROR = 0.05
ALIGNMENT = 64

MATRICES = {
    "gaussian": lambda w: w,
    "outlier columns": lambda w: w * torch.where(torch.arange(w.shape[1]) % 37 == 3, 20.0, 1.0),
    "rows of unlike size": lambda w: w * torch.logspace(-3, 2, w.shape[0])[:, None],
    "all positive": lambda w: w.abs(),
    "all negative": lambda w: -w.abs(),
    "one row of zeros": lambda w: w * (torch.arange(w.shape[0])[:, None] != 1),
    "all zeros": lambda w: w * 0,
}
SHAPES = ((64, 192), (48, 100), (1, 32), (33, 7))


@dataclass(frozen=True, slots=True)
class InMemoryWeight:
    """A stored weight (core.interfaces.StoredWeight) held as float32."""

    tensor: Tensor
    storage: str = "f32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def dense(self) -> Tensor:
        return self.tensor.clone()

    def raw(self) -> Tensor:
        raise ValueError("a dense weight has no block format")


class WeightQuantizerSuite(SameOutput, Suite):
    """Checks of a `quantizer.weights` part. A lossy one may state `error:<number>`: the error of a product relative
    to the size of its exact result, both as root mean squares, for any of `MATRICES` (0.05 if it states none)."""

    seam: ClassVar[str] = "quantizer.weights"
    cost_us: ClassVar[float] = 5_000.0

    def quantizer(self) -> WeightQuantizer:
        quantizer: WeightQuantizer = self.build(BuildContext())
        return quantizer

    @property
    def bound(self) -> float:
        return LOSSLESS_ERROR if "lossless" in self.card.provides else self.declared("error", LOSSY_ERROR)

    def matrix(self, rows: int, columns: int, kind: str = "gaussian", seed: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        made: Tensor = MATRICES[kind](torch.randn(rows, columns, generator=generator))
        return made

    def inputs(self, n: int, width: int) -> Tensor:
        return torch.randn(n, width, generator=torch.Generator().manual_seed(99))

    def linear(self, matrices: Sequence[Tensor], bias: Tensor | None = None) -> Linear:
        name = "layers.0.mlp.up"
        return self.quantizer().linear(name, [InMemoryWeight(m) for m in matrices], bias, torch.float32)

    def product(self, linear: Linear, x: Tensor) -> Tensor:
        with torch.inference_mode():
            return linear(x)

    def assert_close(self, found: Tensor, exact: Tensor, what: str) -> None:
        assert found.shape == exact.shape, f"{what}: {tuple(found.shape)}, not {tuple(exact.shape)}"
        assert torch.isfinite(found).all(), f"{what}: not finite"
        error, size = _rms(found.double() - exact), _rms(exact)
        assert error <= self.bound * size + 1e-6, (
            f"{what}: the error is {error / max(size, 1e-12):.2g} of the result; {self.bound:g} is allowed"
        )

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_bytes_are_those_held(self) -> None:
        linear = self.linear([self.matrix(64, 192)], self.matrix(1, 64)[0])
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors_in(linear)}.values())
        assert held, "the product holds no tensor that can be found in its attributes"
        assert abs(linear.nbytes - held) <= ALIGNMENT, f"nbytes says {linear.nbytes}; its tensors hold {held} bytes"

    def test_l1_lossy_is_smaller(self) -> None:
        if "lossless" in self.card.provides:
            raise unittest.SkipTest("declares lossless: nothing is saved")
        weight, x = self.matrix(256, 256), self.inputs(8, 256)
        linear = self.linear([weight])
        dense, held = weight.nbytes, linear.nbytes
        kept = torch.allclose(self.product(linear, x), x @ weight.T, rtol=1e-5, atol=1e-5)
        assert held < dense or kept, f"what loses must save memory: {held} bytes, {dense} in float32"

    def test_l1_inputs_are_not_changed(self) -> None:
        weight, bias, x = self.matrix(48, 100), self.matrix(1, 48)[0], self.inputs(3, 100)
        copies = [t.clone() for t in (weight, bias, x)]
        self.product(self.linear([weight], bias), x)
        for name, tensor, before in zip(("weight", "bias", "input"), (weight, bias, x), copies, strict=True):
            assert torch.equal(tensor, before), f"the {name} was changed"

    def test_l1_matrices_are_independent(self) -> None:
        quantizer = self.quantizer()
        one, other = self.matrix(16, 32), self.matrix(16, 32, seed=5)
        first = quantizer.linear("a", [InMemoryWeight(one)], None, torch.float32)
        x = self.inputs(4, 32)
        before = self.product(first, x).clone()
        quantizer.linear("b", [InMemoryWeight(other)], None, torch.float32)
        assert torch.equal(self.product(first, x), before), "a second matrix changed the first one's product"

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_products_are_within_the_error(self) -> None:
        for kind in MATRICES:
            weight, x = self.matrix(64, 192, kind), self.inputs(9, 192)
            self.assert_close(self.product(self.linear([weight]), x), x.double() @ weight.double().T, kind)

    def test_l2_every_row_counts(self) -> None:
        """Rows of very unlike size: the error is taken row by row, so that small ones cannot hide."""
        weight, x = self.matrix(64, 192, "rows of unlike size"), self.inputs(32, 192)
        found, exact = self.product(self.linear([weight]), x).double(), x.double() @ weight.double().T
        error = (found - exact).pow(2).mean(0).sqrt() / exact.pow(2).mean(0).sqrt()
        worst = int(error.argmax())
        bound = 2 * self.bound
        assert error[worst] <= bound, f"output {worst} is off by {error[worst]:.2g} of its size; {bound:g} is allowed"

    def test_l2_any_shape_or_a_clear_error(self) -> None:
        for rows, columns in SHAPES:
            weight, x = self.matrix(rows, columns), self.inputs(3, columns)
            try:
                linear = self.linear([weight])
            except ValueError as error:
                assert str(columns) in str(error), f"the error for width {columns} does not name it: {error}"
                continue
            assert linear.out_features == rows, f"out_features is {linear.out_features} of {rows}"
            self.assert_close(self.product(linear, x), x.double() @ weight.double().T, f"shape {rows} x {columns}")

    def test_l2_stacks_in_order(self) -> None:
        parts = [self.matrix(n, 64, seed=n) for n in (32, 16, 16)]
        bias, x = self.matrix(1, 64)[0], self.inputs(5, 64)
        exact = x.double() @ torch.cat(parts).double().T + bias.double()
        self.assert_close(self.product(self.linear(parts, bias), x), exact, "three matrices stacked, with a bias")

    def test_l2_rows_do_not_depend_on_neighbours(self) -> None:
        linear, x = self.linear([self.matrix(64, 192)]), self.inputs(7, 192)
        together = self.product(linear, x)
        alone = torch.cat([self.product(linear, row[None]) for row in x])
        error = _rms(together - alone) / _rms(together)
        assert error <= LOSSLESS_ERROR, f"a row alone differs from the same row in a batch by {error:.2g}"

    def test_l2_embedding(self) -> None:
        quantizer, table = self.quantizer(), self.matrix(50, 64)
        embedding = quantizer.embedding("embed", InMemoryWeight(table), torch.float32)
        if embedding is None:
            raise unittest.SkipTest("leaves the token table to the core")
        tokens = torch.tensor([0, 49, 7, 7])
        self.assert_close(embedding(tokens), table[tokens].double(), "rows of the token table")
        head = quantizer.tied_head("embed", embedding, torch.float32)
        if head is not None:
            x = self.inputs(4, 64)
            self.assert_close(self.product(head, x), x.double() @ table.double().T, "the tied head")

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_numbers(self) -> None:
        from hypothesis import given
        from hypothesis import strategies as st

        from core.testing.hypothesis_settings import suite_settings

        @suite_settings(examples=40)
        @given(
            rows=st.sampled_from([1, 8, 32, 40]),
            columns=st.sampled_from([32, 64, 128]),
            kind=st.sampled_from(sorted(MATRICES)),
            scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
            seed=st.integers(0, 99),
        )
        def check(rows: int, columns: int, kind: str, scale: float, seed: int) -> None:
            weight, x = self.matrix(rows, columns, kind, seed) * scale, self.inputs(16, columns)
            try:
                linear = self.linear([weight])
            except ValueError:
                return  # said to be out of range, which is a clear answer
            found, exact = self.product(linear, x) / scale, x.double() @ weight.double().T / scale
            error, size = _rms(found.double() - exact), _rms(exact)
            assert error <= 2 * self.bound * size + 1e-6, f"{kind} times {scale:g}: off by {error / size:.2g}"

        check()

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        few, many = self._product_cost(64), self._product_cost(640)
        assert_cost(few, self.declared("cost_us", self.cost_us), "a product of 256 x 256 with 64 rows")
        assert_growth(few, many, self.declared("growth", 1), "a product with 10 times the rows")

    def _product_cost(self, n: int) -> Cost:
        linear, x = self.linear([self.matrix(256, 256)]), self.inputs(n, 256)
        return microseconds(lambda: self.product(linear, x), repeats=5)


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor reachable through an object's attributes, lists and dicts."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    children: list[Any] = []
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple)):
        children = list(value)
    elif type(value).__module__.split(".")[0] not in ("builtins", "torch"):
        slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        children = [*vars(value).values()] if hasattr(value, "__dict__") else []
        children += [getattr(value, name, None) for name in slots]
    elif isinstance(value, torch.nn.Module):
        children = [*value.parameters(), *value.buffers()]
    for child in children:
        yield from tensors_in(child, seen)


def _rms(x: Tensor) -> float:
    return float(x.double().pow(2).mean().sqrt())

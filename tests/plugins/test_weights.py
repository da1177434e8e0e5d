"""Stored weights: error bounds, bytes, and rows that do not feel their neighbours."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interfaces import BuildContext
from core.interfaces.plugin import Options
from plugins.quantizer.weights_int8 import PLANE, Int8Weights, quantize, split
from plugins.quantizer.weights_none import DenseWeights

CONTEXT = BuildContext()


class TorchInt8Weights(Int8Weights):
    """As on a machine on which the compiled kernels do not work."""

    def __init__(self, options, context):
        super().__init__(options, context)
        self._compiled = False


class Held:
    """A checkpoint's tensor held in memory."""

    storage = "f32"

    def __init__(self, tensor):
        self.tensor = tensor
        self.shape = tuple(tensor.shape)

    def dense(self):
        return self.tensor

    def raw(self):
        raise AssertionError("no block format")


def linear(part, *weights, bias=None):
    return part(Options(), CONTEXT).linear("w", [Held(weight) for weight in weights], bias, torch.float32)


SHAPES = st.tuples(st.integers(1, 70), st.integers(2, 90))


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 9), spread=st.sampled_from([1e-6, 1.0, 1e6]))
def test_a_stored_weight_is_off_by_half_a_step(shape, seed, spread):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread
    weight[0] = 0
    table, scales = quantize(weight)
    assert table.dtype == torch.int8
    error = (weight.double() - table.double() * scales.double()[:, None]).abs()
    assert bool((error <= scales.double()[:, None] * 0.5001).all())
    assert bool((table[0] == 0).all())


@settings(max_examples=40, deadline=None)
@given(shape=SHAPES, n_rows=st.integers(1, 9), seed=st.integers(0, 9), bias=st.booleans())
def test_a_product_is_that_of_the_stored_weights(shape, n_rows, seed, bias):
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(shape, generator=generator), torch.randn(n_rows, shape[1], generator=generator)
    offset = torch.randn(shape[0], generator=generator) if bias else None
    table, scales = quantize(weight)
    stored = table.double() * scales.double()[:, None]
    exact = x.double() @ stored.T + (0 if offset is None else offset.double())
    _, steps = split(x)
    bound = steps.double() * stored.abs().sum(dim=1) * 0.5 + 1e-5 * (1 + exact.abs())
    for part in (Int8Weights, TorchInt8Weights):
        assert bool(((linear(part, weight, bias=offset)(x).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("part", [Int8Weights, TorchInt8Weights])
@pytest.mark.parametrize("shape", [(960, 576), (64, 192), (48, 96)])
def test_a_row_does_not_depend_on_its_neighbours(part, shape):
    product = linear(part, torch.randn(shape))
    x = torch.randn(33, shape[1])
    x[3] = float("nan")
    x[4] *= 1e6
    together = product(x)
    assert together[3].isnan().all()
    for rows in (slice(0, 1), slice(0, 3), slice(5, 33), slice(32, 33)):
        assert torch.equal(product(x[rows]), together[rows])


def test_int8_holds_a_quarter_of_the_bytes():
    weight = torch.randn(512, 384)
    dense, int8 = linear(DenseWeights, weight, weight), linear(TorchInt8Weights, weight, weight)
    assert dense.nbytes == 2 * weight.nbytes
    assert int8.weight.dtype == torch.int8
    assert int8.nbytes == dense.nbytes / 4 + 1024 * 4
    assert sum(t.nbytes for t in vars(int8).values() if isinstance(t, torch.Tensor)) == int8.nbytes
    assert linear(Int8Weights, weight, weight).nbytes == int8.nbytes


@pytest.mark.parametrize("part", [DenseWeights, Int8Weights, TorchInt8Weights])
def test_fused_weights_are_stacked(part):
    first, second, x = torch.randn(6, 8), torch.randn(10, 8), torch.randn(3, 8)
    fused = linear(part, first, second, bias=torch.arange(16.0))
    assert fused.out_features == 16
    torch.testing.assert_close(fused(x)[:, :6], linear(part, first, bias=torch.arange(6.0))(x))
    torch.testing.assert_close(fused(x)[:, 6:], linear(part, second, bias=torch.arange(6.0, 16.0))(x))


@pytest.mark.parametrize("part", [DenseWeights, TorchInt8Weights])
def test_a_tied_head_keeps_no_second_table(part):
    quantizer = part(Options(), CONTEXT)
    table = torch.randn(50, 8)
    embedding = quantizer.embedding("embed", Held(table), torch.float32)
    head = quantizer.tied_head("head", embedding, torch.float32)
    stored = next(t for t in vars(embedding).values() if isinstance(t, torch.Tensor))
    assert head.weight.data_ptr() == stored.data_ptr()
    tokens = torch.tensor([0, 49, 7])
    torch.testing.assert_close(embedding(tokens), table[tokens], atol=0.02, rtol=0.02)
    torch.testing.assert_close(head(embedding(tokens)), embedding(tokens) @ table.T, atol=0.2, rtol=0.02)


def test_shapes_and_numbers_that_cannot_be_stored_are_errors():
    with pytest.raises(ValueError, match="one width"):
        linear(Int8Weights, torch.randn(4, 8), torch.randn(4, 6))
    with pytest.raises(ValueError, match="at least 2"):
        linear(Int8Weights, torch.randn(4, 1))
    with pytest.raises(ValueError, match="NaN or infinite"):
        linear(Int8Weights, torch.tensor([[1.0, float("inf")]]))


def test_planes_hold_thirteen_bits():
    high_and_low, steps = split(torch.tensor([[1.0, -1.0, 0.5, 1e-3, 0.0]]))
    assert int(high_and_low.abs().max()) < PLANE
    whole = PLANE * high_and_low[0].double() + high_and_low[1].double()
    torch.testing.assert_close(
        whole * steps[0].double(), torch.tensor([1.0, -1.0, 0.5, 1e-3, 0.0]).double(), atol=1.3e-4, rtol=0
    )


def test_extreme_products_do_not_saturate_on_older_processors():
    code = (
        "import torch\n"
        "from plugins.quantizer.weights_int8 import Int8Linear\n"
        "w = torch.full((48, 1536), 127, dtype=torch.int8); w[::2] = -127\n"
        "x = torch.ones(5, 1536); x[1] = -1\n"
        "y = Int8Linear(w, torch.ones(48), None)(x)\n"
        "torch.testing.assert_close(y.double(), x.double() @ w.double().T)\n"
    )
    env = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

"""Inputs in three planes, which take one pass over 4-bit weights."""

from dataclasses import replace

import pytest
import torch

from kernels import cpu
from tests.kernels.test_linear import make


@pytest.mark.parametrize("kind", ["q4_1", "q4_0"])
@pytest.mark.parametrize("rows, n, k", [(1, 50, 96), (7, 33, 64), (13, 48, 576), (40, 16, 320)])
def test_products_have_the_precision_of_fp32(isa, kind, rows, n, k):
    packed, weight = make(kind, n, k, bias=True)
    x = torch.randn(rows, k)
    exact = x.double() @ weight.double().T + packed.bias
    got = cpu.linear(x, replace(packed, planes=3), isa=isa)
    assert (got - exact).abs().max() <= 2e-6 * exact.abs().max()


@pytest.mark.parametrize("kind", ["q4_1", "q4_0"])
def test_same_bits_for_any_batch_and_threads(isa, kind):
    packed = replace(make(kind, 100, 256)[0], planes=3)
    x = torch.randn(70, 256)
    cpu.set_num_threads(1)
    one_by_one = torch.cat([cpu.linear(row[None], packed, isa=isa) for row in x])
    for threads in (1, 2, 3):
        cpu.set_num_threads(threads)
        for rows in (70, 32, 11, 8, 5, 3):
            assert torch.equal(cpu.linear(x[:rows], packed, isa=isa), one_by_one[:rows])

"""Packed weights as objects that are called, and whether the kernels can be used at all."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.build import Unavailable, choose_isa, find_compiler, library_path
from kernels.cpu.library import available
from kernels.cpu.linear import BLOCK, PackedLinear, gather_rows, linear


@functools.cache
def unavailable() -> str:
    """Why the kernels cannot be used here, with what to do; empty if they can. The first call may build them, and
    says so on stderr."""
    try:
        built = library_path(choose_isa(), find_compiler()).exists()
    except Unavailable as error:
        return str(error)
    if not built:
        print("building the CPU kernels: once, some seconds", file=sys.stderr, flush=True)
    return available()[1]


@dataclass(eq=False)
class Product:
    """`x @ weight.T + bias` of rows x [T, k] in any floating type, which the result has too.

    With `woven` the rows of two matrices lie in turn, 16 of each (see `weave`); a call gives the first matrix's
    outputs, then the second's.
    """

    packed: PackedLinear
    woven: bool = False

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    @property
    def out_features(self) -> int:
        return self.packed.n

    def __call__(self, x: Tensor) -> Tensor:
        y = linear(x.float(), self.packed)
        if self.woven:
            y = y.view(len(x), -1, 2, BLOCK).transpose(1, 2).reshape(len(x), -1)
        return y.to(x.dtype)


@dataclass(eq=False)
class Table:
    """Rows of a packed matrix by their numbers int64 [T], in `dtype`."""

    packed: PackedLinear
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return gather_rows(self.packed, tokens).to(self.dtype)


def weave(heights: list[int]) -> Tensor | None:
    """The order in which to pack the stacked rows of matrices of these heights so that a gate meets what it gates:
    blocks of two equal matrices in turn. None: pack them as they are stacked."""
    if len(heights) != 2 or heights[0] != heights[1] or heights[0] % BLOCK:
        return None
    return torch.arange(sum(heights)).view(2, -1, BLOCK).transpose(0, 1).reshape(-1)

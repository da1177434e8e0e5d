"""Stored tensors: one tensor of a checkpoint, opened when asked for (core.interfaces.model.StoredWeight)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.models.dequant import dequantize

STORAGE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f64"}

Pick = Callable[[Tensor], Tensor]


class PlainWeight:
    """A tensor of plain numbers. `open` gives it as stored, without a copy where the file is mapped."""

    def __init__(
        self, open: Callable[[], Tensor], shape: Sequence[int], stored: torch.dtype, dtype: torch.dtype, device: str
    ) -> None:
        self.open, self._stored, self._dtype, self._device = open, stored, dtype, device
        self.shape = tuple(shape)

    @property
    def storage(self) -> str:
        return STORAGE.get(self._stored, str(self._stored).removeprefix("torch."))

    def dense(self) -> Tensor:
        return self.open().to(self._device, self._dtype)

    def raw(self) -> Tensor:
        return self.open().contiguous().view(torch.uint8).to(self._device)

    def pick(self, pick: Pick, shape: Sequence[int]) -> PlainWeight:
        """This weight with `pick` applied to the opened tensor."""
        return PlainWeight(lambda: pick(self.open()), shape, self._stored, self._dtype, self._device)


class BlockWeight:
    """A tensor in a GGUF block format. `open` gives its bytes, uint8 [..., rows, bytes a row]."""

    def __init__(
        self, open: Callable[[], Tensor], shape: Sequence[int], storage: str, dtype: torch.dtype, device: str
    ) -> None:
        self._open, self._dtype, self._device = open, dtype, device
        self.shape, self.storage = tuple(shape), storage

    def dense(self) -> Tensor:
        return dequantize(self._open(), self.storage, self._dtype).to(self._device)

    def raw(self) -> Tensor:
        return self._open().contiguous().to(self._device)

    def pick(self, pick: Pick, shape: Sequence[int]) -> BlockWeight:
        """This weight with `pick` applied to its bytes: it may choose and order rows, not columns."""
        return BlockWeight(lambda: pick(self._open()), shape, self.storage, self._dtype, self._device)


class MXFP4Weight:
    """A tensor of 4-bit floats with a scale for each 32, as GPT-OSS stores it (OCP Microscaling): `blocks`
    [..., rows, groups, 16] holds neighbours in one byte, `scales` [..., rows, groups] exponents. Its bytes are given
    in GGUF's order."""

    storage = "mxfp4"

    def __init__(
        self,
        blocks: Callable[[], Tensor],
        scales: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._blocks, self._scales, self._dtype, self._device = blocks, scales, dtype, device
        self.shape = tuple(shape)

    def dense(self) -> Tensor:
        return dequantize(self._packed(), self.storage, self._dtype).to(self._device)

    def raw(self) -> Tensor:
        return self._packed().to(self._device)

    def _packed(self) -> Tensor:
        blocks = self._blocks()
        numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
        packed = numbers[..., :16] | numbers[..., 16:] << 4
        return torch.cat((self._scales()[..., None], packed), -1).flatten(-2)

    def pick(self, pick: Pick, shape: Sequence[int]) -> MXFP4Weight:
        """This weight with `pick` applied to its blocks: it may choose and order rows, not columns."""
        return MXFP4Weight(lambda: pick(self._blocks()), lambda: pick(self._scales()), shape, self._dtype, self._device)


Weight = PlainWeight | BlockWeight | MXFP4Weight


def rows(weight: Weight, index: slice | Tensor) -> Weight:
    """Some rows of a weight, or all of them in another order."""
    if isinstance(index, slice):
        n = len(range(*index.indices(weight.shape[0])))
        return weight.pick(lambda tensor: tensor[index], (n, *weight.shape[1:]))
    return weight.pick(lambda tensor: tensor.index_select(0, index), (index.numel(), *weight.shape[1:]))


def expert(weight: Weight, number: int) -> Weight:
    """One expert of a weight [experts, ...]."""
    return weight.pick(lambda tensor: tensor[number], weight.shape[1:])


def transposed(weight: Weight) -> Weight:
    """[in, out] as [out, in]; plain numbers only."""
    return weight.pick(lambda tensor: tensor.T, (weight.shape[1], weight.shape[0]))

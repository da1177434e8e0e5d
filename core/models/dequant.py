"""GGUF blocks to numbers. The formats of the models at hand are done in torch, three times as fast as the rest, which
the `gguf` package does."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 18


def _scales(blocks: Tensor, columns: slice) -> Tensor:
    return blocks[:, columns].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    out = torch.empty(packed.shape[0], 2, packed.shape[1])
    out[:, 0] = packed & 15
    out[:, 1] = packed >> 4
    return out.view(packed.shape[0], -1)


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_scales(blocks, slice(0, 2)))


def _q4_1(blocks: Tensor) -> Tensor:
    pair = _scales(blocks, slice(0, 4))
    return _nibbles(blocks[:, 4:]).mul_(pair[:, :1]).add_(pair[:, 1:])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8) * _scales(blocks, slice(0, 2))


_FORMATS: dict[str, tuple[int, int, Callable[[Tensor], Tensor]]] = {
    "q4_0": (32, 18, _q4_0),
    "q4_1": (32, 20, _q4_1),
    "q8_0": (32, 34, _q8_0),
}
"""Numbers a block, bytes a block, and how to decode uint8 [blocks, bytes] to float32 [blocks, numbers]."""


def dequantize(raw: Tensor, storage: str, dtype: torch.dtype) -> Tensor:
    """uint8 [..., rows, bytes a row] -> `dtype` [..., rows, columns]. ValueError: a format nobody here reads."""
    if storage in _FORMATS:
        numbers, size, decode = _FORMATS[storage]
    else:
        numbers, size, decode = _library_format(storage)
    blocks = raw.reshape(-1, size)
    out = torch.empty(blocks.shape[0], numbers, dtype=dtype)
    step = max(1, _CHUNK_BYTES // size)
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = decode(blocks[start : start + step])
    return out.view(*raw.shape[:-1], raw.shape[-1] // size * numbers)


def _library_format(storage: str) -> tuple[int, int, Callable[[Tensor], Tensor]]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize as decode

    try:
        kind = GGMLQuantizationType[storage.upper()]
    except KeyError:
        raise ValueError(f"unknown block format {storage!r}") from None
    numbers, size = GGML_QUANT_SIZES[kind]

    def blocks(raw: Tensor) -> Tensor:
        try:
            return torch.from_numpy(decode(raw.reshape(1, -1).numpy(), kind)).view(-1, numbers)
        except NotImplementedError:
            raise ValueError(f"block format {storage!r} cannot be read; requantize the file to q8_0 or q4_1") from None

    return numbers, size, blocks


def block_bytes(columns: int, numbers: int, size: int) -> int:
    """Bytes of a row of `columns` numbers. ValueError: the row is no whole number of blocks."""
    if columns % numbers:
        raise ValueError(f"a row of {columns} numbers is not a whole number of blocks of {numbers}")
    return math.prod((columns // numbers, size))

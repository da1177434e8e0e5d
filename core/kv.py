"""The KV pools: one store a layer, in the quantizer's format, and the view of it that kernels read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.interfaces.quantizer import KVQuantizer
from core.types import Batch, KVField, KVFormat, KVGroup

PLAIN = "none"
CACHE_LINE = 64


class LayerKV:
    """One layer's cache (core.interfaces.KVView)."""

    def __init__(
        self, group: KVGroup, index: int, format: KVFormat, quantizer: KVQuantizer, storage: dict[str, Tensor]
    ) -> None:
        self.format = format
        self.storage = storage
        self.quantizer = quantizer
        self._group = index
        self._value_dim = group.value_dim if group.value_in_key else None
        self._flat = {name: tensor.flatten(0, 1) for name, tensor in storage.items()} if format.name == PLAIN else {}

    def write(self, k: Tensor, v: Tensor | None, slots: Tensor) -> None:
        """Encode k [T, Hkv, D] and v [T, Hkv, Dv] (None: values lie in the keys) at `slots` [T]."""
        self.quantizer.write(self.storage, k, k[..., : self._value_dim] if v is None else v, slots)

    def rows(self, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
        group = batch.groups[self._group]
        n_tokens = batch.kv_lens[row] - group.kv_starts[row]
        first = group.first_slots[row]
        if self._flat and first is not None:
            k = self._flat["k"][first : first + n_tokens]
            return k, self._flat["v"][first : first + n_tokens] if "v" in self._flat else k[..., : self._value_dim]
        k, v = self.quantizer.read(self.storage, group.page_table[row, : group.num_pages[row]], n_tokens)
        return k, v if self._value_dim is None else k[..., : self._value_dim]


class Pool:
    """The stores of one KV group: `n_pages` pages of `page_size` tokens in each of its layers. `pinned`: in host memory
    that a CUDA device copies from and to by itself."""

    def __init__(
        self,
        group: KVGroup,
        index: int,
        n_pages: int,
        page_size: int,
        quantizer: KVQuantizer,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self.group = group
        self.n_pages = n_pages
        self.page_size = page_size
        self.quantizer = quantizer
        self.device = torch.device(device)
        self.format = quantizer.format(group, page_size, dtype)
        self.layers = {
            layer: LayerKV(group, index, self.format, quantizer, self._storage(pinned)) for layer in group.layers
        }

    @property
    def nbytes(self) -> int:
        """What the process holds for this pool."""
        return sum(tensor.nbytes for layer in self.layers.values() for tensor in layer.storage.values())

    def copy(self, source: int, target: int) -> None:
        """Copy one page in every layer."""
        names = [field.name for field in self.format.fields if field.per != "pool"]
        for layer in self.layers.values():
            for name in names:
                layer.storage[name][target].copy_(layer.storage[name][source])

    def copy_to(self, pages: Sequence[int], other: Pool, targets: Sequence[int]) -> None:
        """Copy pages to a pool of the same group and format, in every layer: to pinned memory and from it without
        waiting for the device."""
        names = [field.name for field in self.format.fields if field.per != "pool"]
        runs = _runs(pages, targets)
        for layer, here in self.layers.items():
            for name in names:
                source, target = here.storage[name], other.layers[layer].storage[name]
                for first, to, n in runs:
                    target[to : to + n].copy_(source[first : first + n], non_blocking=True)

    def _storage(self, pinned: bool) -> dict[str, Tensor]:
        leading = {"token": (self.n_pages, self.page_size), "page": (self.n_pages,), "pool": ()}
        return {
            field.name: _zeros((*leading[field.per], *field.shape), field.dtype, self.device, pinned)
            for field in self.format.fields
        }


def page_bytes(group: KVGroup, format: KVFormat, page_size: int) -> int:
    """Bytes of one page in all layers of its group."""
    times = {"token": page_size, "page": 1, "pool": 0}
    return sum(_field_bytes(field) * times[field.per] for field in format.fields) * len(group.layers)


def shared_bytes(group: KVGroup, format: KVFormat) -> int:
    """Bytes that a pool holds in all layers of its group however many pages it has."""
    return sum(_field_bytes(field) for field in format.fields if field.per == "pool") * len(group.layers)


def pool_sizes(
    groups: Sequence[KVGroup], bytes_per_page: Sequence[int], page_size: int, kv_bytes: int, tokens: int, running: int
) -> list[int]:
    """Pages for each group out of `kv_bytes`, so that all run short at about the same load.

    A full group gets room for N tokens; a window group never needs more than N, nor more than `running` sequences
    of a window and one step of `tokens`. N is the largest that fits.
    """

    def pages(group: KVGroup, n_tokens: int) -> int:
        everything = -(-n_tokens // page_size)
        if group.window is None:
            return everything
        return min(everything, running * window_pages(group.window, tokens, page_size))

    def cost(n_tokens: int) -> int:
        return sum(pages(group, n_tokens) * size for group, size in zip(groups, bytes_per_page, strict=True))

    low, high = 0, kv_bytes // max(1, min(bytes_per_page)) * page_size
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(middle) <= kv_bytes else (low, middle - 1)
    return [pages(group, low // page_size * page_size) for group in groups]


def window_pages(window: int, step_tokens: int, page_size: int) -> int:
    """The most pages that a window and the tokens of one step can touch."""
    return -(-(window - 1 + step_tokens) // page_size) + 1


def _runs(pages: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Page by page copies, as (first page, first target, how many) where both have neighbours in order."""
    runs: list[tuple[int, int, int]] = []
    for page, target in zip(pages, targets, strict=True):
        first, to, n = runs[-1] if runs else (page, target, 0)
        if (page, target) == (first + n, to + n):
            runs[-1:] = [(first, to, n + 1)]
        else:
            runs.append((page, target, 1))
    return runs


def _field_bytes(field: KVField) -> int:
    nbytes: int = math.prod(field.shape) * field.dtype.itemsize
    return nbytes


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pinned: bool) -> Tensor:
    """Zeros that take memory only where they are written, on a cache line's boundary."""
    if pinned or device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)
    nbytes = math.prod(shape) * dtype.itemsize
    store = torch.from_numpy(np.zeros(nbytes + CACHE_LINE, dtype=np.uint8))
    start = -store.data_ptr() % CACHE_LINE
    return store[start : start + nbytes].view(dtype).view(shape)

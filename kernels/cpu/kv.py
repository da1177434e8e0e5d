"""Paged keys and values as the kernels read them, in three formats."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kernels.cpu import library
from kernels.cpu.library import check, pointer

KVFormatName = Literal["fp32", "bf16", "int8"]
GROUP = 16
"""Tokens that lie side by side in the int8 format; its page size must be a multiple."""

_NUMBER = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CODE = {"fp32": 0, "bf16": 1, "int8": 2}


@dataclass(frozen=True)
class KVField:
    """One stored tensor of a cache: `[n_pages, *shape]` of `dtype`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def kv_fields(format: KVFormatName, page_size: int, n_heads: int, key_dim: int, value_dim: int) -> list[KVField]:
    """What one layer stores in a page.

    `fp32` and `bf16`: `k` [page_size, n_heads, key_dim] and `v` [page_size, n_heads, value_dim].

    `int8`: codes of -127..127 and one half-precision scale for each token and head. `k` is
    [n_heads, page_size/16, K/2, 16, 2], 16 tokens side by side and neighbours of the head dimension in pairs; `v` is
    [n_heads, page_size/16, V/16, 8, 16, 2], neighbouring tokens in pairs. K and V are the dimensions rounded up to 16,
    the rest is zero. `k_scale` and `v_scale` are [n_heads, page_size].

    Raises:
        ValueError: an unknown format, or an int8 page that is not a multiple of 16 tokens.
    """
    if format in _NUMBER:
        dtype = _NUMBER[format]
        return [
            KVField("k", dtype, (page_size, n_heads, key_dim)),
            KVField("v", dtype, (page_size, n_heads, value_dim)),
        ]
    if format != "int8":
        raise ValueError(f"unknown KV format {format!r}; the kernels know {', '.join(_CODE)}")
    if page_size % GROUP:
        raise ValueError(
            f"int8 pages hold a multiple of {GROUP} tokens, not {page_size}; choose page_size 16, 32 or 64"
        )
    k, v, groups = _round_up(key_dim), _round_up(value_dim), page_size // GROUP
    return [
        KVField("k", torch.int8, (n_heads, groups, k // 2, GROUP, 2)),
        KVField("v", torch.int8, (n_heads, groups, v // GROUP, GROUP // 2, GROUP, 2)),
        KVField("k_scale", torch.float16, (n_heads, page_size)),
        KVField("v_scale", torch.float16, (n_heads, page_size)),
    ]


def _round_up(n: int) -> int:
    return (n + GROUP - 1) // GROUP * GROUP


@dataclass
class KVCache:
    """One layer's pages. The tensors may be views with any stride between pages (fp32 and bf16: between tokens and
    heads too), as long as the last dimension is contiguous.

    Attributes:
        k, v: as `kv_fields` says, with the pages first. `v` None (fp32 and bf16 only): the value is the first
            `value_dim` numbers of the key, as in multi-head latent attention.
        key_dim, value_dim: numbers a head keeps of a key and of a value.
    """

    format: KVFormatName
    page_size: int
    n_heads: int
    key_dim: int
    value_dim: int
    k: Tensor
    v: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    struct: library.KV = field(init=False, repr=False)

    def __post_init__(self) -> None:
        stored = {"k": self.k, "v": self.v, "k_scale": self.k_scale, "v_scale": self.v_scale}
        n_pages = self.k.shape[0]
        for want in kv_fields(self.format, self.page_size, self.n_heads, self.key_dim, self.value_dim):
            tensor = stored[want.name]
            if tensor is None:
                if want.name == "v" and self.format != "int8" and self.value_dim <= self.key_dim:
                    continue
                raise ValueError(f"a cache in format {self.format} needs {want.name}")
            check(want.name, tensor, (n_pages, *want.shape), want.dtype, contiguous=False)
            if tensor.stride(-1) != 1 or (self.format == "int8" and not tensor[:1].is_contiguous()):
                raise ValueError(f"{want.name} must be contiguous within a page; its strides are {tensor.stride()}")
        self.struct = self._struct()

    @classmethod
    def allocate(
        cls, format: KVFormatName, n_pages: int, page_size: int, n_heads: int, key_dim: int, value_dim: int
    ) -> KVCache:
        """A cache over new memory, not initialized."""
        fields = kv_fields(format, page_size, n_heads, key_dim, value_dim)
        tensors = {f.name: library.empty_huge((n_pages, *f.shape), f.dtype) for f in fields}
        return cls(format, page_size, n_heads, key_dim, value_dim, **tensors)

    def _struct(self) -> library.KV:
        v = self.k if self.v is None else self.v
        fixed = (
            _CODE[self.format],
            self.page_size,
            self.n_heads,
            self.key_dim,
            self.value_dim,
            int(self.v is not None),
        )
        pointers = (pointer(self.k), pointer(v), pointer(self.k_scale), pointer(self.v_scale))
        if self.k_scale is None or self.v_scale is None:
            return library.KV(*fixed, *pointers, *self.k.stride()[:3], *v.stride()[:3], 0, 0)
        return library.KV(
            *fixed, *pointers, self.k.stride(0), 0, 0, v.stride(0), 0, 0, self.k_scale.stride(0), self.v_scale.stride(0)
        )


def kv_write(cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, *, isa: str | None = None) -> None:
    """Stores keys and values, in the cache's format.

    Args:
        k: fp32 [T, n_heads, key_dim].
        v: fp32 [T, n_heads, value_dim]; None when the cache keeps no values of its own.
        slots: int64 [T], page * page_size + offset; negative entries are left out.
    """
    rope_write(cache, None, k, v, slots, None, None, None, isa=isa)


def rope_write(
    cache: KVCache,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    slots: Tensor,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    isa: str | None = None,
) -> None:
    """Rotates queries and keys in place (half-split pairs, as GPT-NeoX) and stores keys and values.

    Args:
        q: fp32 [T, Hq, key_dim] or None.
        k, v, slots: as in `kv_write`.
        positions: int64 [T]; rows of `cos` and `sin`. None with `cos` None: no rotation.
        cos, sin: fp32 [n_positions, rot / 2]; numbers after the first `rot` of a head are left as they are.
    """
    n_tokens = k.shape[0]
    _check_rows("k", k, (n_tokens, cache.n_heads, cache.key_dim))
    check("slots", slots, (n_tokens,), torch.int64)
    if (v is None) != (cache.v is None):
        raise ValueError("v must be given exactly when the cache keeps values of its own")
    if v is not None:
        _check_rows("v", v, (n_tokens, cache.n_heads, cache.value_dim))
    if q is not None:
        _check_rows("q", q, (n_tokens, q.shape[1], cache.key_dim))
    rot = 0
    if cos is not None:
        if sin is None or positions is None:
            raise ValueError("cos, sin and positions go together")
        check("cos", cos, (None, None), torch.float32)
        check("sin", sin, tuple(cos.shape), torch.float32)
        check("positions", positions, (n_tokens,), torch.int64)
        rot = 2 * cos.shape[1]
        if rot > cache.key_dim:
            raise ValueError(f"cos rotates {rot} numbers of a head that has {cache.key_dim}")
    library.load(isa).pw_rope_write(
        pointer(q),
        0 if q is None else q.stride(0),
        0 if q is None else q.shape[1],
        pointer(k),
        k.stride(0),
        pointer(v),
        0 if v is None else v.stride(0),
        n_tokens,
        pointer(cos),
        pointer(sin),
        rot,
        pointer(positions),
        pointer(slots),
        ctypes.byref(cache.struct),
        library.num_threads(),
    )


def _check_rows(name: str, x: Tensor, shape: tuple[int, int, int]) -> None:
    check(name, x, shape, torch.float32, contiguous=False)
    if x.stride(2) != 1 or (shape[1] > 1 and x.stride(1) != shape[2]):
        raise ValueError(f"{name}: the heads of a token must be contiguous; its strides are {x.stride()}")


def kv_read(cache: KVCache, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Pages back as numbers: fp32 [n, page_size, n_heads, key_dim] and [n, page_size, n_heads, value_dim].

    Args:
        pages: integers [n].
    """
    pages = pages.long()
    k = cache.k[pages]
    if cache.format != "int8":
        v = k[..., : cache.value_dim] if cache.v is None else cache.v[pages]
        return k.float(), v.float()
    assert cache.v is not None and cache.k_scale is not None and cache.v_scale is not None
    n = len(pages)
    keys = k.permute(0, 2, 4, 1, 3, 5).reshape(n, cache.page_size, cache.n_heads, -1)[..., : cache.key_dim]
    values = (
        cache.v[pages]
        .permute(0, 2, 4, 6, 1, 3, 5)
        .reshape(n, cache.page_size, cache.n_heads, -1)[..., : cache.value_dim]
    )
    k_scale, v_scale = (s[pages].transpose(1, 2).unsqueeze(-1).float() for s in (cache.k_scale, cache.v_scale))
    return keys.float() * k_scale, values.float() * v_scale

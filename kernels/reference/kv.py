"""Writing the int8 cache format, whose layout `kernels.cpu.kv.kv_fields` draws."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def write_int8(storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Rounds keys and values to codes and puts them in their places.

    Args:
        storage: `k`, `v`, `k_scale` and `v_scale` with the pages first.
        k, v: floating [T, H, K] and [T, H, V].
        slots: int64 [T], page * page_size + offset.
    """
    page_size = storage["k_scale"].shape[-1]
    page, offset = slots // page_size, slots % page_size
    group, lane = offset // 16, offset % 16
    codes, storage["k_scale"][page, :, offset] = _rounded(k)
    storage["k"].permute(0, 2, 4, 1, 3, 5)[page, group, lane] = codes.view(*codes.shape[:2], -1, 2)
    codes, storage["v_scale"][page, :, offset] = _rounded(v)
    storage["v"].permute(0, 2, 4, 6, 1, 3, 5)[page, group, lane // 2, lane % 2] = codes.view(*codes.shape[:2], -1, 16)


def _rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [T, H, D rounded up to 16] and half-precision scales [T, H]."""
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % 16))
    most = torch.finfo(torch.float16).max
    scale = (x.abs().amax(-1) / 127).clamp(max=most).half()
    codes = torch.round(x / torch.where(scale > 0, scale, 1).float()[..., None]).clamp(-127, 127)
    return codes.to(torch.int8), scale

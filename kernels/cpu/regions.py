"""Memory for packed weights: one behind the other on large pages, in the order in which they are packed.

A step that reads them in that order comes close to the memory's speed.
"""

from __future__ import annotations

import math
import threading
from typing import Final

import torch
from torch import Tensor

from kernels.cpu import library

REGION_BYTES: Final = 64 << 20
"""Taken at once. Memory that no weight has been written to is not resident."""
ALIGNMENT: Final = 64

_lock = threading.Lock()
_region = torch.empty(0, dtype=torch.uint8).numpy()
_used = 0


def room(*shape: int) -> Tensor:
    """uint8 of this shape, not filled, behind what was given out last. Its storage is its own part of the region, and
    keeps the region alive."""
    global _region, _used
    size = math.prod(shape)
    with _lock, torch.inference_mode(False):  # a region serves those who load under inference_mode and those who do not
        if _used + size > len(_region):
            _region = library.empty_huge((max(size, REGION_BYTES) + ALIGNMENT,), torch.uint8).numpy()
            _used = -_region.ctypes.data % ALIGNMENT
        given = torch.frombuffer(_region, dtype=torch.uint8, count=size, offset=_used)
        _used += size + -size % ALIGNMENT
        return given.view(shape)

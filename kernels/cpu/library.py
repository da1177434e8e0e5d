"""The loaded C library: its structures, its functions, and how many threads they use."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from kernels.cpu.build import Unavailable, build, choose_isa


class Linear(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("planes", c_int32),
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    ]


class KV(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("format", "page_size", "n_heads", "dk", "dv", "has_v")]
    _fields_ += [(name, c_void_p) for name in ("k", "v", "k_scale", "v_scale")]
    _fields_ += [
        (name, c_int64)
        for name in ("k_page", "k_token", "k_head", "v_page", "v_token", "v_head", "k_scale_page", "v_scale_page")
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        ("n_seq", c_int32),
        ("n_q_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("query_start", c_void_p),
        ("kv_len", c_void_p),
        ("kv_start", c_void_p),
        ("sinks", c_void_p),
    ]


class Layer(ctypes.Structure):
    _fields_ = [(name, Linear) for name in ("qkv", "o", "gate_up", "down")]
    _fields_ += [
        (name, c_void_p)
        for name in (
            "attn_norm",
            "ffn_norm",
            "post_attn_norm",
            "post_ffn_norm",
            "q_norm",
            "k_norm",
            "cos",
            "sin",
            "sinks",
        )
    ]
    _fields_ += [("kv", KV)]
    _fields_ += [(name, c_int32) for name in ("n_q_heads", "rot", "window", "group", "plan", "gate")]
    _fields_ += [("scale", c_float), ("softcap", c_float)]


class Model(ctypes.Structure):
    _fields_ = [
        ("n_layers", c_int32),
        ("hidden", c_int32),
        ("eps", c_float),
        ("embed_scale", c_float),
        ("logit_softcap", c_float),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embed", Linear),
        ("head", Linear),
    ]


class Group(ctypes.Structure):
    _fields_ = [("page_table", c_void_p), ("table_stride", c_int64), ("kv_start", c_void_p)]


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", c_int32),
        ("n_seq", c_int32),
        ("n_rows", c_int32),
        ("ids", c_void_p),
        ("embeddings", c_void_p),
        ("query_start", c_void_p),
        ("kv_len", c_void_p),
        ("groups", POINTER(Group)),
        ("rows", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
    ]


_SIGNATURES = {
    "pw_attention": [POINTER(Attention), POINTER(KV), c_void_p, c_int64, c_void_p, c_int64, c_int],
    "pw_linear_forward": [
        c_void_p,
        c_int64,
        c_int64,
        POINTER(Linear),
        c_int,
        c_void_p,
        c_float,
        c_int,
        c_void_p,
        c_int64,
        c_int,
    ],
    "pw_gather": [POINTER(Linear), c_void_p, c_int64, c_void_p],
    "pw_rms_norm": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_float, c_int64, c_int64, c_void_p],
    "pw_gate": [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p],
    "pw_rope_write": [
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_int64,
        c_int64,
        c_void_p,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
        POINTER(KV),
        c_int,
    ],
    "pw_huge_pages": [c_void_p, ctypes.c_size_t],
    "pw_pack": [c_void_p, c_int64, c_int64, c_int64, c_int64, c_int, c_void_p, c_int],
    "pw_step": [POINTER(Model), POINTER(Batch), c_int],
}


@functools.cache
def _load(isa: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(isa)))
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def load(isa: str | None = None) -> ctypes.CDLL:
    """The library for `isa` (default: the best this CPU has), built on the first call.

    Raises:
        Unavailable: no supported CPU or no compiler; the message says what to do.
    """
    return _load(choose_isa(isa))


def available(isa: str | None = None) -> tuple[bool, str]:
    """Whether the compiled kernels work here, and if not, why. Builds them when they are not built yet."""
    try:
        load(isa)
    except (Unavailable, OSError) as error:
        return False, str(error)
    return True, ""


_threads: int | None = None


def set_num_threads(n: int | None) -> None:
    """Threads of every later call; None goes back to the default, min(cores this process may use, torch's threads)."""
    global _threads
    if n is not None and n < 1:
        raise ValueError(f"the number of threads must be at least 1, not {n}")
    _threads = n


def num_threads() -> int:
    if _threads is not None:
        return _threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, torch.get_num_threads())


def empty_huge(shape: tuple[int, ...], dtype: torch.dtype, isa: str | None = None) -> torch.Tensor:
    """`torch.empty` on large memory pages where the system grants them; they are read half as fast again."""
    tensor = torch.empty(shape, dtype=dtype)
    load(isa).pw_huge_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return tensor


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def check(
    name: str, tensor: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, *, contiguous: bool = True
) -> torch.Tensor:
    """Raises ValueError unless the tensor is what a kernel may be given a pointer to; None in `shape` is any size."""
    fits = len(tensor.shape) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype != dtype or tensor.device.type != "cpu":
        want = "x".join("?" if n is None else str(n) for n in shape)
        raise ValueError(
            f"{name} must be a {want} tensor of {dtype} on the CPU, "
            f"not {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
        )
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
    return tensor

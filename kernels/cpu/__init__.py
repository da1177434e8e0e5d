"""Compiled kernels for x86 CPUs with AVX2 or AVX-512: a small C library over ctypes.

It is built with the system compiler when a part first asks for it (some seconds, then cached), never at import.
`available()` says whether it works here and, if not, why.
"""

from kernels.cpu.attention import Ragged, paged_attention
from kernels.cpu.build import Unavailable, supported_isas
from kernels.cpu.kv import KVCache, KVField, kv_fields, kv_read, kv_write, rope_write
from kernels.cpu.library import available, empty_huge, num_threads, set_num_threads
from kernels.cpu.linear import (
    PackedLinear,
    blocks_from_gguf,
    concatenate,
    dequantize,
    gather_rows,
    interleave,
    linear,
    pack_fp32,
    pack_int8,
    pack_q4_0,
    pack_q4_1,
    pack_q8_0,
    quantize_int4,
    quantize_int8,
)
from kernels.cpu.rows import gate, rms_norm
from kernels.cpu.step import Decoder, DecoderLayer

__all__ = [
    "Decoder",
    "DecoderLayer",
    "KVCache",
    "KVField",
    "PackedLinear",
    "Ragged",
    "Unavailable",
    "available",
    "blocks_from_gguf",
    "concatenate",
    "dequantize",
    "empty_huge",
    "gate",
    "gather_rows",
    "interleave",
    "kv_fields",
    "kv_read",
    "kv_write",
    "linear",
    "num_threads",
    "pack_fp32",
    "pack_int8",
    "pack_q4_0",
    "pack_q4_1",
    "pack_q8_0",
    "paged_attention",
    "quantize_int4",
    "quantize_int8",
    "rms_norm",
    "rope_write",
    "set_num_threads",
    "supported_isas",
]

"""Number formats for weights and KV: how many bytes a matrix or a token takes, scales included.

Sources: the OCP Microscaling (MX) specification 1.0 for MXFP4 (32 elements share an 8-bit scale); NVIDIA's
NVFP4 (16 share an FP8 scale, one FP32 a tensor); QLoRA (arXiv 2305.14314) for NF4 with blocks of 64 and
double quantization with blocks of 256; DeepSeek-V3 README_WEIGHTS for FP8 with 128 x 128 blocks; AutoGPTQ and
AWQ for INT4 in groups of 128 with an FP16 scale and a 4-bit zero; KIVI (arXiv 2402.02750) for 4-bit and 2-bit
KV in groups of 32.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from core.plan.errors import unknown


@dataclass(frozen=True)
class WeightFormat:
    """A weight format: `bits` an element, `scale_bits` for every block of `block` = (rows, columns) elements.

    A block side of 0 means the whole side. `outer_bits` are paid once for every `outer` blocks (NF4's second
    level). `rates` names the device rates a product can use, best first; weight-only formats multiply in
    BF16.
    """

    name: str
    bits: int
    block: tuple[int, int] = (0, 0)
    scale_bits: int = 0
    outer: int = 0
    outer_bits: int = 0
    rates: tuple[str, ...] = ("bf16", "fp32")

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of one [rows, columns] matrix with its scales; rows are outputs, scales run along inputs."""
        blocks = ceil(rows / (self.block[0] or rows)) * ceil(columns / (self.block[1] or columns))
        outer = ceil(blocks / self.outer) if self.outer else 0
        return ceil((rows * columns * self.bits + blocks * self.scale_bits + outer * self.outer_bits) / 8)


@dataclass(frozen=True)
class KVFormat:
    """A KV format: `bits` an element and `scale_bits` for every `group` elements (0: a whole vector)."""

    name: str
    bits: int
    group: int = 0
    scale_bits: int = 0

    def bytes(self, vectors: int, width: int) -> float:
        """Bytes of `vectors` vectors of `width` elements: what one layer keeps of one token."""
        groups = ceil(width / (self.group or width))
        return vectors * (width * self.bits + groups * self.scale_bits) / 8


WEIGHT_FORMATS = {
    f.name: f
    for f in (
        WeightFormat("fp32", 32, rates=("fp32",)),
        WeightFormat("fp16", 16),
        WeightFormat("bf16", 16),
        WeightFormat("fp8", 8, (1, 0), 32, rates=("fp8", "bf16", "fp32")),
        WeightFormat("fp8-block128", 8, (128, 128), 32, rates=("fp8", "bf16", "fp32")),
        WeightFormat("int8", 8, (1, 0), 16, rates=("int8", "bf16", "fp32")),
        WeightFormat("int4", 4, (1, 128), 20),
        WeightFormat("int4-symmetric", 4, (1, 128), 16),
        WeightFormat("nf4", 4, (1, 64), 32),
        WeightFormat("nf4-double", 4, (1, 64), 8, 256, 32),
        WeightFormat("mxfp4", 4, (1, 32), 8),
        WeightFormat("nvfp4", 4, (1, 16), 8, 10**18, 32, rates=("fp4", "bf16", "fp32")),
    )
}

KV_FORMATS = {
    f.name: f
    for f in (
        KVFormat("fp32", 32),
        KVFormat("fp16", 16),
        KVFormat("bf16", 16),
        KVFormat("fp8", 8),
        KVFormat("int8", 8, 0, 16),
        KVFormat("int4", 4, 32, 32),
        KVFormat("int2", 2, 32, 32),
    )
}

INDEX_KEYS = KVFormat("fp8 with one FP32 scale a vector", 8, 0, 32)


def weight_format(name: str) -> WeightFormat:
    if name not in WEIGHT_FORMATS:
        raise unknown("weight format", name, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[name]


def kv_format(name: str) -> KVFormat:
    if name not in KV_FORMATS:
        raise unknown("KV format", name, KV_FORMATS)
    return KV_FORMATS[name]

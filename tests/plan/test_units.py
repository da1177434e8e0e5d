"""Unit mistakes: GB and GiB, bits and bytes, sparse and dense, and numbers without a unit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from core.plan import PlanError, load_device
from core.plan.figures import parse_quantity, show_bytes
from core.plan.formats import KV_FORMATS, WEIGHT_FORMATS, kv_format, weight_format


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("24 GB", "B", 24e9),
        ("24 GiB", "B", 24 * 2**30),
        ("46068 MiB", "B", 46068 * 2**20),
        ("3.35 TB/s", "B/s", 3.35e12),
        ("2400 Gbit/s", "B/s", 300e9),
        ("989 TFLOP/s", "op/s", 989e12),
        ("242 TOP/s", "op/s", 242e12),
        ("989 TFLOPS", "op/s", 989e12),
        ("1.979 PFLOP/s", "op/s", 1.979e15),
        ("72 W", "W", 72),
    ],
)
def test_quantities(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "reason"),
    [
        (80, "B", "needs a number and a unit"),
        ("80", "B", "needs a number and a unit"),
        ("GB", "B", "needs a number and a unit"),
        ("80 GB", "B/s", "not in B/s"),
        ("3350 GB/s", "B", "not in B"),
        ("80 Gb", "B", "not in B"),
        ("1979 TFLOP/s sparse", "op/s", "with sparsity"),
        ("1979 TFLOP/s (2:4 sparsity)", "op/s", "with sparsity"),
        ("80 GB or so", "B", "or so"),
    ],
)
def test_unit_mistakes_are_refused(text: object, unit: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        parse_quantity(text, unit)


def test_a_gib_is_seven_per_cent_more_than_a_gb() -> None:
    assert parse_quantity("1 GiB", "B") / parse_quantity("1 GB", "B") == pytest.approx(1.0737, abs=1e-4)
    assert show_bytes(2**30) == "1.07 GB"


def test_catalogue_rates_are_dense() -> None:
    """NVIDIA prints 1,979 for the H100's BF16, 485 for the L4's FP8: both with sparsity."""
    assert load_device("h100-sxm").rates["bf16"].value == 989e12
    assert load_device("l4").rates["fp8"].value == 242e12


def test_a_sparse_rate_in_a_users_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "devices.yaml"
    file.write_text(
        "mine: {source: sheet, date: 2026-01-01, memory: 80 GB, bandwidth: 3350 GB/s, "
        "rates: {bf16: 1979 TFLOP/s with sparsity}}"
    )
    with pytest.raises(PlanError, match=r"device mine, rate bf16: .*half of it"):
        load_device("mine", file)


BITS = {
    "fp32": 32, "bf16": 16, "fp16": 16, "int4": 4.15625, "int4-symmetric": 4.125, "nf4": 4.5,
    "nf4-double": 4.127, "mxfp4": 4.25, "nvfp4": 4.5,
}  # fmt: skip


@pytest.mark.parametrize("name", BITS)
def test_bits_a_weight_with_scales(name: str) -> None:
    """Published: INT4 in groups of 128 4.156 and 4.125, NF4 4.5 and 4.127, MXFP4 4.25, NVFP4 4.5."""
    assert weight_format(name).bytes(4096, 4096) * 8 / 4096**2 == pytest.approx(BITS[name], abs=5e-4)


def test_formats_count_bytes_not_bits() -> None:
    assert weight_format("bf16").bytes(1, 1) == 2
    assert weight_format("int8").bytes(10, 100) == 10 * 100 + 10 * 2
    assert weight_format("fp8-block128").bytes(129, 128) == 129 * 128 + 2 * 4
    assert weight_format("mxfp4").bytes(1, 32) == 17
    assert kv_format("fp8").bytes(16, 128) == 2048
    assert kv_format("int8").bytes(16, 128) == 16 * (128 + 2)
    assert kv_format("int4").bytes(1, 32) * 8 / 32 == 5
    assert kv_format("int2").bytes(1, 32) * 8 / 32 == 3


def test_fewer_bits_are_never_more_bytes() -> None:
    for formats in (WEIGHT_FORMATS.values(), KV_FORMATS.values()):
        ordered = sorted(formats, key=lambda f: f.bits)
        for small, large in pairwise(ordered):
            if small.bits < large.bits:
                assert small.bytes(64, 256) < large.bytes(64, 256)

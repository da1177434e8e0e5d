"""The catalogue's models against published figures: KV bytes a token, parameters, weights, latents."""

from __future__ import annotations

import pytest

from core.plan import load_device, load_model, load_recipe, plan_memory
from core.plan.catalogue import known_models
from core.plan.figures import GB, GIB
from core.plan.formats import kv_format
from core.plan.memory import (
    Budget,
    kv_bytes,
    kv_growth,
    kv_window,
    kv_without_windows,
    latent_ratio,
)

BF16 = kv_format("bf16")

KV_TOKEN = {
    "llama-2-7b": 524_288, "llama-2-13b": 819_200, "llama-2-70b": 327_680, "llama-3-8b": 131_072,
    "llama-3-70b": 327_680, "llama-3.1-8b": 131_072, "llama-3.1-70b": 327_680, "llama-3.1-405b": 516_096,
    "llama-3.2-1b": 32_768, "llama-3.2-3b": 114_688, "mistral-7b-v0.1": 131_072, "mistral-7b": 131_072,
    "mixtral-8x7b": 131_072, "qwen2.5-0.5b": 12_288, "qwen2.5-1.5b": 28_672, "qwen2.5-3b": 36_864,
    "qwen2.5-7b": 57_344, "qwen2.5-14b": 196_608, "qwen2.5-32b": 262_144, "qwen2.5-72b": 327_680,
    "qwen3-0.6b": 114_688, "qwen3-1.7b": 114_688, "qwen3-8b": 147_456, "qwen3-32b": 262_144,
    "qwen3-30b-a3b": 98_304, "qwen3-235b-a22b": 192_512, "phi-3-mini": 393_216, "phi-3-medium": 204_800,
    "falcon-7b": 8_192, "deepseek-v2-lite": 31_104, "deepseek-v2": 69_120, "deepseek-v3": 70_272,
    "deepseek-v3.2": 70_272 + 8_052,
}  # fmt: skip

PARAMETERS = {
    "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320, "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496,
    "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552, "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512,
    "phi-3-mini": 3_821_079_552, "falcon-7b": 6_921_720_704, "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184, "gemma-3-1b": 999_885_952,
}  # fmt: skip

BILLIONS = {
    "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-14b": 14.770,
    "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721, "qwen3-8b": 8.191,
    "qwen3-32b": 32.762, "qwen3-30b-a3b": 30.532, "phi-3-medium": 13.960,
    "deepseek-v2": 235.74, "deepseek-v3": 671.03,
}  # fmt: skip

SLIDING = {
    # model: all layers full B/token, growth B/token, windows MiB, then GiB a sequence of 8K, 32K, 128K
    "gpt-oss-20b": (49_152, 24_576, 3.0, 0.190, 0.753, 3.003),
    "gpt-oss-120b": (73_728, 36_864, 4.5, 0.286, 1.129, 4.504),
    "gemma-3-1b": (26_624, 4_096, 11, 0.042, 0.136, 0.511),
    "gemma-3-4b": (139_264, 20_480, 116, 0.270, 0.738, 2.613),
    "gemma-3-12b": (393_216, 65_536, 320, 0.813, 2.31, 8.31),
    "gemma-3-27b": (507_904, 81_920, 416, 1.03, 2.91, 10.41),
    "gemma-2-9b": (344_064, 172_032, 672, 1.97, 5.91, 21.7),
}


@pytest.mark.parametrize("name", KV_TOKEN)
def test_kv_bytes_a_token(name: str) -> None:
    assert kv_without_windows(load_model(name), BF16) == KV_TOKEN[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_exact(name: str) -> None:
    assert load_model(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_in_billions(name: str) -> None:
    digits = len(str(BILLIONS[name]).partition(".")[2])
    assert round(load_model(name).parameters / 1e9, digits) == BILLIONS[name]


@pytest.mark.parametrize("name", SLIDING)
def test_sliding_windows(name: str) -> None:
    full, growth, window, *sequences = SLIDING[name]
    model = load_model(name)
    assert kv_without_windows(model, BF16) == full
    assert kv_growth(model, BF16) == growth
    assert kv_window(model, BF16) == window * 2**20
    for tokens, gib in zip((8192, 32768, 131072), sequences, strict=True):
        digits = len(str(gib).partition(".")[2])
        assert round(kv_bytes(model, BF16, tokens) / GIB, digits) == pytest.approx(
            gib, abs=1.01 * 10**-digits
        )


def test_mistral_0_1_stops_growing_at_its_window() -> None:
    model = load_model("mistral-7b-v0.1")
    assert kv_bytes(model, BF16, 4096) == kv_bytes(model, BF16, 30_000) == 512 * 2**20


def test_active_parameters_of_experts() -> None:
    assert load_model("mixtral-8x7b").active_parameters / 1e9 == pytest.approx(12.88, abs=0.005)
    assert load_model("deepseek-v2").active_parameters / 1e9 == pytest.approx(21.4, abs=0.05)
    assert load_model("deepseek-v3").active_parameters / 1e9 == pytest.approx(37.55, abs=0.005)
    for name, published in (("gpt-oss-120b", 5.13), ("gpt-oss-20b", 3.61)):
        model = load_model(name)
        embedding = model.shape.vocab * model.shape.hidden
        assert (model.active_parameters - embedding) / 1e9 == pytest.approx(published, abs=0.005)


def test_gpt_oss_120b_in_its_own_format_and_in_bf16() -> None:
    model = load_model("gpt-oss-120b")
    assert model.weight_bytes("checkpoint") / GB == pytest.approx(65.25, abs=0.005)
    assert model.weight_bytes("checkpoint") / GIB == pytest.approx(60.77, abs=0.005)
    assert model.weight_bytes("checkpoint", "experts") / GB == pytest.approx(60.91, abs=0.005)
    assert model.weight_bytes("bf16") / GB == pytest.approx(233.66, abs=0.005)
    # The often quoted 240 GB is 120 billion, the name, times two bytes; the model has 116.8 billion.
    assert 120e9 * 2 / GB == 240
    assert model.weight_bytes("bf16") == 2 * 116_829_156_672


def test_gpt_oss_20b_checkpoint() -> None:
    model = load_model("gpt-oss-20b")
    assert model.weight_bytes("checkpoint") / GB == pytest.approx(13.76, abs=0.005)
    assert model.weight_bytes("bf16") / GB == pytest.approx(41.83, abs=0.005)


@pytest.mark.parametrize(
    ("name", "gb"), [("llama-2-7b", 13.48), ("mistral-7b", 14.50), ("qwen3-235b-a22b", 470.2)]
)
def test_bf16_weights(name: str, gb: float) -> None:
    assert load_model(name).weight_bytes("bf16") / GB == pytest.approx(gb, abs=0.05)


def test_mistral_weights_in_eight_and_four_bits() -> None:
    """By hand: 6,979,321,856 parameters in linear layers, 262,410,240 that stay 16-bit."""
    model = load_model("mistral-7b-v0.1")
    linear = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    rest = 2 * 32000 * 4096 + 65 * 4096
    assert linear + rest == model.parameters
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 2 * 14336 + 4096)
    assert model.weight_bytes("int8") == linear + 2 * rows + 2 * rest
    assert model.weight_bytes("int4") == linear * (4 + 20 / 128) / 8 + 2 * rest
    assert model.weight_bytes("int4") / GB == pytest.approx(4.15, abs=0.005)
    assert model.weight_bytes("int8") / GB == pytest.approx(7.51, abs=0.005)


def test_mistral_users() -> None:
    model, card = load_model("mistral-7b"), load_device("l4")
    assert kv_growth(model, BF16) == 131_072
    assert kv_bytes(model, BF16, 4096) / GB == pytest.approx(0.54, abs=0.005)
    assert kv_bytes(model, BF16, 16384) / GB == pytest.approx(2.15, abs=0.005)
    assert 80 * kv_bytes(model, BF16, 4096) / GB == pytest.approx(43, abs=0.1)
    memory = plan_memory(model, card, load_recipe("premium_chat"), users=80, context=4096)
    assert card.memory.value == 24 * GB
    assert not memory.fits
    assert memory.users < 80


def test_latent_attention_against_mha() -> None:
    assert latent_ratio(32, 128, 512, 64) == 8192 / 576 == pytest.approx(14.2, abs=0.05)
    assert latent_ratio(128, 128, 512, 64) == 32768 / 576 == pytest.approx(56.9, abs=0.05)
    latent = load_model("deepseek-v2")
    as_mha = latent.converted("mha")
    assert kv_growth(as_mha, BF16) / kv_growth(latent, BF16) == pytest.approx(56.9, abs=0.05)
    mistral_heads = load_model("mistral-7b")
    ratio = kv_growth(mistral_heads.converted("mha"), BF16) / kv_growth(mistral_heads.converted("mla"), BF16)
    assert ratio == pytest.approx(14.2, abs=0.05)


def test_a_latent_is_not_split_by_tensor_parallelism() -> None:
    recipe = load_recipe("premium_chat", tp=8)
    latent = Budget(load_model("deepseek-v3"), load_device("h200"), recipe)
    grouped = Budget(load_model("llama-3.1-70b"), load_device("h200"), recipe)
    assert sum(latent.token_bytes(g) for g in latent.model.groups) == 70_272
    assert sum(grouped.token_bytes(g) for g in grouped.model.groups) == 327_680 / 8


def test_the_catalogue_is_large_and_sourced() -> None:
    models = known_models()
    assert len(models) >= 25
    assert all(entry["source"] for entry in models.values())

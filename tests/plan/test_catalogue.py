"""Names, files, sources and dates: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.plan import Device, PlanError, load_device, load_model, own_price
from core.plan.catalogue import known_devices, known_models, read_device, read_price
from core.plan.shape import read_shape

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip
DEVICE = {"source": "sheet", "date": "2026-01-01", "memory": "80 GB", "bandwidth": "2 TB/s"}


@pytest.mark.parametrize("name", known_devices())
def test_every_figure_has_a_source_and_a_date(name: str) -> None:
    device = load_device(name)
    figures = [device.memory, device.bandwidth, *device.rates.values()]
    figures += [f for f in (device.power, device.link) if f is not None]
    for figure in figures:
        assert figure.source
        assert figure.date
        assert figure.kind == "given"
    assert all(p.date and p.source for p in device.prices)


@pytest.mark.parametrize(
    ("name", "memory", "bandwidth", "bf16"),
    [
        ("l4", 24e9, 300e9, 121e12),
        ("l40s", 46068 * 2**20, 864e9, 362.05e12),
        ("a100-80", 80e9, 2039e9, 312e12),
        ("h100-sxm", 80e9, 3350e9, 989e12),
        ("h100-pcie", 80e9, 2000e9, 756.5e12),
        ("h200", 141e9, 4800e9, 989e12),
        ("b200", 180e9, 7700e9, 2250e12),
        ("rtx-4090", 24e9, 1008e9, 165.2e12),
        ("mi300x", 192e9, 5300e9, 1307.4e12),
    ],
)
def test_device_figures(name: str, memory: float, bandwidth: float, bf16: float) -> None:
    device = load_device(name)
    assert (device.memory.value, device.bandwidth.value, device.rates["bf16"].value) == (
        memory,
        bandwidth,
        bf16,
    )


def test_figures_without_a_verified_source_are_left_out() -> None:
    assert load_device("a10g").rates == {}
    assert load_device("rtx-6000-ada").rates == {}
    assert "int8" not in load_device("mi300x").rates
    assert load_device("mi300x").price() is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory": 80}, "device mine, memory: '80' needs a number and a unit"),
        ({"memory": {"value": "80 GB"}, "source": None}, "a figure needs a source and a date"),
        ({"date": None}, "a figure needs a source and a date"),
        ({"bandwidth": "2 TFLOP/s"}, "not in B/s"),
        ({"vram": "80 GB"}, "unknown fields vram"),
        ({"prices": [{"usd_per_hour": 1.0}]}, "a price without a date is refused"),
        (
            {"prices": [{"usd_per_hour": 1.0, "date": "last week"}]},
            "as YYYY-MM-DD or YYYY-MM, not 'last week'",
        ),
        ({"prices": [{"usd_per_hour": 0, "date": "2026-01"}]}, "must be above 0"),
    ],
)
def test_bad_devices(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_device("mine", {**DEVICE, **change})


def test_a_device_lacks_a_figure() -> None:
    with pytest.raises(PlanError, match="device mine lacks bandwidth"):
        read_device("mine", {k: v for k, v in DEVICE.items() if k != "bandwidth"})


def test_the_latest_price_counts_and_of_one_day_the_lowest() -> None:
    offers = [(3.0, "2026-05-01", "A"), (2.0, "2024-01-01", "B"), (2.5, "2026-05-01", "C one")]
    prices = [{"usd_per_hour": u, "date": d, "provider": p, "source": "page"} for u, d, p in offers]
    device = read_device("mine", {**DEVICE, "prices": prices})
    assert device.price().usd_per_hour == 2.5
    assert device.price("b").usd_per_hour == 2.0
    assert device.price("nobody") is None


def test_own_prices_need_a_date() -> None:
    assert own_price(2.5, "2026-11-30").label() == "$2.5/h, yours, 2026-11-30"
    with pytest.raises(PlanError, match="a price without a date is refused"):
        own_price(2.5, None)
    with pytest.raises(PlanError, match="your list"):
        read_price({"usd_per_hour": "much", "date": "2026-01"}, "your list")


@pytest.mark.parametrize(
    ("load", "name", "suggestion"),
    [
        (load_model, "mistrl-7b", "mistral-7b"),
        (load_model, "llama3-8b", "llama-3-8b"),
        (load_model, "gpt-oss-12b", "gpt-oss-120b"),
        (load_device, "h100", "h100-sxm"),
        (load_device, "h1000", "h100-pcie"),
        (load_device, "4090", "rtx-4090"),
    ],
)
def test_unknown_names_suggest_the_nearest(load: Any, name: str, suggestion: str) -> None:
    with pytest.raises(PlanError, match=rf"unknown \w+ '{name}'; did you mean .*{suggestion}"):
        load(name)


def test_names_near_nothing_list_all() -> None:
    with pytest.raises(PlanError, match=r"known: .*h100-sxm"):
        load_device("xyzzy")


def test_names_ignore_case_and_know_aliases() -> None:
    assert load_model("Mistral-7B-v0.3").name == "mistral-7b"
    assert load_model("deepseek-r1").name == "deepseek-v3"
    assert load_device("H100-SXM").name == "h100-sxm"


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
def test_a_config_that_lacks_a_field_says_which(field: str) -> None:
    with pytest.raises(PlanError, match=f"the config lacks the field '{field}'"):
        read_shape({k: v for k, v in CONFIG.items() if k != field}, "the config")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"intermediate_size": None}, "lacks the field 'intermediate_size'"),
        ({"num_hidden_layers": "32"}, "'num_hidden_layers' must be a whole number above 0, not '32'"),
        ({"num_hidden_layers": 2.5}, "must be a whole number above 0"),
        ({"hidden_size": -64}, "must be a whole number above 0"),
        ({"vocab_size": True}, "must be a whole number above 0"),
        ({"num_key_value_heads": 3}, "4 heads cannot share 3 key and value heads evenly"),
        ({"hidden_size": 65}, "lacks the field 'head_dim'"),
        ({"num_experts": 8}, "lacks the field 'num_experts_per_tok'"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "does not fit"),
        ({"kv_lora_rank": 512}, "lacks the field 'qk_rope_head_dim'"),
        (
            {"layer_types": ["full_attention", "linear_attention"]},
            "keep no keys and values by token: linear_att",
        ),
    ],
)
def test_bad_configs(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        read_shape({**CONFIG, **change}, "the config")


def test_a_config_that_is_no_mapping() -> None:
    with pytest.raises(PlanError, match="must be a mapping of fields, not list"):
        read_shape([1, 2], "the config")  # type: ignore[arg-type]


def test_unknown_families_and_multimodal_models_are_noted() -> None:
    shape = read_shape(
        {"model_type": "llava", "text_config": {**CONFIG, "model_type": "newest"}}, "the config"
    )
    assert shape.layers == 2
    assert any("not its vision" in note for note in shape.notes)
    assert any("'newest' is not known" in note for note in shape.notes)


def test_a_config_file_and_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "torch_dtype": "float32"}))
    for path in (folder, folder / "config.json"):
        model = load_model(str(path))
        assert model.name == "my-model"
        assert model.checkpoint == "fp32"
        assert model.weight_bytes("checkpoint") == 4 * model.parameters


@pytest.mark.parametrize(
    ("quantization", "checkpoint"),
    [
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block128"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            "nf4-double",
        ),
    ],
)
def test_checkpoint_formats(tmp_path: Path, quantization: dict[str, Any], checkpoint: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    assert load_model(str(tmp_path)).checkpoint == checkpoint


def test_an_unknown_checkpoint_format_needs_a_format_to_plan_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": {"quant_method": "magic"}})
    )
    model = load_model(str(tmp_path))
    assert model.weight_bytes("int8") < model.weight_bytes("bf16")
    with pytest.raises(PlanError, match="unknown weight format 'magic'; known: bf16"):
        model.weight_bytes("checkpoint")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    gguf = tmp_path / "no.gguf"
    gguf.write_bytes(b"not a model")
    for name, reason in (
        (str(broken), "cannot be read as JSON"),
        (str(gguf), "cannot be read as a GGUF model"),
        (str(tmp_path / "none.json"), "there is no file"),
        ("owner/model", "for a model on the hub write hf:owner/model"),
    ):
        with pytest.raises(PlanError, match=reason):
            load_model(name)


def test_models_and_devices_of_ones_own(tmp_path: Path) -> None:
    models, devices = tmp_path / "models.yaml", tmp_path / "devices.yaml"
    models.write_text(json.dumps({"Tiny": {"source": "mine", "config": CONFIG}}))
    devices.write_text("Card: {source: sheet, date: 2026-01-01, memory: 8 GB, bandwidth: 100 GB/s}")
    assert load_model("tiny", models).shape.hidden == 64
    assert load_model("mistral-7b", models).name == "mistral-7b"
    device = load_device("card", devices)
    assert isinstance(device, Device)
    assert device.memory.value == 8e9


@pytest.mark.parametrize("text", ["- a list", "name: 3", "a: [", ""])
def test_a_broken_file_of_ones_own(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(PlanError, match=r"mine\.yaml"):
        known_models(file)


def test_a_hub_name_reads_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a: asked.append(a) or str(file))
    assert load_model("hf:owner/name").shape.hidden == 64
    assert asked == [("owner/name", "config.json")]

    def unreachable(*_: str) -> str:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(PlanError, match=r"the config of hf:owner/name could not be fetched: no network$"):
        load_model("hf:owner/name")


@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file(tmp_path: Path, tied: bool) -> None:
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_context_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    shapes = {"token_embd.weight": (100, 64), "output_norm.weight": (64,)}
    if not tied:
        shapes["output.weight"] = (100, 64)
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_q.weight": (64, 64),
            f"blk.{i}.attn_k.weight": (32, 64),
            f"blk.{i}.attn_v.weight": (32, 64),
            f"blk.{i}.attn_output.weight": (64, 64),
            f"blk.{i}.ffn_gate.weight": (96, 64),
            f"blk.{i}.ffn_up.weight": (96, 64),
            f"blk.{i}.ffn_down.weight": (64, 96),
            f"blk.{i}.attn_norm.weight": (64,),
            f"blk.{i}.ffn_norm.weight": (64,),
        }
    data = {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}
    for name, array in data.items():
        if "ffn_down" in name or array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            blocks = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model(str(path))
    assert model.checkpoint == "file"
    assert model.shape.tied is tied
    assert model.parameters == sum(a.size for a in data.values())
    eight_bit = sum(a.size for n, a in data.items() if a.ndim == 2 and "ffn_down" not in n)
    rest = sum(a.size for a in data.values()) - eight_bit
    assert model.weight_bytes("checkpoint") == eight_bit * 34 // 32 + rest * 4
    assert model.weight_bytes("bf16") == 2 * model.parameters
    with pytest.raises(PlanError, match="is no file with its own formats"):
        load_model("mistral-7b").weight_bytes("file")

"""Files and what is wrong with them: shards, missing, unexpected and misshapen tensors, formats."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.models.loading import open_model
from core.types import PartwiseError
from tests.models.harness import load, prefill
from tests.models.test_families import close, ids
from tests.models.tiny import logits, make


@pytest.fixture
def llama(tmp_path):
    return make("llama", tmp_path), tmp_path


def edit(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refused(folder, *words):
    with pytest.raises(PartwiseError) as caught:
        load(str(folder))
    for word in (str(folder), *words):
        assert word in str(caught.value)


def test_shards(llama):
    reference, folder = llama
    (folder / "model.safetensors").unlink()
    reference.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    close(prefill(load(str(folder)), ids()), logits(reference, ids()))
    next(folder.glob("model-00002*")).unlink()
    refused(folder, "model-00002", "missing")


def test_stored_in_half_and_run_in_float(llama):
    reference, folder = llama
    reference.to(torch.bfloat16).save_pretrained(folder)
    assert load(str(folder), dtype=None).dtype == torch.bfloat16
    again = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    close(prefill(load(str(folder)), ids()), logits(again, ids()))


def test_runs_in_half(llama):
    reference, folder = llama
    ours = prefill(load(str(folder), dtype="bfloat16"), ids())
    theirs = logits(reference, ids())
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().max() < 0.1 * theirs.abs().max()


def test_missing_tensor(llama):
    edit(llama[1], lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    refused(llama[1], "layers.1.mlp.up.weight", "missing")


def test_unexpected_tensor(llama):
    edit(llama[1], lambda tensors: tensors.update({"model.layers.0.mlp.router_x.weight": torch.zeros(2)}))
    refused(llama[1], "layers.0.mlp.router_x.weight", "no tensor")


def test_a_bias_that_the_config_does_not_have(llama):
    edit(llama[1], lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    refused(llama[1], "layers.0.attn.q.bias")


def test_misshapen_tensor(llama):
    edit(llama[1], lambda tensors: tensors.update({"model.layers.2.mlp.down_proj.weight": torch.zeros(48, 63)}))
    refused(llama[1], "layers.2.mlp.down.weight", "[48, 63]", "[48, 64]")


def test_rows_of_a_fused_tensor(tmp_path):
    make("phi-3", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(90, 48)}))
    refused(tmp_path, "qkv_proj", "90 rows")


def test_truncated_file(llama):
    file = llama[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(llama[1], "model.safetensors", "fetch it again")


def test_no_safetensors(llama):
    (llama[1] / "model.safetensors").unlink()
    refused(llama[1], "safetensors")


def test_a_format_that_is_not_read(llama):
    file = llama[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    refused(llama[1], "awq")


def test_what_only_another_version_knows(llama):
    file = llama[1] / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"hidden_act": "mish"}))
    with pytest.raises(PartwiseError, match="activation 'mish'"):
        load(str(llama[1]))
    rope = {"rope_type": "spiral", "rope_theta": 1e4}
    file.write_text(json.dumps(config | {"rope_parameters": rope}))
    with pytest.raises(PartwiseError, match="rope scaling 'spiral'"):
        load(str(llama[1]))
    file.write_text("{]")
    with pytest.raises(PartwiseError, match=r"config\.json cannot be read"):
        load(str(llama[1]))


def test_a_model_that_looks_ahead(tmp_path):
    make("gemma-3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_bidirectional_attention": True}))
    with pytest.raises(PartwiseError, match="looks ahead"):
        load(str(tmp_path))


def test_all_ids_that_end_a_text(llama):
    folder = llama[1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_model({"path": str(folder)}).config.eos_token_ids == (2, 7, 9)


def test_what_a_model_needs_of_a_kernel(tmp_path):
    wanted = {"gemma-2": {"window", "softcap"}, "gpt-oss": {"window", "sinks"}, "deepseek-v2": {"latent"}}
    for name, needs in wanted.items():
        make(name, tmp_path / name)
        assert open_model({"path": str(tmp_path / name)}).needs == needs


def test_multi_token_prediction_layers_are_left_out(tmp_path):
    reference = make("deepseek-v3", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    close(prefill(load(str(tmp_path)), ids()), logits(reference, ids()))


def test_a_text_model_inside_a_larger_one(tmp_path):
    reference = make("gemma-3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.zeros(3)}, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    close(prefill(load(str(tmp_path)), ids()), logits(reference, ids()))


def test_mxfp4_experts(tmp_path):
    """GPT-OSS as released: experts in 4-bit floats, [experts, out, groups, 16] with an exponent for each 32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    reference = make("gpt-oss-wide", tmp_path, {"gpt-oss-wide": WIDE_OSS})
    generator = torch.Generator().manual_seed(3)

    def pack(tensors):
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, wide, out = tensors.pop(name).shape
            shape = (experts, out, wide // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 125, shape[:-1], generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            dense = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            with torch.no_grad():
                reference.get_parameter(name).copy_(dense)

    edit(tmp_path, pack)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    close(prefill(load(str(tmp_path)), ids()), logits(reference, ids()))


WIDE_OSS = (
    "GptOss",
    {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "max_position_embeddings": 128,
        "eos_token_id": 2,
    },
)

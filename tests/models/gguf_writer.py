"""Tiny models as GGUF files, named and permuted as llama.cpp does, by the `gguf` package's own writer and name map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHS = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gpt_oss": "gpt-oss",
}


def write(model: Any, path: Path, quantize: str | None = None, extra: dict[str, Tensor] | None = None) -> None:
    """`quantize`: the block format of all matrices whose rows allow it; `model` gets the same rounded weights."""
    config = model.config
    arch = ARCHS[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    _metadata(writer, config, arch)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for hf, part in _parts(config, name, tensor):
            base, _, suffix = hf.rpartition(".")
            target = f"{names.get_name(base)}.{suffix}"
            assert not target.startswith("None"), hf
            _add(writer, target, _stored(config, arch, hf, part), quantize)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, quantize: str | None) -> None:
    data = tensor.detach().float().contiguous().numpy()
    if quantize is None or data.ndim < 2:
        writer.add_tensor(name, data)
        return
    kind = gguf.GGMLQuantizationType[quantize]
    writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


def rounded(tensor: Tensor, quantize: str) -> Tensor:
    """A matrix as it is after `quantize`."""
    kind = gguf.GGMLQuantizationType[quantize]
    data = np.ascontiguousarray(tensor.detach().float().numpy())
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(data, kind), kind))


def _parts(config: Any, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Experts are one tensor here, and gate, up and down in a GGUF file."""
    head, _, last = name.rpartition(".")
    if "experts" not in name:
        return [(f"{name}.weight" if last == "sinks" else name, tensor)]
    bias = last.endswith("_bias")
    if config.model_type == "gpt_oss" and not bias:
        tensor = tensor.transpose(1, 2)
    suffix = "bias" if bias else "weight"
    if "down_proj" in last:
        return [(f"{head}.down_proj.{suffix}", tensor)]
    if config.model_type == "gpt_oss":
        gate, up = tensor[:, ::2], tensor[:, 1::2]
    else:
        gate, up = tensor.chunk(2, dim=1)
    return [(f"{head}.gate_proj.{suffix}", gate), (f"{head}.up_proj.{suffix}", up)]


def _stored(config: Any, arch: str, name: str, tensor: Tensor) -> Tensor:
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if arch == "llama" and heads:
        halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _metadata(writer: gguf.GGUFWriter, c: Any, arch: str) -> None:
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    rope = c.rope_parameters.get("full_attention", c.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if getattr(c, "sliding_window", None):
        writer.add_sliding_window(c.sliding_window)
    experts = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(c.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(c, "moe_intermediate_size", c.intermediate_size))
    if getattr(c, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(c.attn_logit_softcapping)
    if getattr(c, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(c.final_logit_softcapping)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(c.vocab_size)])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)

"""The real models at hand, and transformers' modules with the same weights as the reference.

The weights are decoded by the `gguf` package and put in place here, not by core.models; a slow test holds them equal
to what transformers reads from the file, which takes it minutes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
import yaml

import recipes
from core.models.gguf_file import GGUFFile
from core.models.source import ModelSource, read_spec, resolve

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2_135m": (
        "Llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        },
    ),
    "gemma3_270m": (
        "Gemma3Text",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
        },
    ),
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def source(name: str) -> ModelSource:
    """The model of a recipe, fetched if need be."""
    file = Path(recipes.__file__).parent / "model" / f"{name}.yaml"
    return resolve(read_spec(yaml.safe_load(file.read_text())))


@cache
def reference(name: str) -> Any:
    """transformers' module in fp32 with the file's weights."""
    prefix, options = CONFIGS[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    state = _state(GGUFFile(source(name).gguf), config)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    rotary = type(model.model.rotary_emb)(config)
    model.model.rotary_emb = rotary
    if hasattr(model.model.embed_tokens, "embed_scale"):
        model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    assert not [key for key, tensor in model.state_dict().items() if tensor.is_meta]
    return model.eval()


def _state(file: GGUFFile, config: Any) -> dict[str, torch.Tensor]:
    data = np.frombuffer(file.data, dtype=np.uint8)
    state = {}
    for name, info in file.tensors.items():
        kind = gguf.GGMLQuantizationType(info.kind)
        numbers, size = gguf.GGML_QUANT_SIZES[kind]
        raw = data[info.offset : info.offset + info.elements // numbers * size]
        tensor = torch.from_numpy(gguf.quants.dequantize(raw.reshape(1, -1), kind).reshape(info.shape).copy())
        key, tensor = _named(name, tensor, config)
        state[key] = tensor
    return state


def _named(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    *place, local, suffix = name.split(".")
    gemma = config.model_type == "gemma3_text"
    target = "pre_feedforward_layernorm" if gemma and local == "ffn_norm" else _NAMES.get(local)
    target = target or "post_attention_layernorm"
    if gemma and suffix == "weight" and "norm" in local:
        tensor = tensor - 1
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(local)
    if heads and not gemma:
        tensor = tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    prefix = f"model.layers.{place[1]}." if place else ""
    return f"{prefix}{target}.{suffix}", tensor

"""Tiny random models of every family, made from transformers configs: the reference for logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {**BASE, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "num_hidden_layers": 4}
MLA = {
    **BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 6.0, 8.0],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", BASE),
    "llama-biases": ("Llama", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {**BASE, "tie_word_embeddings": True, "head_dim": 20}),
    "llama-linear": ("Llama", {**BASE, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4}}),
    "llama-dynamic": ("Llama", {**BASE, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama-yarn": ("Llama", {**BASE, "rope_parameters": YARN}),
    "llama-3": (
        "Llama",
        {
            **BASE,
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
                "rope_theta": 500.0,
            },
        },
    ),
    "mistral": ("Mistral", {**BASE, "sliding_window": 8}),
    "qwen2": ("Qwen2", {**BASE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {**BASE, "head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {**BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        | {"norm_topk_prob": True, "head_dim": 12},
    ),
    "qwen3-moe-plain": (
        "Qwen3Moe",
        {**BASE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2},
    ),
    "gemma-2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}),
    "gemma-3": (
        "Gemma3Text",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "phi-3": ("Phi3", {**BASE, "sliding_window": 10}),
    "phi-3-partial": (
        "Phi3",
        {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi-3-longrope": ("Phi3", {**BASE, "rope_parameters": LONG, "original_max_position_embeddings": 64}),
    "olmo-2": ("Olmo2", BASE),
    "mixtral": ("Mixtral", {**BASE, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOss",
        {**BASE, "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {**MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v2-greedy": ("DeepseekV2", {**MLA, "topk_method": "greedy", "routed_scaling_factor": 2.0}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **MLA,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "deepseek-v3-halves": ("DeepseekV3", {**MLA, "n_group": 2, "topk_group": 1, "rope_interleave": False}),
}


def make(name: str, folder: Path, table: dict[str, tuple[str, dict[str, Any]]] = FAMILIES) -> Any:
    """A tiny model saved to `folder`, every weight random, norms and biases too."""
    prefix, options = table[name]
    config = getattr(transformers, f"{prefix}Config")(**options)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                spread = 0.2 if "norm" in key or "bias" in key else 1.5 / tensor.shape[-1] ** 0.5
                tensor.add_(torch.randn_like(tensor) * spread)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def stepwise(model: Any, ids: list[int]) -> Tensor:
    """Logits when transformers decodes one token at a time."""
    rows, cache = [], transformers.DynamicCache(config=model.config)
    for token in ids:
        rows.append(model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(rows).float()

"""Parameters and KV of every supported family against models built by transformers, without memory."""

from __future__ import annotations

import pytest

from core.plan.formats import kv_format
from core.plan.memory import kv_bytes
from core.plan.models import Model
from core.plan.shape import read_shape

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    **MOE,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "llama, biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "gemma": {"head_dim": 32},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 48, **MOE},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, **MOE},
    "gemma2": {"head_dim": 32, "sliding_window": 32},
    "gemma3_text": {"head_dim": 32, "sliding_window": 32},
    "gpt_oss": {"head_dim": 32, "sliding_window": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "falcon": {"multi_query": True, "ffn_hidden_size": 256, "intermediate_size": None},
    "falcon, new": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "ffn_hidden_size": 256,
        "intermediate_size": None,
    },
    "qwen2_moe, every other layer": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 2,
        **MOE,
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_kv(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family = name.partition(",")[0]
    config = transformers.AutoConfig.for_model(family, **{**SMALL, **FAMILIES[name]})
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    model = Model(name, "", read_shape(config.to_dict(), name))
    assert model.parameters == sum(p.numel() for p in reference.parameters()) + _buffers(reference)


def _buffers(reference) -> int:  # type: ignore[no-untyped-def]
    """DeepSeek-V3's routing correction is stored, but is no parameter."""
    return sum(b.numel() for n, b in reference.named_buffers() if n.endswith("e_score_correction_bias"))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "gpt_oss", "mistral", "falcon"])
def test_kv_bytes_are_those_of_a_real_cache(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **FAMILIES[name]})
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = 50
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        for token in range(tokens):
            reference(input_ids=torch.full((1, 1), token + 1), cache=cache, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    windows = sum(w is not None for w in read_shape(config.to_dict(), name).windows)
    shape = read_shape(config.to_dict(), name)
    # transformers drops the token that the next step would push out: it keeps window - 1.
    kept_less = windows * 2 * shape.kv_heads * shape.head_dim * 4
    assert kv_bytes(Model(name, "", shape), kv_format("fp32"), tokens) == held + kept_less

"""What a GGUF file says about its model: a config in the usual names, and bytes by kind of tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.plan.errors import PlanError

_FAMILIES = {
    "gpt-oss": "gpt_oss",
    "deepseek2": "deepseek_v2",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
}


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The config of a GGUF file, and its weight bytes by kind of matrix (`Matrices.kind`), as stored.

    Raises PlanError when the file cannot be read as GGUF.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        family = _value(reader, "general.architecture")
        config: dict[str, Any] = {"model_type": _FAMILIES.get(family, family)}
        for theirs, ours in _FIELDS.items():
            value = _value(reader, f"{family}.{theirs}")
            if value is not None:
                config[ours] = value
        tensors = {t.name: t for t in reader.tensors}
        config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    except (ValueError, KeyError, OSError, IndexError) as error:
        raise PlanError(f"{path} cannot be read as a GGUF model: {error}") from error
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if "num_experts" in config:
        config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if "kv_lora_rank" in config:
        key = _value(reader, f"{family}.attention.key_length_mla")
        config["qk_nope_head_dim"] = key - config["qk_rope_head_dim"] if key else None
    sizes: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = _kind(name, tied=config["tie_word_embeddings"])
        sizes[kind] = sizes.get(kind, 0) + int(tensor.n_bytes)
    return config, sizes


def _value(reader: Any, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()


def _kind(name: str, tied: bool) -> str:
    if "norm" in name or name.endswith(".bias") or "sinks" in name:
        return "vectors"
    if name == "token_embd.weight":
        return "head" if tied else "embedding"
    if "ffn_gate_inp" in name:
        return "router"
    if "_exps" in name:
        return "experts"
    if "ffn_" in name:
        return "mlp"
    return "attention" if "attn" in name else "head" if name == "output.weight" else "vectors"

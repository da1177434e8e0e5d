"""The families that the decoder runs, as data: what each one adds to Llama, and where its config says so.

`c` below is a transformers config or, for GGUF files, a namespace with the same attributes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from core.models.config import MLAConfig, MoEConfig

PRE = ("attn_norm", "mlp_norm")
POST = ("attn_post_norm", "mlp_post_norm")
SANDWICH = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")


@dataclass(frozen=True)
class Family:
    """One architecture. Callables take the config; `rename` maps names of a layer's tensors in the family's own
    checkpoints to canonical ones, where they differ from what names.py maps for all."""

    norms: tuple[str, ...] = PRE
    norm_offset: float = 0.0
    qk_norm: Literal["head", "all"] | None = None
    qkv_bias: Callable[[Any], bool] = lambda c: bool(getattr(c, "attention_bias", False))
    o_bias: Callable[[Any], bool] = lambda c: bool(getattr(c, "attention_bias", False))
    sinks: bool = False
    scale: Callable[[Any, int], float] = lambda c, head_dim: head_dim**-0.5
    embed_scale: Callable[[Any], float] = lambda c: 1.0
    moe: Callable[[Any], MoEConfig] | None = None
    moe_layer: Callable[[Any, int], bool] = lambda c, layer: True
    mla: Callable[[Any], MLAConfig] | None = None
    interleaved_rope: Callable[[Any], bool] = lambda c: False
    rename: Mapping[str, str] = field(default_factory=dict)


def _never(c: Any) -> bool:
    return False


def _gemma_scale(c: Any, head_dim: int) -> float:
    return float(c.query_pre_attn_scalar**-0.5)


def _root_hidden(c: Any) -> float:
    return float(c.hidden_size**0.5)


def _mla_scale(c: Any, head_dim: int) -> float:
    """DeepSeek's yarn also raises the temperature of the scores, by mscale squared."""
    scale = float((c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5)
    rope = c.rope_parameters
    all_dim = rope.get("mscale_all_dim") or 0
    if rope.get("rope_type", "default") == "default" or not all_dim or rope["factor"] <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(rope["factor"]) + 1.0) ** 2


def _mla(c: Any) -> MLAConfig:
    return MLAConfig(
        q_rank=c.q_lora_rank,
        nope_dim=c.qk_nope_head_dim,
        rope_dim=c.qk_rope_head_dim,
        value_dim=c.v_head_dim,
        a_bias=bool(c.attention_bias),
    )


def _qwen3_moe(c: Any) -> MoEConfig:
    return MoEConfig(
        c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size, c.hidden_act, renormalize=c.norm_topk_prob
    )


def _mixtral(c: Any) -> MoEConfig:
    return MoEConfig(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size, c.hidden_act, renormalize=True)


def _gpt_oss(c: Any) -> MoEConfig:
    return MoEConfig(
        c.num_local_experts,
        c.num_experts_per_tok,
        c.intermediate_size,
        "swiglu_oss",
        top_first=True,
        bias=True,
        limit=c.swiglu_limit,
    )


def _deepseek_v2(c: Any) -> MoEConfig:
    grouped = c.topk_method == "group_limited_greedy"
    return MoEConfig(
        c.n_routed_experts,
        c.num_experts_per_tok,
        c.moe_intermediate_size,
        c.hidden_act,
        scale=c.routed_scaling_factor,
        groups=c.n_group if grouped else 1,
        top_groups=c.topk_group if grouped else 1,
        shared=c.moe_intermediate_size * (c.n_shared_experts or 0),
    )


def _deepseek_v3(c: Any) -> MoEConfig:
    return MoEConfig(
        c.n_routed_experts,
        c.num_experts_per_tok,
        c.moe_intermediate_size,
        c.hidden_act,
        scoring="sigmoid",
        renormalize=c.norm_topk_prob,
        scale=c.routed_scaling_factor,
        groups=c.n_group,
        top_groups=c.topk_group,
        group_best=2,
        correction=True,
        shared=c.moe_intermediate_size * (c.n_shared_experts or 0),
    )


def _after_dense(c: Any, layer: int) -> bool:
    return layer >= (c.first_k_dense_replace or 0)


def _qwen3_moe_layer(c: Any, layer: int) -> bool:
    return layer not in (c.mlp_only_layers or ()) and c.num_experts > 0 and (layer + 1) % c.decoder_sparse_step == 0


_POST_NORMS = {
    "post_attention_layernorm.weight": "attn_post_norm.weight",
    "pre_feedforward_layernorm.weight": "mlp_norm.weight",
    "post_feedforward_layernorm.weight": "mlp_post_norm.weight",
}
_GEMMA: dict[str, Any] = {
    "norms": SANDWICH,
    "norm_offset": 1.0,
    "scale": _gemma_scale,
    "embed_scale": _root_hidden,
    "rename": _POST_NORMS,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "mistral": Family(qkv_bias=_never, o_bias=_never),
    "qwen2": Family(qkv_bias=lambda c: True, o_bias=_never),
    "qwen3": Family(qk_norm="head"),
    "qwen3_moe": Family(qk_norm="head", moe=_qwen3_moe, moe_layer=_qwen3_moe_layer),
    "gemma2": Family(**_GEMMA),
    "gemma3_text": Family(**_GEMMA, qk_norm="head"),
    "phi3": Family(qkv_bias=_never, o_bias=_never),
    "olmo2": Family(norms=POST, qk_norm="all", rename=_POST_NORMS),
    "mixtral": Family(qkv_bias=_never, o_bias=_never, moe=_mixtral),
    "gpt_oss": Family(sinks=True, moe=_gpt_oss),
    "deepseek_v2": Family(
        mla=_mla, scale=_mla_scale, moe=_deepseek_v2, moe_layer=_after_dense, interleaved_rope=lambda c: True
    ),
    "deepseek_v3": Family(
        mla=_mla,
        scale=_mla_scale,
        moe=_deepseek_v3,
        moe_layer=_after_dense,
        interleaved_rope=lambda c: bool(c.rope_interleave),
    ),
}
"""By transformers' `model_type`."""

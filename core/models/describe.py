"""A transformers config, or a GGUF file's metadata, to a ModelConfig. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.interfaces.model import LayerShape
from core.models.config import LayerConfig, MLPConfig, ModelConfig, RopeConfig
from core.models.families import FAMILIES, Family
from core.models.gguf_file import GGUFFile
from core.types import PartwiseError


def describe(c: Any, *, norm_offset: float | None = None, eos: Iterable[int] = ()) -> ModelConfig:
    """The description of a model of a known family from its config `c` (see FAMILIES for what is read of it)."""
    if getattr(c, "use_bidirectional_attention", False):
        raise PartwiseError(
            f"this {c.model_type} model looks ahead (use_bidirectional_attention), so it cannot generate"
        )
    family = FAMILIES[c.model_type]
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    mla = family.mla(c) if family.mla else None
    ropes: list[RopeConfig] = []
    layers, details = [], []
    for number in range(c.num_hidden_layers):
        kind = _layer_type(c, number)
        rope = _rope(c, kind, mla.rope_dim if mla else head_dim)
        if rope not in ropes:
            ropes.append(rope)
        layers.append(_shape(c, kind, head_dim))
        details.append(LayerConfig(ropes.index(rope), _mlp(c, family, number)))
    return ModelConfig(
        family=c.model_type,
        layers=tuple(layers),
        details=tuple(details),
        ropes=tuple(ropes),
        hidden_size=c.hidden_size,
        vocab_size=c.vocab_size,
        max_positions=_max_positions(c, ropes),
        norm_eps=c.rms_norm_eps,
        norms=family.norms,
        norm_offset=family.norm_offset if norm_offset is None else norm_offset,
        attention_scale=family.scale(c, head_dim),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias(c),
        o_bias=family.o_bias(c),
        sinks=family.sinks,
        attention_softcap=getattr(c, "attn_logit_softcapping", None),
        logit_softcap=getattr(c, "final_logit_softcapping", None),
        embed_scale=family.embed_scale(c),
        tied_head=bool(c.tie_word_embeddings),
        mla=mla,
        dtype=str(getattr(c, "dtype", None) or "float32").removeprefix("torch."),
        eos_token_ids=tuple(sorted({*_ids(c.eos_token_id), *eos})),
    )


def _layer_type(c: Any, number: int) -> str:
    types = getattr(c, "layer_types", None)
    if types:
        return str(types[number])
    return "sliding_attention" if getattr(c, "sliding_window", None) else "full_attention"


def _shape(c: Any, kind: str, head_dim: int) -> LayerShape:
    if getattr(c, "kv_lora_rank", None):
        return LayerShape(
            c.num_attention_heads, 1, c.kv_lora_rank + c.qk_rope_head_dim, c.kv_lora_rank, value_in_key=True
        )
    window = c.sliding_window if kind == "sliding_attention" else None
    kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    return LayerShape(c.num_attention_heads, kv_heads, head_dim, head_dim, window)


def _mlp(c: Any, family: Family, number: int) -> Any:
    if family.moe and family.moe_layer(c, number):
        return family.moe(c)
    activation = getattr(c, "hidden_activation", None) or c.hidden_act
    return MLPConfig(c.intermediate_size, activation, bool(getattr(c, "mlp_bias", False)))


def _rope(c: Any, kind: str, head_dim: int) -> RopeConfig:
    params = dict(c.rope_parameters)
    params = dict(params.get(kind) or params)
    name = params.pop("rope_type", None) or params.pop("type", None) or "default"
    if not params.get("original_max_position_embeddings"):
        params["original_max_position_embeddings"] = getattr(c, "original_max_position_embeddings", None)
    dim = int(head_dim * (params.pop("partial_rotary_factor", None) or 1.0))
    theta = params.pop("rope_theta")
    frozen = tuple(sorted((key, _frozen(value)) for key, value in params.items()))
    return RopeConfig(name, dim, float(theta), c.max_position_embeddings, frozen)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _max_positions(c: Any, ropes: list[RopeConfig]) -> int:
    """Dynamic scaling exists to go on beyond the length a model was made for."""
    stretch = [rope.get("factor", 1.0) for rope in ropes if rope.kind == "dynamic"]
    return int(c.max_position_embeddings * min(stretch, default=1.0))


def _ids(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


# --- a folder ---------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> tuple[Any, tuple[int, ...]]:
    """transformers' config of a folder, its text part if it has several, and the ids that end a text."""
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise PartwiseError(f"{folder} has no config.json, so it is not a model folder")
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise PartwiseError(f"{folder / 'config.json'} cannot be read: {error}") from error
    text = getattr(config, "text_config", None)
    if config.model_type not in FAMILIES and getattr(text, "model_type", None) in FAMILIES:
        config = text
    generation = folder / "generation_config.json"
    eos = _ids(json.loads(generation.read_text()).get("eos_token_id")) if generation.is_file() else []
    return config, tuple(sorted({*eos, *_ids(getattr(config, "eos_token_id", None))}))


# --- a GGUF file ------------------------------------------------------------------------------------------------------

GGUF_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "gpt-oss": "gpt_oss",
}

_SLIDING_EVERY = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""Every how many layers one sees everything, where the file does not say."""


def describe_gguf(file: GGUFFile) -> ModelConfig:
    """The description of the model in a GGUF file. Its norm weights are stored ready to multiply with."""
    c = gguf_namespace(file)
    eos = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return describe(c, norm_offset=0.0, eos=[token for token in eos if token is not None])


def gguf_namespace(file: GGUFFile) -> SimpleNamespace:
    """GGUF metadata under the names of a transformers config."""
    arch, tensors = file.architecture, file.tensors
    if arch not in GGUF_FAMILIES:
        raise PartwiseError(
            f"{file.path}: GGUF files of architecture {arch!r} are not supported; those of "
            f"{', '.join(GGUF_FAMILIES)} are. A folder with safetensors of this model may work"
        )

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{arch}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise PartwiseError(f"{file.path} has no {arch}.{key}; fetch it again, or convert it anew")
        return value

    hidden, heads, layers = need("embedding_length"), need("attention.head_count"), need("block_count")
    head_dim = get("attention.key_length") or hidden // heads
    experts = get("expert_count", 0)
    window = get("attention.sliding_window")
    wide = get("expert_feed_forward_length") or get("feed_forward_length")
    c = SimpleNamespace(
        model_type="mixtral" if arch == "llama" and experts else GGUF_FAMILIES[arch],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=wide if arch == "gpt-oss" else get("feed_forward_length", wide),
        hidden_act="gelu_pytorch_tanh" if arch.startswith("gemma") else "silu",
        vocab_size=tensors["token_embd.weight"].shape[0],
        max_position_embeddings=need("context_length"),
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        attention_bias="blk.0.attn_q.bias" in tensors,
        sliding_window=window,
        attn_logit_softcapping=get("attn_logit_softcapping"),
        final_logit_softcapping=get("final_logit_softcapping"),
        query_pre_attn_scalar=hidden // heads if (arch, layers) in _WIDE_GEMMAS else head_dim,
        tie_word_embeddings="output.weight" not in tensors,
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        num_experts=experts,
        num_local_experts=experts,
        num_experts_per_tok=get("expert_used_count"),
        moe_intermediate_size=wide,
        norm_topk_prob=True,
        mlp_only_layers=(),
        decoder_sparse_step=1,
        swiglu_limit=7.0,
        rope_parameters=_gguf_rope(file, get, head_dim),
    )
    every = _SLIDING_EVERY.get(arch)
    if every and window:
        c.layer_types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    return c


_WIDE_GEMMAS = {("gemma2", 46), ("gemma3", 62)}
"""The 27B Gemmas scale scores by the width a head would have; the file does not tell."""


def _gguf_rope(file: GGUFFile, get: Any, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": get("rope.scaling.type", "default").replace("none", "default"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
        "factor": get("rope.scaling.factor"),
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "attention_factor": get("rope.scaling.attn_factor"),
        "truncate": file.architecture != "gpt-oss",
    }
    if "rope_freqs.weight" in file.tensors:
        rope |= {"rope_type": "factors", "factors": _floats(file, "rope_freqs.weight")}
    if "rope_factors_long.weight" in file.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": _floats(file, "rope_factors_long.weight"),
            "short_factor": _floats(file, "rope_factors_short.weight"),
        }
    if file.architecture != "gemma3":
        return rope
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 10000.0)}
    return {"full_attention": rope, "sliding_attention": local}


def _floats(file: GGUFFile, name: str) -> list[float]:
    import struct

    tensor = file.tensors[name]
    return list(struct.unpack_from(f"<{tensor.elements}f", file.data, tensor.offset))

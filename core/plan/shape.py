"""A decoder's shape, read from the fields of a `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from core.plan.errors import PlanError


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: `rank + rope` elements a token stand for all keys and values."""

    rank: int
    rope: int
    nope: int
    value: int
    query_rank: int | None = None


@dataclass(frozen=True)
class Indexer:
    """DeepSeek sparse attention: `heads` index queries choose `top` tokens by one key of `dim` each."""

    heads: int
    dim: int
    top: int


@dataclass(frozen=True)
class Experts:
    """Mixture of experts: `used` of `total` experts a token, after `dense_layers` ordinary layers."""

    total: int
    used: int
    intermediate: int
    shared_intermediate: int = 0
    shared_gate: bool = False
    dense_layers: int = 0


@dataclass(frozen=True)
class Shape:
    """What decides a decoder's bytes and operations, in elements; `windows` has one entry a layer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    tied: bool
    windows: tuple[int | None, ...]
    gated: bool = True
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    expert_bias: bool = False
    correction_bias: bool = False
    sinks: bool = False
    qk_norm: bool = False
    norms: int = 2
    norm_bias: bool = False
    latent: Latent | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None
    notes: tuple[str, ...] = field(default=())


# How families differ from a Llama: what their configs leave unsaid.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "phi3": {},
    "granite": {},
    "gemma": {"tied": True},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma2": {"tied": True, "norms": 4},
    "gemma3": {"tied": True, "norms": 4, "qk_norm": True},
    "gemma3_text": {"tied": True, "norms": 4, "qk_norm": True},
    "gpt_oss": {"sinks": True, "expert_bias": True},
    "deepseek_v2": {},
    "deepseek_v3": {"correction_bias": True},
    "deepseek_v32": {"correction_bias": True},
    "falcon": {"tied": True, "gated": False, "norms": 1, "norm_bias": True},
}

_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "max_position_embeddings": ("n_positions", "seq_length"),
    "intermediate_size": ("ffn_hidden_size", "n_inner"),
}


class _Fields:
    """The fields of one config, by their usual names, checked when they are read."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def raw(self, name: str) -> Any:
        for key in (name, *_OTHER_NAMES.get(name, ())):
            if self.config.get(key) is not None:
                return self.config[key]
        return None

    def count(self, name: str, default: int | None = None) -> int:
        value = self.raw(name)
        if value is None:
            if default is None:
                raise PlanError(f"{self.where} lacks the field '{name}'")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise PlanError(f"{self.where}: '{name}' must be a whole number above 0, not {value!r}")
        return value

    def optional(self, name: str) -> int | None:
        return None if self.raw(name) is None else self.count(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        return default if value is None else bool(value)


def read_shape(config: Mapping[str, Any], where: str) -> Shape:
    """The shape of the language model in a Hugging Face `config.json`; `where` names it in errors.

    Raises PlanError naming the field for one that is missing or malformed, and for layers that are no
    attention.
    """
    if not isinstance(config, Mapping):
        raise PlanError(f"{where} must be a mapping of fields, not {type(config).__name__}")
    notes: list[str] = []
    if isinstance(config.get("text_config"), Mapping):
        notes.append("only the language model is counted, not its vision or audio parts")
        config = {**config, **config["text_config"]}
    fields = _Fields(config, where)
    family = str(config.get("model_type", "llama"))
    if family not in _FAMILIES:
        notes.append(f"model_type '{family}' is not known and is read as a Llama-like decoder")
    traits = _FAMILIES.get(family, {})
    layers, hidden, heads = (
        fields.count(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    latent = _latent(fields)
    max_context = fields.count("max_position_embeddings", 2**20)
    shape = Shape(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(fields, heads, family),
        head_dim=latent.nope if latent else _head_dim(fields, hidden, heads),
        intermediate=_intermediate(fields, hidden, gated=traits.get("gated", True)),
        vocab=fields.count("vocab_size"),
        max_context=max_context,
        tied=fields.flag("tie_word_embeddings", traits.get("tied", False)),
        windows=_windows(fields, family, layers, max_context),
        gated=traits.get("gated", True),
        qkv_bias=fields.flag("attention_bias", traits.get("qkv_bias", False)),
        output_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        expert_bias=traits.get("expert_bias", False),
        correction_bias=traits.get("correction_bias", False),
        sinks=traits.get("sinks", False),
        qk_norm=traits.get("qk_norm", False),
        norms=_norms(fields, family, traits.get("norms", 2)),
        norm_bias=traits.get("norm_bias", False),
        latent=latent,
        indexer=_indexer(fields),
        experts=_experts(fields, layers),
        notes=tuple(notes),
    )
    if shape.heads % shape.kv_heads:
        raise PlanError(f"{where}: {heads} heads cannot share {shape.kv_heads} key and value heads evenly")
    return shape


def _kv_heads(fields: _Fields, heads: int, family: str) -> int:
    if (
        family == "falcon"
        and fields.flag("multi_query", True)
        and not fields.flag("new_decoder_architecture", False)
    ):
        return 1
    return fields.count("num_key_value_heads", heads)


def _norms(fields: _Fields, family: str, usual: int) -> int:
    """Norms of hidden size a layer; Falcon shares one only where attention and MLP run in parallel."""
    new = fields.flag("new_decoder_architecture", False)
    return 2 if family == "falcon" and (new or not fields.flag("parallel_attn", True)) else usual


def _head_dim(fields: _Fields, hidden: int, heads: int) -> int:
    if fields.raw("head_dim") is None and hidden % heads:
        raise PlanError(
            f"{fields.where} lacks the field 'head_dim', and {hidden} is no multiple of {heads} heads"
        )
    return fields.count("head_dim", hidden // heads)


def _intermediate(fields: _Fields, hidden: int, gated: bool) -> int:
    return fields.count("intermediate_size", None if gated else 4 * hidden)


def _latent(fields: _Fields) -> Latent | None:
    if fields.raw("kv_lora_rank") is None:
        return None
    return Latent(
        rank=fields.count("kv_lora_rank"),
        rope=fields.count("qk_rope_head_dim"),
        nope=fields.count("qk_nope_head_dim"),
        value=fields.count("v_head_dim"),
        query_rank=fields.optional("q_lora_rank"),
    )


def _indexer(fields: _Fields) -> Indexer | None:
    if fields.raw("index_topk") is None:
        return None
    return Indexer(fields.count("index_n_heads"), fields.count("index_head_dim"), fields.count("index_topk"))


def _experts(fields: _Fields, layers: int) -> Experts | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((n for n in names if fields.raw(n) is not None), None)
    if name is None:
        return None
    intermediate = fields.count("moe_intermediate_size", fields.count("intermediate_size"))
    shared = fields.optional("n_shared_experts")
    gate = fields.optional("shared_expert_intermediate_size")
    experts = Experts(
        total=fields.count(name),
        used=fields.count("num_experts_per_tok"),
        intermediate=intermediate,
        shared_intermediate=shared * intermediate if shared else gate or 0,
        shared_gate=gate is not None,
        dense_layers=_dense_layers(fields, layers),
    )
    if experts.used > experts.total or experts.dense_layers > layers:
        raise PlanError(f"{fields.where}: {experts} does not fit {layers} layers")
    return experts


def _dense_layers(fields: _Fields, layers: int) -> int:
    if first := fields.raw("first_k_dense_replace"):
        return int(first)
    only, step = set(fields.raw("mlp_only_layers") or ()), fields.count("decoder_sparse_step", 1)
    return sum(i in only or (i + 1) % step > 0 for i in range(layers))


def _windows(fields: _Fields, family: str, layers: int, max_context: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention."""
    types = fields.raw("layer_types")
    if types is not None and (odd := sorted(set(types) - _ATTENTION_LAYERS)):
        raise PlanError(f"{fields.where} has layers that keep no keys and values by token: {', '.join(odd)}")
    qwen = family.startswith("qwen")
    if not fields.flag("use_sliding_window", not qwen) or not fields.raw("sliding_window"):
        return (None,) * layers
    window = fields.count("sliding_window")
    if window >= max_context:
        return (None,) * layers
    if types is not None:
        return tuple(window if t == "sliding_attention" else None for t in (*types, *types)[:layers])
    period = {"gemma3": 6, "gemma3_text": 6, "gemma2": 2, "gpt_oss": 2}.get(family)
    if period is not None:
        period = fields.count("sliding_window_pattern", period)
        return tuple(None if (i + 1) % period == 0 else window for i in range(layers))
    first = fields.optional("max_window_layers") or 0 if qwen else 0
    return tuple(window if i >= first else None for i in range(layers))


def with_structure(shape: Shape, structure: str) -> Shape:
    """The shape as if trained or converted to another attention structure.

    `structure` is "native", "mha", "mqa", "gqa-N" with N key and value heads, or "mla": the latent of 512 +
    64 elements that DeepSeek-V2 introduced (arXiv 2405.04434) and TransMLA (arXiv 2502.07864) converts GQA
    models to. Turning a latent model into MHA uses the report's own convention: keys and values of
    `qk_nope_head_dim` each.
    """
    if structure == "native":
        return shape
    if structure == "mla":
        latent = shape.latent or Latent(512, 64, nope=shape.head_dim, value=shape.head_dim)
        return replace(shape, latent=latent, windows=(None,) * shape.layers)
    if structure in ("mha", "mqa"):
        heads = shape.heads if structure == "mha" else 1
    elif structure.startswith("gqa-") and structure[4:].isdigit() and int(structure[4:]):
        heads = int(structure[4:])
    else:
        raise PlanError(f"unknown attention structure '{structure}'; known: native, mha, gqa-N, mqa, mla")
    if shape.heads % heads:
        raise PlanError(
            f"structure {structure}: {shape.heads} heads cannot share {heads} key and value heads evenly"
        )
    return replace(shape, kv_heads=heads, latent=None, indexer=None)

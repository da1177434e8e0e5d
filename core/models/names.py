"""Names of tensors: what a checkpoint calls them, and the canonical names that structures and quantizers see.

Canonical names, each followed by `.weight` or `.bias`:

    embed, norm, head
    layers.N.attn_norm, layers.N.attn_post_norm, layers.N.mlp_norm, layers.N.mlp_post_norm
    layers.N.attn.q, .k, .v, .o, .q_norm, .k_norm, .sinks
    layers.N.attn.q_a, .q_a_norm, .q_b, .kv_a, .kv_a_norm, .kv_b           latent attention; q_b is q without q_a
    layers.N.mlp.gate, .up, .down
    layers.N.moe.router, .correction, .shared.gate, .shared.up, .shared.down
    layers.N.moe.experts.E.gate, .up, .down

Weights are [out, in]. The rotary numbers of a head of q, k, q_b and kv_a lie as two halves, whatever the file does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from core.models.config import ModelConfig, MoEConfig
from core.models.families import FAMILIES
from core.models.stored import Weight, expert, rows, transposed
from core.types import PartwiseError

Open = Callable[[ModelConfig, Weight], dict[str, Weight]]
"""Turns one tensor of a file into canonical ones, by their names within the layer."""


@dataclass(frozen=True)
class Naming:
    """How a kind of checkpoint names tensors. `layer` finds a layer's number and the name within it; `E` stands for
    an expert's number in `renames`. `ignored` are patterns of names that mean nothing here."""

    layer: re.Pattern[str]
    top: Mapping[str, str]
    renames: Mapping[str, str]
    opens: Mapping[str, Open]
    ignored: re.Pattern[str]


def _suffixed(names: Mapping[str, str]) -> dict[str, str]:
    return {f"{a}.{kind}": f"{b}.{kind}" for a, b in names.items() for kind in ("weight", "bias")}


def _split(*names: str, sizes: Callable[[ModelConfig], tuple[int, ...]] | None = None) -> Open:
    """Rows stacked in one tensor: `names` in order, of `sizes` or in equal parts."""

    def open(config: ModelConfig, weight: Weight) -> dict[str, Weight]:
        counts = sizes(config) if sizes else (weight.shape[0] // len(names),) * len(names)
        if sum(counts) != weight.shape[0]:
            raise ValueError(f"has {weight.shape[0]} rows, not {sum(counts)}")
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return {
            name: rows(weight, slice(start, start + count))
            for name, start, count in zip(names, starts, counts, strict=True)
        }

    return open


def _qkv_rows(config: ModelConfig) -> tuple[int, int, int]:
    shape = config.layers[0]
    return shape.q_heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim


def _experts(*names: str, turned: bool = False, interleaved: bool = False) -> Open:
    """A tensor of all experts [experts, ...], each holding `names` in its rows, in turn or one after the other.
    `turned`: stored as [in, out]."""

    def open(config: ModelConfig, weight: Weight) -> dict[str, Weight]:
        found: dict[str, Weight] = {}
        for number in range(weight.shape[0]):
            one = expert(weight, number)
            one = transposed(one) if turned and len(one.shape) == 2 else one
            part = one.shape[0] // len(names)
            for i, name in enumerate(names):
                index = slice(i, None, len(names)) if interleaved else slice(i * part, (i + 1) * part)
                found[name.replace("E", str(number))] = rows(one, index) if len(names) > 1 else one
        return found

    return open


def _halves(name: str, dims: Callable[[ModelConfig], tuple[int, int]]) -> Open:
    """Rotary rows stored as pairs, put as two halves. `dims`: numbers a head, and how many at its end rotate."""

    def open(config: ModelConfig, weight: Weight) -> dict[str, Weight]:
        head, rotary = dims(config)
        order = torch.arange(weight.shape[0]).view(-1, head)
        pairs = order[:, head - rotary :].reshape(-1, rotary // 2, 2)
        order = torch.cat((order[:, : head - rotary], pairs.transpose(1, 2).flatten(1)), dim=1)
        return {name: rows(weight, order.reshape(-1))}

    return open


def _q_dims(config: ModelConfig) -> tuple[int, int]:
    assert config.mla is not None
    return config.mla.nope_dim + config.mla.rope_dim, config.mla.rope_dim


def _kv_dims(config: ModelConfig) -> tuple[int, int]:
    assert config.mla is not None
    return config.layers[0].key_dim, config.mla.rope_dim


def _head_dims(config: ModelConfig) -> tuple[int, int]:
    return config.layers[0].key_dim, config.ropes[0].dim


_GATED = ("gate", "up", "down")

HF = Naming(
    layer=re.compile(r"^layers\.(\d+)\.(.+)$"),
    top={"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight", "lm_head.weight": "head.weight"},
    renames={
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        "self_attn.sinks": "attn.sinks.weight",
        "mlp.gate.e_score_correction_bias": "moe.correction.bias",
        **_suffixed({f"self_attn.{x}_proj": f"attn.{x}" for x in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")}),
        **_suffixed({f"self_attn.{x}_norm": f"attn.{x}_norm" for x in ("q", "k")}),
        **_suffixed({f"self_attn.{x}_layernorm": f"attn.{x}_norm" for x in ("q_a", "kv_a")}),
        **_suffixed({"self_attn.kv_a_proj_with_mqa": "attn.kv_a"}),
        **_suffixed({f"mlp.{x}_proj": f"mlp.{x}" for x in _GATED}),
        **_suffixed({"mlp.gate": "moe.router", "mlp.router": "moe.router", "block_sparse_moe.gate": "moe.router"}),
        **_suffixed({f"mlp.shared_experts.{x}_proj": f"moe.shared.{x}" for x in _GATED}),
        **_suffixed({f"mlp.experts.E.{x}_proj": f"moe.experts.E.{x}" for x in _GATED}),
        **_suffixed(
            {
                f"block_sparse_moe.experts.E.{w}": f"moe.experts.E.{x}"
                for w, x in zip(("w1", "w3", "w2"), _GATED, strict=True)
            }
        ),
    },
    opens={
        "self_attn.qkv_proj.weight": _split("attn.q.weight", "attn.k.weight", "attn.v.weight", sizes=_qkv_rows),
        "mlp.gate_up_proj.weight": _split("mlp.gate.weight", "mlp.up.weight"),
        "mlp.experts.gate_up_proj": _experts(
            "moe.experts.E.gate.weight", "moe.experts.E.up.weight", turned=True, interleaved=True
        ),
        "mlp.experts.gate_up_proj_blocks": _experts(
            "moe.experts.E.gate.weight", "moe.experts.E.up.weight", interleaved=True
        ),
        "mlp.experts.down_proj_blocks": _experts("moe.experts.E.down.weight"),
        "mlp.experts.gate_up_proj_bias": _experts("moe.experts.E.gate.bias", "moe.experts.E.up.bias", interleaved=True),
        "mlp.experts.down_proj": _experts("moe.experts.E.down.weight", turned=True),
        "mlp.experts.down_proj_bias": _experts("moe.experts.E.down.bias"),
    },
    ignored=re.compile(r"rotary_emb\.inv_freq$|^vision_tower\.|^multi_modal_projector\.|^model\.vision_tower\."),
)
"""transformers' names, without the prefix that they share."""

_INTERLEAVED: dict[str, Open] = {
    "self_attn.q_proj.weight": _halves("attn.q_b.weight", _q_dims),
    "self_attn.q_b_proj.weight": _halves("attn.q_b.weight", _q_dims),
    "self_attn.kv_a_proj_with_mqa.weight": _halves("attn.kv_a.weight", _kv_dims),
    "self_attn.kv_a_proj_with_mqa.bias": _halves("attn.kv_a.bias", _kv_dims),
}

GGUF = Naming(
    layer=re.compile(r"^blk\.(\d+)\.(.+)$"),
    top={"token_embd.weight": "embed.weight", "output_norm.weight": "norm.weight", "output.weight": "head.weight"},
    renames={
        "attn_norm.weight": "attn_norm.weight",
        "ffn_norm.weight": "mlp_norm.weight",
        "post_attention_norm.weight": "attn_post_norm.weight",
        "post_ffw_norm.weight": "mlp_post_norm.weight",
        "attn_sinks.weight": "attn.sinks.weight",
        **_suffixed({f"attn_{x}": f"attn.{x}" for x in ("q", "k", "v", "q_norm", "k_norm")}),
        **_suffixed({"attn_output": "attn.o", "ffn_gate_inp": "moe.router"}),
        **_suffixed({f"ffn_{x}": f"mlp.{x}" for x in _GATED}),
        **_suffixed({f"ffn_{x}.E": f"moe.experts.E.{x}" for x in _GATED}),
    },
    opens={
        "attn_qkv.weight": _split("attn.q.weight", "attn.k.weight", "attn.v.weight", sizes=_qkv_rows),
        **{
            f"ffn_{x}_exps.{kind}": _experts(f"moe.experts.E.{x}.{kind}") for x in _GATED for kind in ("weight", "bias")
        },
    },
    ignored=re.compile(r"^rope_(freqs|factors_long|factors_short)\.weight$"),
)
"""llama.cpp's names."""

_GGUF_PAIRS: dict[str, Open] = {
    f"attn_{x}.{kind}": _halves(f"attn.{x}.{kind}", _head_dims) for x in ("q", "k") for kind in ("weight", "bias")
}
_GGUF_FUSED: dict[str, Open] = {"ffn_up.weight": _split("mlp.gate.weight", "mlp.up.weight")}
_GGUF_OPENS: dict[str, dict[str, Open]] = {"llama": _GGUF_PAIRS, "mixtral": _GGUF_PAIRS, "phi3": _GGUF_FUSED}
_GGUF_RENAMES = {"gpt_oss": {"post_attention_norm.weight": "mlp_norm.weight"}}


def hf_naming(config: ModelConfig, interleaved: bool) -> Naming:
    """How a folder of this family names its tensors. `interleaved`: rotary rows come as pairs."""
    opens = dict(HF.opens)
    renames = {**HF.renames, **FAMILIES[config.family].rename}
    if config.mla:
        renames |= {"self_attn.q_proj.weight": "attn.q_b.weight"}
        opens |= _INTERLEAVED if interleaved else {}
    return Naming(HF.layer, HF.top, renames, opens, HF.ignored)


def gguf_naming(config: ModelConfig) -> Naming:
    """How a GGUF file of this family names its tensors."""
    opens = {**GGUF.opens, **_GGUF_OPENS.get(config.family, {})}
    renames = {**GGUF.renames, **_GGUF_RENAMES.get(config.family, {})}
    return Naming(GGUF.layer, GGUF.top, renames, opens, GGUF.ignored)


def canonical(config: ModelConfig, naming: Naming, tensors: Mapping[str, Weight], where: str) -> dict[str, Weight]:
    """All tensors of a checkpoint by their canonical names. PartwiseError names what is missing, unexpected or
    misshapen."""
    found: dict[str, Weight] = {}
    unexpected = []
    for name, weight in tensors.items():
        if naming.ignored.search(name):
            continue
        try:
            opened = _open(config, naming, name, weight)
        except ValueError as error:
            raise PartwiseError(f"{where}: tensor {name} {error}") from None
        if opened is None:
            unexpected.append(name)
        else:
            found |= opened
    if unexpected:
        raise PartwiseError(f"{where}: a {config.family} model has no tensor {_some(unexpected)}")
    return _checked(config, found, where)


def _open(config: ModelConfig, naming: Naming, name: str, weight: Weight) -> dict[str, Weight] | None:
    """None: the name means nothing. An empty dict: it is not needed (a layer beyond the last, as for multi-token
    prediction)."""
    if name in naming.top:
        return {naming.top[name]: weight}
    match = naming.layer.match(name)
    if match is None:
        return None
    number, local = int(match[1]), match[2]
    if number >= len(config.layers):
        return {}
    if local in naming.opens:
        parts = naming.opens[local](config, weight)
        return {f"layers.{number}.{key}": value for key, value in parts.items()}
    which = re.search(r"\.(\d+)\.", local)
    generic = f"{local[: which.start()]}.E.{local[which.end() :]}" if which else local
    if generic not in naming.renames:
        return None
    target = naming.renames[generic].replace("E", which[1] if which else "E")
    return {f"layers.{number}.{target}": weight}


def _checked(config: ModelConfig, found: dict[str, Weight], where: str) -> dict[str, Weight]:
    wanted = expected(config)
    if config.tied_head:
        found.pop("head.weight", None)
    missing = [name for name in wanted if name not in found]
    if missing:
        raise PartwiseError(f"{where}: tensor {_some(missing)} is missing; fetch the model again")
    surplus = [name for name in found if name not in wanted]
    if surplus:
        raise PartwiseError(f"{where}: this {config.family} model should have no tensor {_some(surplus)}")
    for name, shape in wanted.items():
        if found[name].shape != shape:
            raise PartwiseError(
                f"{where}: tensor {name} has shape {list(found[name].shape)}, but its config asks for {list(shape)}"
            )
    return found


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def expected(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model and their shapes."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not config.tied_head:
        shapes["head.weight"] = (config.vocab_size, hidden)
    for number in range(len(config.layers)):
        local: dict[str, tuple[int, ...]] = {f"{norm}.weight": (hidden,) for norm in config.norms}
        local |= _mla_shapes(config) if config.mla else _attention_shapes(config, number)
        local |= _mlp_shapes(config, number)
        shapes |= {f"layers.{number}.{name}": shape for name, shape in local.items()}
    return shapes


def _attention_shapes(config: ModelConfig, number: int) -> dict[str, tuple[int, ...]]:
    shape, hidden = config.layers[number], config.hidden_size
    q, k, v = shape.q_heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim
    o = shape.q_heads * shape.value_dim
    local: dict[str, tuple[int, ...]] = {
        "attn.q.weight": (q, hidden),
        "attn.k.weight": (k, hidden),
        "attn.v.weight": (v, hidden),
        "attn.o.weight": (hidden, o),
    }
    if config.qkv_bias:
        local |= {"attn.q.bias": (q,), "attn.k.bias": (k,), "attn.v.bias": (v,)}
    if config.o_bias:
        local["attn.o.bias"] = (hidden,)
    if config.qk_norm:
        per_head = config.qk_norm == "head"
        local |= {
            "attn.q_norm.weight": (shape.key_dim if per_head else q,),
            "attn.k_norm.weight": (shape.key_dim if per_head else k,),
        }
    if config.sinks:
        local["attn.sinks.weight"] = (shape.q_heads,)
    return local


def _mla_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    mla, shape, hidden = config.mla, config.layers[0], config.hidden_size
    assert mla is not None
    heads, rank = shape.q_heads, shape.value_dim
    local: dict[str, tuple[int, ...]] = {
        "attn.q_b.weight": (heads * (mla.nope_dim + mla.rope_dim), mla.q_rank or hidden),
        "attn.kv_a.weight": (shape.key_dim, hidden),
        "attn.kv_a_norm.weight": (rank,),
        "attn.kv_b.weight": (heads * (mla.nope_dim + mla.value_dim), rank),
        "attn.o.weight": (hidden, heads * mla.value_dim),
    }
    if mla.q_rank:
        local |= {"attn.q_a.weight": (mla.q_rank, hidden), "attn.q_a_norm.weight": (mla.q_rank,)}
    if mla.a_bias:
        local |= {"attn.kv_a.bias": (shape.key_dim,)}
        local |= {"attn.q_a.bias": (mla.q_rank,)} if mla.q_rank else {}
    if config.o_bias:
        local["attn.o.bias"] = (hidden,)
    return local


def _mlp_shapes(config: ModelConfig, number: int) -> dict[str, tuple[int, ...]]:
    mlp, hidden = config.details[number].mlp, config.hidden_size
    if not isinstance(mlp, MoEConfig):
        return _gated("mlp", hidden, mlp.intermediate, mlp.bias)
    local: dict[str, tuple[int, ...]] = {"moe.router.weight": (mlp.experts, hidden)}
    if mlp.bias:
        local["moe.router.bias"] = (mlp.experts,)
    if mlp.correction:
        local["moe.correction.bias"] = (mlp.experts,)
    if mlp.shared:
        local |= _gated("moe.shared", hidden, mlp.shared, False)
    for e in range(mlp.experts):
        local |= _gated(f"moe.experts.{e}", hidden, mlp.intermediate, mlp.bias)
    return local


def _gated(prefix: str, hidden: int, wide: int, bias: bool) -> dict[str, tuple[int, ...]]:
    local: dict[str, tuple[int, ...]] = {
        f"{prefix}.gate.weight": (wide, hidden),
        f"{prefix}.up.weight": (wide, hidden),
        f"{prefix}.down.weight": (hidden, wide),
    }
    if bias:
        local |= {f"{prefix}.gate.bias": (wide,), f"{prefix}.up.bias": (wide,), f"{prefix}.down.bias": (hidden,)}
    return local

"""A model's description: every number the decoder needs, and nothing about files. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from core.interfaces.model import LayerShape


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions of a kind of layer. `dim` of each head's numbers rotate, as two halves.

    `kind`: default, linear, dynamic, llama3, yarn, longrope or factors; `params` holds what that scaling reads.
    `max_positions` is the length the model was made for.
    """

    kind: str
    dim: int
    theta: float
    max_positions: int
    params: tuple[tuple[str, Any], ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        value = dict(self.params).get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """A gated MLP."""

    intermediate: int
    activation: str
    bias: bool = False


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Routed experts. `scoring` turns router logits into scores; with `top_first` only the chosen logits are scored.

    With `groups`, only the `top_groups` best groups of experts may be chosen, a group being worth the sum of its
    `group_best` best. `correction`: a bias that counts for choosing, not for weighting. `shared`: width of the experts
    that every token visits. `limit`: GPT-OSS's clamp on gate and up.
    """

    experts: int
    top_k: int
    intermediate: int
    activation: str
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    top_first: bool = False
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    correction: bool = False
    shared: int = 0
    bias: bool = False
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2): the widths that LayerShape does not tell."""

    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    a_bias: bool = False
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What a layer does, beside the LayerShape it keeps. `rope` counts in ModelConfig.ropes."""

    rope: int
    mlp: MLPConfig | MoEConfig


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model. `layers` and `details` run in parallel.

    `norm_offset` is added to stored norm weights; `qk_norm`: per `head`, over `all` heads, or none. Which norms lie
    around attention and MLP: `norms`, of `attn_norm`, `attn_post_norm`, `mlp_norm`, `mlp_post_norm`.
    """

    family: str
    layers: tuple[LayerShape, ...]
    details: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    norms: tuple[str, ...]
    norm_offset: float
    attention_scale: float
    qk_norm: Literal["head", "all"] | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    tied_head: bool = False
    mla: MLAConfig | None = None
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()

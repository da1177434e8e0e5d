"""The pieces of a decoder layer: norms, attention (heads or a latent), gated MLPs and routed experts.

A piece is built with `Parts`, which opens weights by canonical name, and called with hidden states [T, hidden].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from core.interfaces.model import Weights
from core.interfaces.quantizer import Linear, WeightQuantizer
from core.models.config import MLPConfig, ModelConfig, MoEConfig
from core.models.rope import rotate
from core.types import Attend, LayerSpec, PartwiseError

Tables = tuple[Tensor, Tensor]


@dataclass
class Parts:
    """Opens a model's weights. `nbytes` adds up what they hold in this process; `let_go` is called when a weight has
    been read, so that the file and what was made of it are not resident together."""

    weights: Weights
    quantizer: WeightQuantizer
    dtype: torch.dtype
    device: str
    let_go: Callable[[], None]
    nbytes: int = field(default=0)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """One product over the weights of `names`, stacked."""
        stacked = torch.cat([self._tensor(f"{name}.bias", self.dtype) for name in names]) if bias else None
        name = f"{names[0]}.weight"
        made = self.quantizer.linear(name, [self.weights[f"{n}.weight"] for n in names], stacked, self.dtype)
        self.nbytes += made.nbytes
        self.let_go()
        return made

    def vector(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A small tensor, held as it is."""
        tensor = self._tensor(name, dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.weights[name].dense().to(dtype)


class RMSNorm:
    """Root-mean-square norm, computed in fp32. `weight` [..., dim]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.shape = weight, eps, weight.shape[-1:]

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.weight.dim() == 1:
            return F.rms_norm(wide, self.shape, self.weight, self.eps).to(x.dtype)
        return (F.rms_norm(wide, self.shape, None, self.eps) * self.weight).to(x.dtype)


class HeadAttention:
    """Attention that keeps keys and values by head."""

    def __init__(self, parts: Parts, config: ModelConfig, spec: LayerSpec) -> None:
        name = f"layers.{spec.index}.attn"
        self.spec = spec
        self.heads = spec.q_heads + spec.kv_heads
        self.qkv = parts.linear(f"{name}.q", f"{name}.k", f"{name}.v", bias=config.qkv_bias)
        self.o = parts.linear(f"{name}.o", bias=config.o_bias)
        self.norm = self._norm(parts, config, name) if config.qk_norm else None
        self.over_all = config.qk_norm == "all"

    def _norm(self, parts: Parts, config: ModelConfig, name: str) -> tuple[RMSNorm, ...]:
        q, k = (parts.vector(f"{name}.{x}_norm.weight") + config.norm_offset for x in ("q", "k"))
        if config.qk_norm == "all":
            return RMSNorm(q, config.norm_eps), RMSNorm(k, config.norm_eps)
        both = torch.cat((q.expand(self.spec.q_heads, -1), k.expand(self.spec.kv_heads, -1)))
        return (RMSNorm(both, config.norm_eps),)

    def __call__(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        spec = self.spec
        qkv = self.qkv(x).view(len(x), self.heads + spec.kv_heads, spec.key_dim)
        qk, v = qkv[:, : self.heads], qkv[:, self.heads :]
        if self.norm:
            qk = self._normed(qk, self.norm)
        qk = rotate(qk, tables)
        out = attend(spec.index, qk[:, : spec.q_heads], qk[:, spec.q_heads :], v)
        return self.o(out.reshape(len(x), -1))

    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """The weights of a norm by head, [key_dim] for queries and for keys."""
        if not self.norm:
            return None, None
        both = self.norm[0].weight
        return both[0].contiguous(), both[-1].contiguous()

    def _normed(self, qk: Tensor, norms: tuple[RMSNorm, ...]) -> Tensor:
        if len(norms) == 1:
            return norms[0](qk)
        q, k = qk[:, : self.spec.q_heads], qk[:, self.spec.q_heads :]
        return torch.cat([norm(x.flatten(1)) for norm, x in zip(norms, (q, k), strict=True)], 1).view_as(qk)


class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1) in its absorbed form: the cache holds the normed latent
    and one rotated key, and the up-projections of keys and values are applied to queries and results instead."""

    def __init__(self, parts: Parts, config: ModelConfig, spec: LayerSpec) -> None:
        mla, name = config.mla, f"layers.{spec.index}.attn"
        assert mla is not None
        self.spec, self.mla, self.rank = spec, mla, spec.value_dim
        if mla.q_rank:
            self.first = parts.linear(f"{name}.q_a", f"{name}.kv_a", bias=mla.a_bias)
            self.q_norm = RMSNorm(parts.vector(f"{name}.q_a_norm.weight"), mla.norm_eps)
            self.q_b = parts.linear(f"{name}.q_b")
        else:
            self.first = parts.linear(f"{name}.kv_a", bias=mla.a_bias)
            self.q_b = parts.linear(f"{name}.q_b")
        self.kv_norm = RMSNorm(parts.vector(f"{name}.kv_a_norm.weight"), mla.norm_eps)
        up = parts.vector(f"{name}.kv_b.weight", parts.dtype).view(spec.q_heads, -1, self.rank)
        self.key_up = up[:, : mla.nope_dim]
        self.value_up = up[:, mla.nope_dim :].transpose(1, 2)
        self.o = parts.linear(f"{name}.o", bias=config.o_bias)

    def __call__(self, x: Tensor, tables: Tables, attend: Attend) -> Tensor:
        mla, n = self.mla, len(x)
        first = self.first(x)
        latent = first[:, mla.q_rank or 0 :]
        q = self.q_b(self.q_norm(first[:, : mla.q_rank]) if mla.q_rank else x)
        q = q.view(n, self.spec.q_heads, mla.nope_dim + mla.rope_dim)
        q_latent = torch.matmul(q[..., : mla.nope_dim].transpose(0, 1), self.key_up).transpose(0, 1)
        q = torch.cat((q_latent, rotate(q[..., mla.nope_dim :], tables)), -1)
        k_rope = rotate(latent[:, None, self.rank :], tables)
        k = torch.cat((self.kv_norm(latent[:, : self.rank])[:, None], k_rope), -1)
        out = attend(self.spec.index, q, k, None)
        out = torch.matmul(out.transpose(0, 1), self.value_up).transpose(0, 1)
        return self.o(out.reshape(n, -1))


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _gate(name: str, limit: float = 0.0) -> Callable[[Tensor], Tensor]:
    """gate and up side by side [T, 2 * width] -> [T, width]."""

    def oss(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)

    if name == "swiglu_oss":
        return oss
    if name not in ACTIVATIONS:
        raise PartwiseError(f"activation {name!r} is not known; known are {', '.join(ACTIVATIONS)}")
    activation = ACTIVATIONS[name]

    def gated(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return activation(gate).mul_(up)

    return gated


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, parts: Parts, name: str, activation: Callable[[Tensor], Tensor], bias: bool) -> None:
        self.gate_up = parts.linear(f"{name}.gate", f"{name}.up", bias=bias)
        self.down = parts.linear(f"{name}.down", bias=bias)
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))


class Experts:
    """Routed experts. Each token's sum is taken in the order of its choices, so it does not depend on the batch."""

    def __init__(self, parts: Parts, name: str, config: MoEConfig) -> None:
        self.config = config
        activation = _gate(config.activation, config.limit)
        self.router = parts.vector(f"{name}.router.weight")
        self.router_bias = parts.vector(f"{name}.router.bias") if config.bias else None
        self.correction = parts.vector(f"{name}.correction.bias") if config.correction else None
        self.experts = [GatedMLP(parts, f"{name}.experts.{e}", activation, config.bias) for e in range(config.experts)]
        self.shared = GatedMLP(parts, f"{name}.shared", activation, False) if config.shared else None

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self._route(x)
        out = (self._run(x, chosen) * weights[..., None].to(x.dtype)).sum(1)
        return out + self.shared(x) if self.shared else out

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, both [T, top_k]."""
        config = self.config
        logits = F.linear(x.float(), self.router, self.router_bias)
        if config.top_first:
            best, chosen = logits.topk(config.top_k, -1)
            return best.softmax(-1), chosen
        scores = logits.sigmoid() if config.scoring == "sigmoid" else logits.softmax(-1)
        merit = scores if self.correction is None else scores + self.correction
        if config.groups > 1:
            merit = self._best_groups(merit)
        chosen = merit.topk(config.top_k, -1).indices
        weights = scores.gather(1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        return weights * config.scale, chosen

    def _best_groups(self, merit: Tensor) -> Tensor:
        config = self.config
        grouped = merit.view(len(merit), config.groups, -1)
        worth = grouped.topk(config.group_best, -1).values.sum(-1)
        best = worth.topk(config.top_groups, -1).indices
        kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, best, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)

    def _run(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Each token through each of its experts: [T, top_k, hidden]."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self.experts)).tolist()
        inputs = torch.split(x[order // chosen.shape[1]], counts)
        outputs = [expert(rows) for expert, rows in zip(self.experts, inputs, strict=True) if len(rows)]
        out = torch.empty(len(flat), x.shape[1], dtype=x.dtype, device=x.device)
        out[order] = torch.cat(outputs)
        return out.view(*chosen.shape, -1)


def build_mlp(parts: Parts, name: str, config: MLPConfig | MoEConfig) -> GatedMLP | Experts:
    """The MLP or the experts of layer `name`."""
    if isinstance(config, MoEConfig):
        return Experts(parts, f"{name}.moe", config)
    return GatedMLP(parts, f"{name}.mlp", _gate(config.activation), config.bias)


def build_norm(parts: Parts, name: str, config: ModelConfig, norms: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """The norm `name` (its last part named in `norms`), or nothing where the family has none."""
    if name.rsplit(".", 1)[-1] not in norms:
        return _same
    return RMSNorm(parts.vector(f"{name}.weight") + config.norm_offset, config.norm_eps)


def _same(x: Tensor) -> Tensor:
    return x

"""Any other decoder-only architecture, run by its own transformers module with our attention plugged in.

What each layer keeps is learned by watching: the module runs once on the meta device, and every call of its attention
is recorded. After loading, the plugged module is compared with transformers' own attention on a few tokens, so that an
architecture that does more with its context than such a call tells is refused, not served wrongly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from core.interfaces.model import LayerShape, Weights
from core.interfaces.quantizer import Linear, WeightQuantizer
from core.models.loaded import GIVES, Build, LoadedModel, OpenedModel, Scores, kernel_needs, layer_specs
from core.models.source import ModelSource
from core.models.stored import PlainWeight
from core.models.tokenizer import tokenizer_vocab
from core.types import Attend, Batch, LayerSpec, PartwiseError

TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class WatchedConfig:
    """A model's description as its attention calls tell it."""

    family: str
    layers: tuple[LayerShape, ...]
    scores: tuple[Scores, ...]
    hidden_size: int
    vocab_size: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str


class Plug:
    """The attention that transformers calls. `attend` is what it leads to at the moment."""

    def __init__(self) -> None:
        from transformers import AttentionInterface

        self.attend: Any = None
        self.name = f"partwise_{id(self)}"
        AttentionInterface.register(self.name, self)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, None]:
        """q [1, Hq, T, D], k [1, Hkv, T, D], v [1, Hkv, T, Dv] -> [1, T, Hq, Dv]"""
        if mask is not None:
            raise _Unfit("its module brings an attention mask of its own")
        heads = [x[0].transpose(0, 1) for x in (q, k, v)]
        return self.attend(module, *heads, options)[None], None


class _Unfit(Exception):
    """Why an architecture cannot be served."""


# --- opening ----------------------------------------------------------------------------------------------------------


def open_fallback(source: ModelSource, config: Any, eos: tuple[int, ...]) -> OpenedModel:
    """Open a folder of an architecture outside core.models.families. PartwiseError: its attention cannot be plugged."""
    try:
        watched = _watch(config, eos)
    except _Unfit as reason:
        raise _refusal(source, config, str(reason)) from None
    softcap = any(score.softcap for score in watched.scores)
    sinks = any(score.sinks is not None for score in watched.scores)
    needs = kernel_needs(watched, softcap=softcap, sinks=sinks)
    return OpenedModel(watched, needs, GIVES, lambda build: _load(source, config, watched, build))


def _refusal(source: ModelSource, config: Any, reason: str) -> PartwiseError:
    return PartwiseError(
        f"{source.folder}: architecture {config.model_type!r} cannot be served: {reason}. Its own transformers module "
        "would need our paged attention and cache in it"
    )


def _watch(config: Any, eos: tuple[int, ...]) -> WatchedConfig:
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = auto.from_config(copy.deepcopy(config), attn_implementation="eager")
    except (ValueError, ImportError, AttributeError) as error:
        raise _Unfit(f"transformers has no causal language model of it ({_first_line(error)})") from None
    if not model._supports_attention_backend:
        raise _Unfit("transformers does not let its attention be replaced (no AttentionInterface support)")
    plug = Plug()
    model.set_attn_implementation(plug.name)
    seen: dict[int, tuple[LayerShape, Scores]] = {}
    plug.attend = lambda module, q, k, v, options: _record(config, seen, module, q, k, v, options)
    places = torch.arange(3, device="meta")
    _hidden(model, places, places)
    return _description(config, model, seen, eos)


def _record(
    config: Any, seen: dict[int, Any], module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
) -> Tensor:
    number = getattr(module, "layer_idx", None)
    if number is None or number in seen:
        raise _Unfit("its attention calls do not tell their layer")
    if options.get("position_bias") is not None or not getattr(module, "is_causal", True):
        raise _Unfit("its attention is not plainly causal")
    shape = LayerShape(q.shape[1], k.shape[1], k.shape[2], v.shape[2], _window(config, number, options))
    scale = options.get("scaling")
    sinks = options.get("s_aux")
    seen[number] = shape, Scores(q.shape[2] ** -0.5 if scale is None else float(scale), options.get("softcap"), sinks)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _window(config: Any, number: int, options: dict[str, Any]) -> int | None:
    text = config.get_text_config()
    types = getattr(text, "layer_types", None)
    if types and types[number] not in ("full_attention", "sliding_attention"):
        raise _Unfit(f"layer {number} is of type {types[number]!r}")
    if types:
        return text.sliding_window if types[number] == "sliding_attention" else None
    return options.get("sliding_window") or None


def _description(config: Any, model: Any, seen: dict[int, Any], eos: tuple[int, ...]) -> WatchedConfig:
    text = config.get_text_config()
    if sorted(seen) != list(range(text.num_hidden_layers)):
        raise _Unfit("some of its layers keep a state other than keys and values")
    layers, scores = zip(*(seen[number] for number in sorted(seen)), strict=True)
    head = model.get_output_embeddings()
    if head is None:
        raise _Unfit("it has no output head")
    return WatchedConfig(
        family=config.model_type,
        layers=layers,
        scores=scores,
        hidden_size=text.hidden_size,
        vocab_size=head.weight.shape[0],
        max_positions=getattr(text, "max_position_embeddings", None) or 1 << 20,
        eos_token_ids=eos,
        dtype=str(getattr(config, "dtype", None) or "float32").removeprefix("torch."),
    )


# --- loading ----------------------------------------------------------------------------------------------------------


def _load(source: ModelSource, config: Any, watched: WatchedConfig, build: Build) -> LoadedModel:
    kept, _ = build.structure.convert(watched, Weights({}))
    if kept is not watched:
        raise _refusal(source, config, "this attention structure cannot convert it; use structure native")
    groups = tuple(build.structure.kv_groups(watched))
    build.check(groups)
    model = _pretrained(source, build)
    specs = layer_specs(watched, groups, _with_sinks(watched, model))
    plug = Plug()
    try:
        _verify(model, plug, specs)
    except _Unfit as reason:
        raise _refusal(source, config, str(reason)) from None
    model.set_attn_implementation(plug.name)
    nbytes = _quantize(model, build.weights, build.dtype, build.device)
    return LoadedModel(
        config=watched,
        groups=groups,
        layers=specs,
        vocab_size=watched.vocab_size,
        tokenizer_vocab=tokenizer_vocab(source),
        weight_bytes=nbytes,
        dtype=build.dtype,
        runnable=ModuleRunner(model, plug),
    )


def _pretrained(source: ModelSource, build: Build) -> Any:
    import transformers

    auto, messages = cast(Any, transformers.AutoModelForCausalLM), cast(Any, transformers.utils.logging)
    messages.disable_progress_bar()
    try:
        model, info = auto.from_pretrained(
            source.folder, dtype=build.dtype, attn_implementation="eager", output_loading_info=True
        )
    except Exception as error:
        raise PartwiseError(f"{source.folder} cannot be loaded: {_first_line(error)}") from error
    for kind in ("missing", "unexpected", "mismatched"):
        names = sorted(map(str, info.get(f"{kind}_keys", ())))
        if names:
            raise PartwiseError(f"{source.folder}: {kind} tensor {', '.join(names[:4])}; fetch the model again")
    return model.to(build.device).eval()


def _with_sinks(watched: WatchedConfig, model: Any) -> list[Scores]:
    """Sinks are weights, so they come from the loaded modules."""
    found = {m.layer_idx: m.sinks for m in model.modules() if hasattr(m, "sinks") and hasattr(m, "layer_idx")}
    return [
        score if score.sinks is None else replace(score, sinks=found[number].detach().float())
        for number, score in enumerate(watched.scores)
    ]


@torch.inference_mode()
def _verify(model: Any, plug: Plug, specs: Sequence[LayerSpec]) -> None:
    """Two sequences side by side through the plug must give what each gives alone through transformers."""
    vocab = model.get_output_embeddings().weight.shape[0]
    rows = [torch.arange(5, device=model.device) * 7 % vocab, torch.arange(3, device=model.device) * 5 % vocab]
    alone = torch.cat([_hidden(model, row, torch.arange(len(row), device=model.device)) for row in rows])
    places = torch.cat([torch.arange(len(row), device=model.device) for row in rows])
    plug.attend = lambda module, q, k, v, options: torch.cat(
        [_plain(specs[module.layer_idx], q[a:b], k[a:b], v[a:b]) for a, b in ((0, 5), (5, 8))]
    )
    model.set_attn_implementation(plug.name)
    beside = _hidden(model, torch.cat(rows), places)
    scale = alone.float().abs().max().clamp(min=1e-6)
    worst = ((alone - beside).float().abs().max() / scale).item()
    if not worst < max(TOLERANCE, 8 * torch.finfo(alone.dtype).eps):
        raise _Unfit(f"with our attention its results differ from its own (by {worst:.1e} of their size)")


def _plain(spec: LayerSpec, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence to itself, q [n, Hq, D], for `_verify`."""
    repeat = spec.q_heads // spec.kv_heads
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = torch.einsum("nhd,shd->hns", q.float(), k.float()) * spec.scale
    if spec.softcap:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    places = torch.arange(len(q), device=q.device)
    distance = places[:, None] - places
    hidden = (distance < 0) | (distance >= (spec.window or len(q) + 1))
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat((scores, spec.sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return torch.einsum("hns,shd->nhd", scores.softmax(-1)[..., : len(q)], v.float()).to(q.dtype)


def _quantize(model: Any, quantizer: WeightQuantizer, dtype: torch.dtype, device: str) -> int:
    """Put the quantizer's products in the place of the module's own; what all weights hold then, in bytes."""
    nbytes, products = 0, []
    for name in [name for name, module in model.named_modules() if type(module) is nn.Linear]:
        module = model.get_submodule(name)
        weight = module.weight.detach()
        stored = PlainWeight(partial(_same, weight), weight.shape, weight.dtype, dtype, device)
        bias = None if module.bias is None else module.bias.detach()
        product = quantizer.linear(f"{name}.weight", [stored], bias, dtype)
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, Product(product))
        nbytes += product.nbytes
        products.append((product, weight.data_ptr()))
    rest = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    tied = [rest[place] for product, place in products if place in rest and _place(product) == place]
    return int(nbytes + sum(rest.values()) - sum(tied))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _place(product: Linear) -> int | None:
    """Where a product's own weight lies, if it is one tensor."""
    weight = getattr(product, "weight", None)
    return int(weight.data_ptr()) if isinstance(weight, Tensor) else None


class Product(nn.Module):
    """A quantizer's product as a module. `x` may have leading dimensions."""

    def __init__(self, product: Linear) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.product.out_features)


# --- running ----------------------------------------------------------------------------------------------------------


class ModuleRunner:
    """A transformers module as a Runnable."""

    def __init__(self, model: Any, plug: Plug) -> None:
        self.model, self.plug = model, plug
        self.head = _head_of(model)

    def forward(self, batch: Batch, attend: Attend) -> Tensor:
        self.plug.attend = lambda module, q, k, v, options: attend(module.layer_idx, q, k, v)
        try:
            return _hidden(self.model, batch.tokens, batch.positions)
        finally:
            self.plug.attend = None

    def logits(self, hidden: Tensor) -> Tensor:
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self.head.get_submodule(self.model.base_model_prefix).hidden = hidden[None]
        scores: Tensor = self.head(input_ids=tokens, use_cache=False).logits[0].float()
        return scores

    def pieces(self) -> None:
        return None


class _Given(nn.Module):
    """Stands for a model's body, and gives hidden states that are there already."""

    hidden: Tensor

    def forward(self, *args: Any, **options: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


def _head_of(model: Any) -> Any:
    """The model without its body, for what it does to hidden states beyond the head's product."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _Given()}
    return head


def _hidden(model: Any, tokens: Tensor, positions: Tensor) -> Tensor:
    """Final hidden states [T, hidden] of flat tokens. _Unfit: the module does not run so."""
    try:
        out = model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden
    except _Unfit:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError, KeyError) as error:
        raise _Unfit(f"its module does not run on flat tokens with positions ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]

"""A model source to a model that runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from core.interfaces.attention import AttentionStructure
from core.interfaces.model import Weights
from core.interfaces.quantizer import WeightQuantizer
from core.models.checkpoint import open_folder, open_gguf
from core.models.config import ModelConfig
from core.models.decoder import Decoder
from core.models.describe import describe, describe_gguf, read_folder
from core.models.families import FAMILIES
from core.models.gguf_file import GGUFFile
from core.models.layers import Parts
from core.models.loaded import GIVES, Build, LoadedModel, OpenedModel, Scores, kernel_needs, layer_specs
from core.models.source import ModelSource, ModelSpec, read_spec, resolve
from core.models.tokenizer import tokenizer_vocab
from core.types import KVGroup, PartwiseError

__all__ = ["LoadedModel", "OpenedModel", "load_model", "open_model"]


def open_model(model: ModelSpec | ModelSource | Mapping[str, Any]) -> OpenedModel:
    """Find a model, fetching it if need be, and read its description. PartwiseError: it cannot be served, with what is
    wrong and what to do."""
    if isinstance(model, Mapping):
        model = read_spec(model)
    source = model if isinstance(model, ModelSource) else resolve(model)
    return _open_gguf(source) if source.gguf else _open_folder(source)


def load_model(
    opened: OpenedModel,
    *,
    structure: AttentionStructure,
    weights: WeightQuantizer,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    max_model_len: int | None = None,
    check: Callable[[Sequence[KVGroup]], None] = lambda groups: None,
) -> LoadedModel:
    """Load an opened model. `dtype` None: the checkpoint's own. `max_model_len`: the longest sequence that will be
    served, in tokens; it chooses between the short and the long factors of longrope (see core.models.rope). `check` is
    called with the groups of the model's KV before any weight is loaded, and may raise.

    PartwiseError: a tensor is missing, unexpected or misshapen.
    """
    kind = _dtype(dtype, opened.config.dtype)
    with torch.inference_mode():
        return opened.load(Build(structure, weights, kind, device, max_model_len or opened.max_positions, check))


def _dtype(asked: torch.dtype | str | None, own: str) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    found = getattr(torch, asked or own, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PartwiseError(f"dtype {asked or own!r} is not known; use float32, bfloat16 or float16")
    return found


def _open_gguf(source: ModelSource) -> OpenedModel:
    assert source.gguf is not None
    file = GGUFFile(source.gguf)
    config = describe_gguf(file)
    return _opened(source, config, lambda build: open_gguf(file, config, build.dtype, build.device), file.let_go)


def _open_folder(source: ModelSource) -> OpenedModel:
    folder = source.folder
    assert folder is not None
    described, eos = read_folder(folder)
    _check_format(described, source)
    if described.model_type not in FAMILIES:
        from core.models.fallback import open_fallback

        return open_fallback(source, described, eos)
    config = replace(describe(described), eos_token_ids=eos)
    interleaved = FAMILIES[described.model_type].interleaved_rope(described)
    return _opened(source, config, lambda build: open_folder(folder, config, build.dtype, build.device, interleaved))


def _check_format(config: Any, source: ModelSource) -> None:
    """MXFP4 is read; other quantized checkpoints are not."""
    stored = getattr(config, "quantization_config", None) or {}
    method = stored.get("quant_method") if isinstance(stored, dict) else getattr(stored, "quant_method", None)
    name = str(getattr(method, "value", method))
    if method and name != "mxfp4":
        raise PartwiseError(
            f"{source.folder} is stored in the format {name!r}, which is not read here; use the checkpoint in bf16, or "
            "a GGUF file"
        )


def _opened(
    source: ModelSource,
    config: ModelConfig,
    tensors: Callable[[Build], Weights],
    let_go: Callable[[], None] = lambda: None,
) -> OpenedModel:
    needs = kernel_needs(config, softcap=config.attention_softcap is not None, sinks=config.sinks)
    return OpenedModel(config, needs, GIVES, lambda build: _build(source, config, tensors(build), build, let_go))


def _build(
    source: ModelSource, config: ModelConfig, tensors: Weights, build: Build, let_go: Callable[[], None]
) -> LoadedModel:
    converted, tensors = build.structure.convert(config, tensors)
    assert isinstance(converted, ModelConfig)
    groups = tuple(build.structure.kv_groups(converted))
    build.check(groups)
    parts = Parts(tensors, build.weights, build.dtype, build.device, let_go)
    scores = [_scores(parts, converted, number) for number in range(len(converted.layers))]
    specs = layer_specs(converted, groups, scores)
    decoder = Decoder(parts, converted, specs, build.served)
    return LoadedModel(
        config=converted,
        groups=groups,
        layers=specs,
        vocab_size=decoder.head.out_features,
        tokenizer_vocab=tokenizer_vocab(source),
        weight_bytes=parts.nbytes,
        dtype=build.dtype,
        runnable=decoder,
    )


def _scores(parts: Parts, config: ModelConfig, number: int) -> Scores:
    sinks = parts.vector(f"layers.{number}.attn.sinks.weight") if config.sinks else None
    return Scores(config.attention_scale, config.attention_softcap, sinks)

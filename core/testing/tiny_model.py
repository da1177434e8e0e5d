"""Tiny random models as folders on disk, so that checks serve them through the doors that real models take."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 64
LAYERS = 2
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE = 4, 2, 16, 32, 64
MAX_POSITIONS = 512
WINDOW = 8
KV_BYTES_PER_TOKEN = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4

_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 0,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, **_SHAPE},
    "windowed": {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        **_SHAPE,
    },
}
"""`plain`: grouped-query attention in every layer. `windowed`: one layer sees 8 tokens, the other everything."""


@lru_cache
def tiny_model(kind: str) -> Path:
    """The folder of a model of `CONFIGS`, the same numbers each time; it goes when the process ends."""
    from safetensors.torch import save_file

    folder = Path(tempfile.mkdtemp(prefix=f"partwise-{kind}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind], indent=1))
    save_file(dict(_tensors(kind)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(kind: str) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        made: Tensor = torch.randn(rows, columns, generator=generator) * gain / columns**0.5
        return made

    gemma = kind == "windowed"
    norm = torch.zeros if gemma else torch.ones
    yield "model.embed_tokens.weight", matrix(VOCAB, HIDDEN, gain=2.0)
    yield "model.norm.weight", norm(HIDDEN)
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
        for name in norms:
            yield f"{layer}.{name}.weight", norm(HIDDEN)
        for name in ("q_norm", "k_norm") if gemma else ():
            yield f"{layer}.self_attn.{name}.weight", norm(HEAD_DIM)
        yield f"{layer}.self_attn.q_proj.weight", matrix(HEADS * HEAD_DIM, HIDDEN, gain=3.0)
        yield f"{layer}.self_attn.k_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN, gain=3.0)
        yield f"{layer}.self_attn.v_proj.weight", matrix(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", matrix(HIDDEN, HEADS * HEAD_DIM, gain=4.0)
        yield f"{layer}.mlp.gate_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", matrix(INTERMEDIATE, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", matrix(HIDDEN, INTERMEDIATE, gain=2.0)

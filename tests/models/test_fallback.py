"""Architectures outside the families, run by transformers' own module with our attention and cache in it."""

from __future__ import annotations

import pytest
import torch

from core.interfaces.plugin import BuildContext, Options
from core.models.loading import load_model, open_model
from core.types import PartwiseError
from plugins.attention.native import NativeStructure
from plugins.quantizer.weights_int8 import Int8Weights
from tests.models.harness import Session, chunked, load, prefill
from tests.models.test_families import close, ids
from tests.models.tiny import BASE, logits, make

OTHERS = {
    "starcoder2": ("Starcoder2", {**BASE, "sliding_window": 8}),
    "gpt-neox": ("GPTNeoX", {**BASE, "hidden_act": "gelu"}),
    "stablelm-like-phi": ("Phi", BASE),
    "cohere": ("Cohere", {**BASE, "logit_scale": 0.25}),
    "granite": ("Granite", {**BASE, "logits_scaling": 3.0, "attention_multiplier": 0.3, "embedding_multiplier": 2.0}),
    "gpt2": ("GPT2", {"vocab_size": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "olmo3": ("Olmo3", {**BASE, "num_hidden_layers": 4, "sliding_window": 8}),
    "smollm3": ("SmolLM3", BASE),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def pair(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = make(name, folder, OTHERS)
            made[name] = reference, load(str(folder)), folder
        return made[name]

    return pair


@pytest.mark.parametrize("name", OTHERS)
def test_logits(pairs, name):
    reference, model, _ = pairs(name)
    expected = logits(reference, ids())
    assert expected.std() > 0.02
    close(prefill(model, ids()), expected)
    close(chunked(model, ids(), 5), expected)
    close(chunked(model, ids(), 1), expected)


@pytest.mark.parametrize("name", OTHERS)
def test_neighbours_do_not_matter(pairs, name):
    reference, model, _ = pairs(name)
    texts = [ids(20, 1), ids(7, 2)]
    session = Session(model, rows=2)
    first = session.step([texts[0][:3], texts[1]])
    second = session.step([texts[0][3:], []])
    close(torch.cat((first[0], second[0])), logits(reference, texts[0]))
    close(first[1], logits(reference, texts[1]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_step_that_wants_no_logits(pairs, name):
    assert pairs(name)[1].logits(torch.zeros(0, 48)).shape == (0, 96)


def test_windows_are_found(pairs):
    assert {layer.window for layer in pairs("starcoder2")[1].layers} == {8}
    assert [layer.window for layer in pairs("olmo3")[1].layers] == [8, 8, 8, None]


def test_weights_go_through_the_quantizer(pairs):
    reference, dense, folder = pairs("gpt-neox")
    context = BuildContext()
    small = load_model(
        open_model({"path": str(folder)}),
        structure=NativeStructure(Options(), context),
        weights=Int8Weights(Options(), context),
        dtype="float32",
    )
    total = sum(parameter.nbytes for parameter in reference.parameters())
    assert dense.weight_bytes >= total
    assert dense.weight_bytes < total * 1.1
    assert small.weight_bytes < dense.weight_bytes * 0.5
    expected = logits(reference, ids())
    assert (prefill(small, ids()) - expected).abs().max() < 0.1 * expected.abs().max()


REFUSED = {
    "bloom": ("Bloom", {"vocab_size": 96, "hidden_size": 48, "n_layer": 2, "n_head": 4}, "AttentionInterface"),
    "mamba": ("Mamba", {"vocab_size": 96, "hidden_size": 48, "num_hidden_layers": 2}, "cannot be served"),
    "falcon": ("Falcon", {**BASE, "alibi": True}, "AttentionInterface"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_plugged_is_refused(tmp_path, name):
    *shape, message = REFUSED[name]
    make(name, tmp_path, {name: tuple(shape)})
    with pytest.raises(PartwiseError, match=message) as caught:
        open_model({"path": str(tmp_path)})
    assert name in str(caught.value)


def test_an_encoder_is_refused(tmp_path):
    import transformers

    transformers.T5Config(vocab_size=96, d_model=16, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(PartwiseError, match="no causal language model"):
        open_model({"path": str(tmp_path)})

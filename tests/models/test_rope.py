"""Scalings that look at lengths: what is equal to transformers', and what depends on nothing but the position."""

from __future__ import annotations

import torch

from tests.models.harness import Session, chunked, load, prefill
from tests.models.test_families import close, ids
from tests.models.tiny import logits, make, stepwise


def test_longrope_takes_the_long_factors_when_long_sequences_are_served(tmp_path):
    reference = make("phi-3-longrope", tmp_path)
    text = ids(80)
    model = load(str(tmp_path), max_model_len=100)
    expected = logits(reference, text)
    close(prefill(model, text), expected)
    close(chunked(model, text, 9), expected)
    short = load(str(tmp_path), max_model_len=64)
    close(prefill(short, text[:64]), logits(reference, text[:64]))
    assert (prefill(model, text[:64]) - prefill(short, text[:64])).abs().max() > 1e-3


def test_dynamic_scaling_beyond_the_length_of_the_model(tmp_path):
    """One rule for prefill, chunks and decode: each token as if it were the last of its sequence."""
    reference = make("llama-dynamic", tmp_path)
    model = load(str(tmp_path))
    assert model.max_positions == 256
    text = ids(150)
    expected = stepwise(reference, text)
    plain = load(str(tmp_path))
    plain.runnable.ropes[0].dynamic = None
    assert (prefill(plain, text) - expected)[128:].abs().max() > 1e-2
    close(prefill(model, text), expected)
    close(chunked(model, text, 31), expected)
    beside = Session(model, rows=2).step([text, ids(200, 4)])
    torch.testing.assert_close(beside[0], prefill(model, text), atol=1e-5, rtol=0)

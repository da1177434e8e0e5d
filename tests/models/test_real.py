"""The real models, against transformers."""

from __future__ import annotations

import pytest
import torch

from core.models.source import ModelSource
from core.models.tokenizer import load_tokenizer
from tests.models.harness import Session, chunked, greedy, load, prefill
from tests.models.real import reference, source

PROMPTS = [
    "The capital of France is Paris. Once upon a time, in 1987,",
    "def fibonacci(n):\n    ",
    "Ein Gedicht über den Herbst:\n\n",
]


@pytest.fixture(scope="module")
def smol():
    found = source("smollm2_135m")
    return found, load(found), load_tokenizer(found)


def agree(model, name, tokens):
    with torch.no_grad():
        expected = reference(name)(torch.tensor([tokens]), use_cache=False).logits[0]
    ours = prefill(model, tokens)
    torch.testing.assert_close(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    torch.testing.assert_close(chunked(model, tokens, 6), ours, atol=1e-4 * expected.abs().max().item(), rtol=0)


def same_continuation(model, name, prompt, n):
    with torch.no_grad():
        out = reference(name).generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=-1)
    assert greedy(model, prompt, n) == out[0, len(prompt) :].tolist()


@pytest.mark.model
def test_smollm2_logits(smol):
    _, model, tokenizer = smol
    assert model.eos_token_ids == (2,) and model.vocab_size == model.tokenizer_vocab == 49152
    for prompt in PROMPTS:
        agree(model, "smollm2_135m", tokenizer.encode(prompt))


@pytest.mark.model
def test_smollm2_continues_as_transformers_does(smol):
    _, model, tokenizer = smol
    for prompt in PROMPTS[:2]:
        same_continuation(model, "smollm2_135m", tokenizer.encode(prompt), 16)


@pytest.mark.model
def test_smollm2_answers(smol):
    _, model, tokenizer = smol
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "Paris" in tokenizer.decode(greedy(model, ids, 8))


@pytest.mark.slow
def test_gemma3():
    found = source("gemma3_270m")
    model, tokenizer = load(found), load_tokenizer(found)
    assert [group.window for group in model.groups] == [None, 512]
    for prompt in PROMPTS:
        agree(model, "gemma3_270m", tokenizer.encode(prompt))
    same_continuation(model, "gemma3_270m", tokenizer.encode(PROMPTS[0]), 16)
    long = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 60)
    assert len(long) > 512
    with torch.no_grad():
        expected = reference("gemma3_270m")(torch.tensor([long]), use_cache=False).logits[0, -40:]
    session = Session(model)
    session.step([long[:300]])
    ours = session.step([long[300:]])[0][-40:]
    torch.testing.assert_close(ours, expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2_135m", "gemma3_270m"])
def test_the_reference_is_what_transformers_reads(name):
    import transformers

    found: ModelSource = source(name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        found.gguf.parent, gguf_file=found.gguf.name, dtype=torch.float32
    ).state_dict()
    ours = reference(name).state_dict()
    assert theirs.keys() == ours.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-6, rtol=0)

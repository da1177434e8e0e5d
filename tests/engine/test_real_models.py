"""Greedy ids of the real models equal transformers', alone and many at once.

transformers is asked after the fact: one pass over prompt and answer must have each of our tokens as its best. By
induction that is what its own greedy search would have produced. Where its best two are closer than 1e-3, either may
be taken: sums of fp32 differ a little with the shape of a batch.
"""

from __future__ import annotations

import pytest
import torch

from core import LLM
from tests.models.real import reference

STEM = (
    "A page table maps the tokens of a sequence to the pages that hold their keys and values. When a request ends, its "
    "pages are free again; when two requests begin alike, they may read the same ones. "
)
TEXTS = [
    "The", "1, 2, 3, 4,", "Once upon a time", "def quicksort(items):\n", "Q: What is the capital of France?\nA:",
    "Zutaten: 200 g Mehl,", "SELECT name FROM", "La vie est", "The quick brown fox", "import torch\n",
    "Dear Sir or Madam,\n", "🙂 means", "e = mc", "To be, or not to be,", "| a | b |\n|---|---|\n",
    *[STEM * n + "In short," for n in (1, 2, 3, 4, 5)],
]  # fmt: skip
LONG = STEM * 16


def _agrees(name: str, prompts: list[list[int]], answers: list[list[int]]) -> None:
    compared = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = reference(name)(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        for position, token in enumerate(answer):
            first, second = best.values[position].tolist()
            if first - second > 1e-3:
                assert token == best.indices[position, 0], (prompt, position)
                compared += 1
    assert compared > 0.95 * sum(map(len, answers))


def _answers(llm: LLM, prompts: list[list[int]], at_once: int) -> list[list[int]]:
    answers = []
    for start in range(0, len(prompts), at_once):
        found = llm.generate(prompts[start : start + at_once], temperature=0, max_tokens=64, ignore_eos=True)
        assert all(result.finish_reason == "length" and len(result.token_ids) == 64 for result in found)
        answers += [result.token_ids for result in found]
        llm.engine.check()
    return answers


def _both_ways(model: str, texts: list[str], n_alone: int) -> None:
    with LLM(recipe="premium_chat", overrides=[f"model={model}", "engine.max_model_len=2048"]) as llm:
        prompts = [llm.tokenizer.encode(text) for text in texts]
        at_once = _answers(llm, prompts, 16)
        _agrees(model, prompts, at_once)
        assert llm.stats()["last_step"]["running"] == 0
        _agrees(model, prompts[-n_alone:], _answers(llm, prompts[-n_alone:], 1))


@pytest.mark.model
@pytest.mark.timeout(900)
def test_smollm2_sixteen_at_once_and_some_alone() -> None:
    _both_ways("smollm2_135m", TEXTS, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", ["smollm2_135m", "gemma3_270m"])
def test_all_alone_and_sixteen_at_once_and_past_a_window(model: str) -> None:
    _both_ways(model, [*TEXTS, LONG], len(TEXTS) + 1)


@pytest.mark.slow
def test_lossless_recipes_give_the_same_tokens() -> None:
    found = []
    for recipe in ("baseline", "premium_chat"):
        with LLM(recipe=recipe) as llm:
            found.append([r.token_ids for r in llm.generate(TEXTS[:4], temperature=0, max_tokens=16)])
    assert found[0] == found[1]

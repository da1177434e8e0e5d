"""Decoding beside transformers' `generate`, in one run: same weights in fp32, same prompts, same threads, in turn.

python -m pytest benchmarks/engine/test_against_transformers.py -s
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch

from core import LLM
from tests.models.real import reference

ROUNDS, TOKENS = 5, 48
PROMPTS = [[(7919 * (i + 1) * (n + 3)) % 40_000 + 100 for i in range(96 + 8 * n)] for n in range(16)]
WORDS = ["scheduler=continuous", "drafter=none", "prefix_cache=none", "engine.max_model_len=1024"]


def _transformers(prompts: list[list[int]]) -> None:
    longest = max(map(len, prompts))
    ids = torch.tensor([[2] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    with torch.inference_mode():
        out = reference("smollm2_135m").generate(
            ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=2
        )
    assert out.shape[1] == longest + TOKENS


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


@pytest.mark.model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n_prompts", [1, 16])
def test_not_slower_than_transformers(n_prompts: int) -> None:
    prompts = PROMPTS[:n_prompts]
    with LLM(recipe="premium_chat", overrides=WORDS) as llm:

        def ours() -> None:
            llm.generate(prompts, temperature=0, max_tokens=TOKENS, ignore_eos=True)

        def theirs() -> None:
            _transformers(prompts)

        ours(), theirs()
        pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(ROUNDS)]
    ratios = [b / a for a, b in pairs]
    tokens = n_prompts * TOKENS
    print(
        f"\n{n_prompts} prompts, {torch.get_num_threads()} threads: "
        f"ours {tokens / statistics.median(a for a, _ in pairs):.1f} tokens/s, "
        f"transformers {tokens / statistics.median(b for _, b in pairs):.1f}; "
        f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )
    assert statistics.median(ratios) >= 1.0

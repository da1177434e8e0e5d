"""Seeds, distributions and penalties, judged by scipy and by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from scipy import stats

from core.sampling import Sampler, token_logprobs, verify
from core.types import Draft, SamplingParams
from tests.engine.toy import VOCAB, ToyModel, drain, outputs, request, toy_engine

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -3.0])


def _sampler(params: SamplingParams, seed: int = 0, prompt: tuple[int, ...] = (0,)) -> Sampler:
    return Sampler(params, seed, 0, list(prompt), len(prompt), frozenset())


def _expected(temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """By definition, in plain Python."""
    p = [math.exp(x / temperature) for x in LOGITS.tolist()]
    p = [x / sum(p) for x in p]
    p = [x if x >= min_p * max(p) else 0.0 for x in p]
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if top_k:
        p = [x if i in order[:top_k] else 0.0 for i, x in enumerate(p)]
    p = [x / sum(p) for x in p]
    kept, total = set(), 0.0
    for i in order:
        if total >= top_p:
            break
        kept.add(i)
        total += p[i]
    p = [x if i in kept else 0.0 for i, x in enumerate(p)]
    return [x / sum(p) for x in p]


CASES = [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 6, 0.9, 0.1)]
PROPOSALS = {
    "none": None,
    "flat": torch.full((8,), 1 / 8),
    "peaked": torch.tensor([0.0, 0.0, 0.05, 0.05, 0.1, 0.1, 0.1, 0.6]),
    "missing": torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0]),
    "chosen": "chosen",
}


@pytest.mark.parametrize(
    ("case", "proposal"),
    [(CASES[0], "none"), (CASES[2], "none"), (CASES[0], "flat"), (CASES[1], "peaked"), (CASES[3], "missing"),
     (CASES[2], "peaked"), (CASES[3], "chosen")],
    ids=str,
)  # fmt: skip
def test_twenty_thousand_draws_follow_the_target(case: tuple, proposal: str) -> None:
    temperature, top_k, top_p, min_p = case
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    q = PROPOSALS[proposal]
    drawn = torch.multinomial(q, 20_000, True, generator=torch.Generator().manual_seed(1)) if torch.is_tensor(q) else []
    counts: Counter[int] = Counter()
    for seed in range(20_000):
        draft = Draft()
        if proposal == "chosen":
            draft = Draft((2,))
        elif torch.is_tensor(q):
            draft = Draft((int(drawn[seed]),), q[None])
        rows = LOGITS.expand(1 + len(draft.tokens), -1)
        counts[verify(rows, [_sampler(params, seed)], [draft])[0].tokens[0]] += 1
    expected = _expected(*case)
    assert not any(counts[i] for i, p in enumerate(expected) if p == 0)
    kept = [i for i, p in enumerate(expected) if p > 0]
    result = stats.chisquare([counts[i] for i in kept], [20_000 * expected[i] for i in kept])
    assert result.pvalue > 0.001


def test_drafting_changes_no_seeded_text() -> None:
    plain, drafted = toy_engine(drafter="none"), toy_engine(drafter="ngram")
    for engine in (plain, drafted):
        for seed in range(6):
            engine.add(request([1, 2, 3, 1, 2, 3, 1, 2], id=f"s{seed}", seed=seed, temperature=0.6, max_tokens=30))
    assert outputs(drain(plain)) == outputs(drain(drafted))
    assert sum(drafted.stats()["accepted"]) > 0


def test_a_seed_gives_the_same_text_whatever_its_neighbours() -> None:
    model = ToyModel()

    def text(neighbours: list[dict], **parts: object) -> list[int]:
        engine = toy_engine(model, **parts)  # type: ignore[arg-type]
        for extra in neighbours:
            engine.add(request([9, 8, 7, 6, 5], **extra))
        engine.add(request([5, 4, 3], id="mine", seed=42, temperature=0.8, max_tokens=16))
        return outputs(drain(engine))["mine", 0]

    alone = text([])
    assert alone == text([{"temperature": 1.0}])
    assert alone == text([{"temperature": 1.0, "seed": 42}, {"temperature": 0.5, "max_tokens": 2}])
    assert alone == text([{"temperature": 1.0}] * 7)
    assert alone == text([{"temperature": 1.0, "max_tokens": 40}] * 3, kv_tokens=96, cache="radix")


def test_unseeded_requests_differ_and_leave_the_global_state_alone() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    texts = []
    engine = toy_engine()
    for i in range(2):
        engine.add(request([5, 4, 3], id=f"u{i}", temperature=1.0, max_tokens=16))
    found = outputs(drain(engine))
    texts = [found["u0", 0], found["u1", 0]]
    assert texts[0] != texts[1]
    assert torch.equal(before, torch.random.get_rng_state())


def test_choices_of_one_seed_differ_and_repeat() -> None:
    def choices() -> list[list[int]]:
        engine = toy_engine()
        engine.add(request([5, 4, 3], id="n", n=3, seed=7, temperature=1.0, max_tokens=8))
        found = outputs(drain(engine))
        return [found["n", i] for i in range(3)]

    first = choices()
    assert first == choices()
    assert len({tuple(c) for c in first}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1e-8, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    found = verify(LOGITS[None] * 3, [_sampler(SamplingParams(temperature=temperature))], [Draft()])
    assert found[0].tokens == (0,)


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_filters_at_their_narrowest_are_greedy(params: dict) -> None:
    for seed in range(50):
        sampler = _sampler(SamplingParams(temperature=2.0, **params), seed)
        assert verify(LOGITS[None], [sampler], [Draft()])[0].tokens == (0,)


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 1])
def test_top_k_beyond_the_vocabulary_filters_nothing(top_k: int) -> None:
    weights = torch.from_numpy(_sampler(SamplingParams(top_k=top_k)).weights(LOGITS.numpy()))
    assert torch.allclose(weights / weights.sum(), torch.softmax(LOGITS, -1))


def test_penalties_as_openai_and_ctrl_define_them() -> None:
    tokens = [3, 3, 5, 5, 5, 1]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2.0, logit_bias={7: 4.0})
    sampler = Sampler(params, 0, 0, tokens, 2, frozenset())
    expected = LOGITS.clone()
    expected[7] += 4.0
    for i in (1, 3, 5):
        expected[i] = expected[i] / 2 if expected[i] > 0 else expected[i] * 2
    expected[5] -= 3 * 0.25 + 0.5
    expected[1] -= 0.25 + 0.5
    assert torch.allclose(torch.from_numpy(sampler.adjust(LOGITS.numpy())), expected)
    expected[1] -= 0.25
    assert torch.allclose(torch.from_numpy(sampler.adjust(LOGITS.numpy(), [1])), expected)


def test_penalties_are_the_same_with_and_without_drafts() -> None:
    found = []
    for drafter in ("none", "ngram"):
        engine = toy_engine(drafter=drafter)
        extras: list[dict] = [{"frequency_penalty": 1.5}, {"presence_penalty": -2.0}, {"repetition_penalty": 1.3}]
        for i, extra in enumerate(extras):
            engine.add(request([1, 2, 3, 1, 2, 3], id=f"p{i}", max_tokens=24, **extra))
        engine.add(request([1, 2, 3, 1, 2, 3], id="greedy", max_tokens=24))
        found.append(outputs(drain(engine)))
    assert found[0] == found[1]
    alone = toy_engine()
    alone.add(request([1, 2, 3, 1, 2, 3], id="greedy", max_tokens=24))
    assert outputs(drain(alone))["greedy", 0] == found[0]["greedy", 0]


def test_logprobs_are_log_softmax_and_finite() -> None:
    logits = torch.tensor([[0.0, 100.0, -20000.0]])
    found = token_logprobs(logits, [2], 3)[0]
    assert found.logprob == -9999.0
    assert [token for token, _ in found.top] == [1, 0, 2]
    assert found.top[0][1] == pytest.approx(0.0) and found.top[1][1] == pytest.approx(-100.0)


def test_not_a_number_ends_only_its_own_row() -> None:
    rows = torch.stack([LOGITS, torch.full((8,), float("nan"))])
    good, bad = verify(rows, [_sampler(SamplingParams(temperature=0.0))] * 2, [Draft(), Draft()])
    assert good.tokens == (0,) and good.finite and not bad.finite

"""What a prefix cache hands back is served only where it belongs, and gives what computing it would."""

from __future__ import annotations

import pytest
import torch

from core.types import InvalidRequest, Match, SamplingParams
from tests.engine.toy import VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

PROMPTS = [[(3 * i + 11 * n) % VOCAB for i in range(40)] for n in range(4)]


def _foreign(cache, right, mine, theirs):
    """What a broken cache may answer `mine` with: another prompt's pages, pages in the wrong order, one page twice,
    more pages than there are tokens, a page nobody cached."""
    own, other = right(mine, "").pages, right(theirs, "").pages
    return {
        "another prompt's": other,
        "out of order": own[::-1],
        "twice": (own[0], own[0]),
        "too many": own + other,
        "not cached": (own[0], max(own + other) + 1),
    }


@pytest.mark.parametrize("wrong", ["another prompt's", "out of order", "twice", "too many", "not cached"])
@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("allocator", ["paged", "paged_per_head"])
def test_a_foreign_page_ends_its_request_and_is_never_served(allocator: str, cache: str, wrong: str) -> None:
    engine = toy_engine(cache=cache, allocator=allocator)
    expected = generate(engine, PROMPTS[:2])
    right = engine.memory.cache.match
    pages = _foreign(cache, right, PROMPTS[0], PROMPTS[1])[wrong]
    engine.memory.cache.match = lambda tokens, salt: (
        Match(pages, right(tokens, salt).handle) if tokens[:40] == PROMPTS[0] else right(tokens, salt)
    )
    for id, prompt in (("victim", PROMPTS[0]), ("neighbour", PROMPTS[1])):
        engine.add(request(prompt, id=id))
    events = drain(engine)
    errors = {event.id: event.error for event in events if event.error}
    assert errors.keys() == {"victim"} and f"prefix_cache '{cache}'" in errors["victim"]
    assert outputs(events)["neighbour", 0] == expected[1] and not outputs(events)["victim", 0]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_salt_that_is_forgotten_is_found_out(cache: str) -> None:
    engine = toy_engine(cache=cache)
    right = engine.memory.cache.match
    engine.memory.cache.match = lambda tokens, salt: right(tokens, "")
    generate(engine, [PROMPTS[0]])
    engine.add(request(PROMPTS[0], salt="mine"))
    assert "a salt that are not its own" in (drain(engine)[-1].error or "")


def test_a_cache_that_cannot_say_what_it_has_stops_nobody() -> None:
    engine = toy_engine(cache="radix", scheduler="cache_aware")
    engine.memory.cache.peek = lambda tokens, salt: 1 // 0
    expected = generate(toy_engine(), PROMPTS)
    assert [generate(engine, PROMPTS) for _ in range(2)] == [expected] * 2
    assert engine.stats()["prefix_cache"]["hit_tokens"] > 0


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("kind", [(None, None), (8, None)], ids=str)
def test_log_probabilities_are_the_same_cold_and_cached_and_under_evictions(cache: str, kind: tuple) -> None:
    def run(engine):
        items = [
            request(prompt, max_tokens=6, logprobs=5)
            for prompt in (PROMPTS[0], PROMPTS[0], [*PROMPTS[0], 3], [*PROMPTS[0][:15], 4], [*PROMPTS[0][:16], 4])
        ]
        found = []
        for item in items:
            engine.add(item)
            for other in PROMPTS[1:]:
                engine.add(request(other, max_tokens=3))
            events = drain(engine)
            found.append([record for event in events if event.id == item.id for record in event.logprobs])
        return found

    cold = run(toy_engine(ToyModel(kind)))
    engine = toy_engine(ToyModel(kind), cache=cache, kv_tokens=150)
    warm = run(engine)
    assert engine.stats()["prefix_cache"]["hit_tokens"] and engine.stats()["prefix_cache"]["evicted_pages"]
    for one, other in zip(cold, warm, strict=True):
        assert [record.token for record in one] == [record.token for record in other]
        for a, b in zip(one, other, strict=True):
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            torch.testing.assert_close(
                torch.tensor([logprob for _, logprob in a.top]), torch.tensor([logprob for _, logprob in b.top]),
                atol=1e-4, rtol=0,
            )  # fmt: skip


@pytest.mark.parametrize("kv", ["int8", "fp8_e4m3", "int4"])
@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("allocator", ["paged", "paged_per_head", "tiered"])
def test_pages_in_a_format_are_used_again_with_their_scales(allocator: str, cache: str, kv: str) -> None:
    """Chunks of whole pages, so that int4's tails are whole in each step as well."""
    parts = {"kv": kv, "allocator": allocator, "budget": 16, "kv_tokens": 1024}
    expected = [generate(toy_engine(**parts), [prompt])[0] for prompt in PROMPTS]
    engine = toy_engine(cache=cache, **parts)
    for _ in range(2):
        assert [generate(engine, [prompt])[0] for prompt in PROMPTS] == expected
    assert engine.stats()["prefix_cache"]["hit_tokens"] >= 4 * 36


@pytest.mark.parametrize("kv", ["none", "int8", "fp8_e4m3", "int4"])
def test_a_fork_leaves_its_parents_page_as_it_is(kv: str) -> None:
    engine = toy_engine(kv=kv, page_size=16, kv_tokens=2048, budget=64)
    engine.add(request(PROMPTS[0][:23], id="a", n=2, max_tokens=20, temperature=1.0, seed=4))
    while len(engine.running) < 2 or engine.running[1].num_output < 3:
        engine.step()
    parent, child = engine.running
    shared, own = (seq.tables[0].pages[1] for seq in (parent, child))
    assert shared != own and parent.tables[0].pages[0] == child.tables[0].pages[0]
    for layer in engine.memory.groups[0].pool.layers.values():
        keys = [layer.quantizer.read(layer.storage, torch.tensor([page]), 7)[0] for page in (shared, own)]
        torch.testing.assert_close(keys[0][:6], keys[1][:6], atol=0, rtol=0)
    drain(engine)


def test_one_whose_window_alone_exceeds_the_pool_is_refused_with_both_numbers() -> None:
    engine = toy_engine(ToyModel((40, 40)), kv_tokens=32, max_model_len=128)
    with pytest.raises(InvalidRequest, match=r"pages of 4.*has 8 pages, 32 tokens"):
        engine.add(request([1] * 60, max_tokens=20))
    engine.add(request([1] * 20, max_tokens=8))
    assert len(outputs(drain(engine)).popitem()[1]) == 8


@pytest.mark.parametrize("allocator", ["contiguous", "paged", "paged_per_head", "tiered"])
def test_one_that_can_never_fit_is_refused_before_it_waits(allocator: str) -> None:
    engine = toy_engine(allocator=allocator, kv_tokens=32, max_model_len=128)
    with pytest.raises(InvalidRequest, match=r"60 tokens.*15 pages.*8 pages") as caught:
        engine.add(request([1] * 40, max_tokens=20))
    assert caught.value.param == "max_tokens" and not engine.has_work


def test_a_prediction_does_not_make_room() -> None:
    """Only what may become of a request counts for whether it fits, not what its caller expects."""
    engine = toy_engine(kv_tokens=32, max_model_len=128)
    with pytest.raises(InvalidRequest, match="60 tokens"):
        engine.add(request([1] * 40, max_tokens=20, predicted_tokens=1))
    assert SamplingParams(predicted_tokens=0).predicted_tokens == 0

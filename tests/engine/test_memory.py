"""Preemption, sharing, windows and forks: who holds which page."""

from __future__ import annotations

import pytest

from core.kv import window_pages
from core.recipe import RecipeError
from tests.engine.toy import VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

PROMPTS = [[(3 * i + 11 * n) % VOCAB for i in range(40)] for n in range(6)]
EXTRAS = [
    {},
    {"seed": 5, "temperature": 0.9},
    {"frequency_penalty": 0.8},
    {"logprobs": 2},
    {"n": 2},
    {"prompt_logprobs": 1, "logprobs": 1},
]


def _run(kv_tokens: int, **parts: object) -> tuple[dict, dict, int]:
    engine = toy_engine(kv_tokens=kv_tokens, budget=24, **parts)  # type: ignore[arg-type]
    for i, (prompt, extra) in enumerate(zip(PROMPTS, EXTRAS, strict=True)):
        engine.add(request(prompt, id=str(i), max_tokens=60, **extra))
    events = drain(engine)
    logprobs: dict = {}
    for event in events:
        entry = logprobs.setdefault((event.id, event.index), [[], None, None])
        entry[0] += [e.token for e in event.logprobs]
        entry[1] = event.finish_reason or entry[1]
        entry[2] = [e and e.token for e in event.prompt_logprobs] if event.prompt_logprobs else entry[2]
    return outputs(events), logprobs, engine.stats()["preemptions"]


@pytest.mark.parametrize("cache", ["none", "radix"])
@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_preemption_changes_nothing(cache: str, drafter: str) -> None:
    plenty = _run(2048, cache=cache, drafter=drafter)
    scarce = _run(240, cache=cache, drafter=drafter)
    assert plenty[2] == 0 and scarce[2] >= 3
    assert scarce[:2] == plenty[:2]
    assert all(len(tokens) == 60 for tokens in scarce[0].values())


def test_a_preempted_sequence_is_prefilled_in_chunks_and_sampled_once() -> None:
    engine = toy_engine(budget=7, drafter="none")
    expected = generate(toy_engine(), [PROMPTS[0]], max_tokens=20)[0]
    item, other = request(PROMPTS[0], max_tokens=20), request(PROMPTS[1], max_tokens=40)
    engine.add(item)
    engine.add(other)
    events = []
    while len(outputs(events).get((item.id, 0), ())) < 5:
        events += engine.step()
    engine.preempt(next(seq for seq in engine.running if seq.request is item))
    before = len(outputs(events)[item.id, 0])
    for _ in range(3):
        events += engine.step()
    assert len(outputs(events)[item.id, 0]) == before
    assert outputs(events + drain(engine))[item.id, 0] == expected


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_prompt_cached_whole_still_computes_a_token(cache: str, length: int) -> None:
    prompt = PROMPTS[0][:length] if length <= 40 else PROMPTS[0]
    expected = generate(toy_engine(), [prompt], max_tokens=8)[0]
    engine = toy_engine(cache=cache, page_size=16, budget=16)
    for times in (1, 1, 2):
        items = [request(prompt, max_tokens=8) for _ in range(times)]
        for item in items:
            engine.add(item)
        events = drain(engine)
        for item in items:
            assert outputs(events)[item.id, 0] == expected
            cached = next(e.cached_tokens for e in events if e.id == item.id)
            assert cached <= length - 1
    assert cached == (length - 1) // 16 * 16


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_salt_keeps_its_prefix_to_itself(cache: str) -> None:
    engine = toy_engine(cache=cache)

    def cached(salt: str) -> int:
        item = request(PROMPTS[0], salt=salt)
        engine.add(item)
        return drain(engine)[0].cached_tokens

    assert [cached(s) for s in ("a", "b", "a", "b", "", "")] == [0, 0, 36, 36, 0, 36]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_generated_tokens_are_cached_too(cache: str) -> None:
    engine = toy_engine(cache=cache)
    answer = generate(engine, [PROMPTS[0]], max_tokens=20)[0]
    follow_up = request([*PROMPTS[0], *answer, 1, 2])
    engine.add(follow_up)
    assert drain(engine)[0].cached_tokens >= 56


@pytest.mark.parametrize("cache", ["none", "radix"])
@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_window_layers_hold_at_most_their_window(cache: str, allocator: str, page_size: int) -> None:
    window, k = 8, 3
    engine = toy_engine(
        ToyModel((None, window)), cache=cache, allocator=allocator, page_size=page_size, budget=16, kv_tokens=1024
    )
    engine.add(request(PROMPTS[0], max_tokens=80))
    seen = 0
    while engine.has_work:
        decoding = bool(engine.running) and all(seq.remaining == 1 for seq in engine.running)
        engine.step()
        engine.check()
        for seq in engine.running:
            step = 1 + k if decoding else 16
            assert len(seq.tables[1]) <= window_pages(window, step, page_size)
            assert seq.tables[1].start + len(seq.tables[1]) * page_size >= seq.num_computed
            seen = max(seen, seq.tables[1].start)
    assert seen > 64


@pytest.mark.parametrize("model", [(None, None), (8, None), (8, 8)], ids=str)
@pytest.mark.parametrize("allocator", ["paged", "contiguous"])
def test_forks_share_the_prompt_and_copy_on_write(model: tuple, allocator: str) -> None:
    engine = toy_engine(ToyModel(model), allocator=allocator, page_size=16, kv_tokens=2048)
    item = request(PROMPTS[0][:39], n=4, max_tokens=10, temperature=1.0, seed=3)
    engine.add(item)
    shared = 0
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
        shared = max(shared, max(engine.memory.groups[0].references))
    assert shared == 4
    assert engine.counters.computed_tokens <= 39 + 4 * 10
    single = []
    for index in range(4):
        alone = toy_engine(ToyModel(model))
        alone.add(request(item.prompt, id="x", n=index + 1, max_tokens=10, temperature=1.0, seed=3))
        single.append(outputs(drain(alone))["x", index])
    assert [outputs(events)[item.id, i] for i in range(4)] == single


def test_memory_of_ended_requests_is_free_or_cached() -> None:
    engine = toy_engine(cache="radix", kv_tokens=256)
    for round in range(30):
        engine.add(request([(round * 7 + i) % VOCAB for i in range(30)], id=f"{round}", max_tokens=20))
        for _ in range(round % 5):
            engine.step()
        if round % 3:
            engine.abort(f"{round}")
    drain(engine)
    stats = engine.stats()["kv"]["full"]
    assert stats["held"] == 0 and stats["free"] + stats["cached"] == stats["pages"]
    assert engine.stats()["prefix_cache"]["evicted_pages"] > 0


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_run_that_only_fits_where_its_own_prefix_lies(cache: str) -> None:
    prompt = list(range(8))
    expected = generate(toy_engine(), [prompt], max_tokens=24)[0]
    engine = toy_engine(allocator="contiguous", cache=cache, page_size=4, kv_tokens=32, max_model_len=32)
    engine.add(request([9, 9, 9], max_tokens=6))
    engine.add(request(prompt, max_tokens=5))  # its pages lie in the middle of the pool, and stay cached
    drain(engine)
    item = request(prompt, max_tokens=24)
    engine.add(item)
    assert outputs(drain(engine, steps=60))[item.id, 0] == expected


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_hits_are_counted_once_however_long_a_sequence_waits(cache: str) -> None:
    prompt = PROMPTS[0][:16]
    engine = toy_engine(cache=cache, page_size=4, kv_tokens=48, budget=16)
    generate(engine, [prompt], max_tokens=1)
    engine.add(request(PROMPTS[1][:8], max_tokens=32))
    for _ in range(24):
        engine.step()
    before = engine.stats()["prefix_cache"]
    item = request([*prompt, *PROMPTS[2][:16]], max_tokens=8)
    engine.add(item)
    engine.step()
    assert engine.stats()["waiting"] == 1
    events = drain(engine)
    after = engine.stats()["prefix_cache"]
    cached = next(event.cached_tokens for event in events if event.id == item.id)
    assert after["lookups"] - before["lookups"] == 1
    assert after["lookup_tokens"] - before["lookup_tokens"] == 32
    assert after["hit_tokens"] - before["hit_tokens"] == cached


def test_too_little_memory_is_told_with_all_that_a_page_takes() -> None:
    with pytest.raises(RecipeError, match=r"4,096 bytes, but a page of 4 tokens takes [\d,]+ beside [\d,]+ for all"):
        toy_engine(kv="int4", kv_tokens=16)


def _waiting_forks():
    """Two choices that wait, holding pages of the prompt that the first one has computed, and no page is free."""
    engine = toy_engine(scheduler="static", running=2, kv_tokens=68, budget=64)
    engine.add(request(PROMPTS[0][:17], id="a", n=3, max_tokens=30))
    engine.add(request(PROMPTS[1], id="other", max_tokens=2))
    while engine.stats()["kv"]["full"]["free"] > 2 or len(engine.memory.forks) < 2:
        engine.step()
    free = engine.memory.groups[0].allocate(engine.memory.groups[0].allocator.n_free * 4, 0)
    return engine, [seq for seq in engine.waiting if seq.id in engine.memory.forks], free


def test_a_fork_is_not_dropped_for_itself() -> None:
    engine, (one, other), taken = _waiting_forks()
    assert not engine.memory.admit(one)
    assert list(engine.memory.forks) == [one.id] and one.num_computed == 16
    assert len(one.tables[0].pages) == 4 and not other.tables[0].pages
    engine.memory.groups[0].free(taken)
    engine.check()
    assert len(outputs(drain(engine))["a", 1]) == 30


def test_a_fork_that_only_fits_where_its_own_pages_lie_starts_over() -> None:
    prompt = PROMPTS[0][:9]
    engine = toy_engine(allocator="contiguous", running=1, kv_tokens=48, max_model_len=40)
    engine.add(request([1, 2, 3], id="before", max_tokens=4))
    engine.add(request(prompt, id="a", n=2, max_tokens=28))
    expected = generate(toy_engine(), [prompt], max_tokens=28)[0]
    found = outputs(drain(engine, steps=200))
    assert found["a", 0] == found["a", 1] == expected


@pytest.mark.parametrize("verb", ["share", "free"])
def test_an_allocator_that_raises_ends_those_it_concerns_only(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(cache="none", budget=64)
    expected = generate(toy_engine(), [PROMPTS[1]], max_tokens=20)[0]
    engine.add(request(PROMPTS[1], id="neighbour", max_tokens=20))
    engine.add(request(PROMPTS[0][:18], id="a", n=2, max_tokens=6))
    allocator = engine.memory.groups[0].allocator
    right = getattr(allocator, verb)
    monkeypatch.setattr(allocator, verb, lambda pages: 1 / 0 if len(pages) > 1 else right(pages))
    events = []
    for _ in range(12):
        events += engine.step()
    monkeypatch.undo()
    events += drain(engine, check=False)
    assert outputs(events)["neighbour", 0] == expected
    errors = {(event.id, event.index): event.error for event in events if event.error}
    if verb == "share":
        assert list(errors) == [("a", 1)] and "'paged'" in errors["a", 1] and "ZeroDivisionError" in errors["a", 1]
        engine.check()
    else:
        assert not errors and len(outputs(events)["a", 1]) == 6

"""What is refused, what is clamped, and how requests end."""

from __future__ import annotations

import pytest
import torch

from core.types import InvalidRequest, QueueFull, SamplingParams
from tests.engine.toy import NULL, VOCAB, ToyModel, drain, generate, outputs, request, toy_engine

PROMPT = [5, 9, 2, 44, 7, 1, 30]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", -0.1), ("temperature", 2.1),
        ("temperature", "0.5"), ("temperature", True), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5),
        ("min_p", -0.1), ("min_p", 1.1), ("n", 0), ("n", -1), ("n", 10**6), ("n", 2**31), ("n", True),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("max_tokens", -1), ("max_tokens", 2.0), ("min_tokens", -1),
        ("stop", ("",)), ("stop", tuple("ab" * 50)), ("stop_token_ids", (-1,)), ("logit_bias", {0: 1e9}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {i: 0.0 for i in range(2000)}), ("logprobs", 21), ("logprobs", -1),
        ("prompt_logprobs", -1), ("predicted_tokens", -1), ("predicted_tokens", "9"),
        ("presence_penalty", 2.5), ("frequency_penalty", -2.5), ("repetition_penalty", 0.0),
    ],
    ids=str,
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field and field in str(caught.value)


def test_what_a_request_is_expected_to_generate_orders_it_and_changes_nothing() -> None:
    expected = generate(toy_engine(), [PROMPT, PROMPT[:5]], max_tokens=20)
    engine = toy_engine(scheduler="shortest_first", running=1)
    for id, prompt, predicted in (("long", PROMPT, None), ("short", PROMPT[:5], 2), ("never", PROMPT, 10**18)):
        engine.add(request(prompt, id=id, max_tokens=20, predicted_tokens=predicted))
    events = drain(engine)
    ended = [event.id for event in events if event.finish_reason]
    assert ended[0] == "short" and ended[1:] == ["long", "never"]
    found = outputs(events)
    assert [found[id, 0] for id in ("long", "short", "never")] == [*expected, expected[0]]


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize("bad", [[VOCAB], [-1], [2**63], [1.5], [True]], ids=str)
def test_ids_outside_the_vocabulary_are_refused_beside_a_neighbour(bad: list) -> None:
    engine = toy_engine()
    expected = generate(toy_engine(), [PROMPT])
    good = request(PROMPT)
    engine.add(good)
    for make in (lambda: request(bad), lambda: request([1], stop_token_ids=(VOCAB,)),
                 lambda: request([1], logit_bias={VOCAB: 1.0})):
        with pytest.raises(InvalidRequest):
            engine.add(make())
    assert outputs(drain(engine))[good.id, 0] == expected[0]


@pytest.mark.parametrize("n_prompt", [62, 63, 64, 65, 256])
@pytest.mark.parametrize("max_tokens", [1, 64, 2**31 - 1, 10**18, None])
def test_the_context_limit(n_prompt: int, max_tokens: int | None) -> None:
    engine = toy_engine(max_model_len=64)
    item = request([1] * n_prompt, max_tokens=max_tokens)
    if n_prompt >= 64:
        with pytest.raises(InvalidRequest, match=rf"{n_prompt}.*64"):
            engine.add(item)
        assert not engine.has_work
        return
    engine.add(item)
    events = drain(engine)
    assert len(outputs(events)[item.id, 0]) == min(64 - n_prompt, max_tokens or 64)
    assert events[-1].finish_reason == "length"


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    engine = toy_engine(kv_tokens=32, page_size=4, max_model_len=128)
    with pytest.raises(InvalidRequest, match=r"60 tokens.*15 pages.*8 pages"):
        engine.add(request([1] * 40, max_tokens=20))
    engine.add(request([1] * 12, max_tokens=20))
    assert len(outputs(drain(engine)).popitem()[1]) == 20


def test_a_full_queue() -> None:
    engine = toy_engine(max_waiting=3)
    for _ in range(3):
        engine.add(request(PROMPT))
    with pytest.raises(QueueFull):
        engine.add(request(PROMPT))
    assert len(outputs(drain(engine))) == 3


@pytest.mark.parametrize("n", [1, 3])
def test_no_tokens_asked_for(n: int) -> None:
    engine = toy_engine()
    engine.add(request(PROMPT, id="plain", max_tokens=0, n=n))
    engine.add(request(PROMPT, id="scored", max_tokens=0, prompt_logprobs=1, n=n))
    ends = {(event.id, event.index): event for event in drain(engine)}
    assert ends.keys() == {(id, index) for id in ("plain", "scored") for index in range(n)}
    assert all(event.tokens == () and event.finish_reason == "length" for event in ends.values())
    assert len(ends["scored", 0].prompt_logprobs or ()) == len(PROMPT)


def test_one_live_id_at_a_time() -> None:
    engine = toy_engine()
    engine.add(request(PROMPT, id="a"))
    with pytest.raises(InvalidRequest, match="live"):
        engine.add(request([1], id="a"))
    drain(engine)
    engine.add(request(PROMPT, id="a"))
    drain(engine)


def test_aborts_while_waiting_running_twice_unknown_and_late() -> None:
    engine = toy_engine(running=1)
    for id in "abc":
        engine.add(request(PROMPT, id=id, max_tokens=30))
    events = [event for _ in range(3) for event in engine.step()]
    for id in ("b", "a", "b", "unknown"):
        engine.abort(id)
    events += drain(engine)
    engine.abort("c")
    ends = {event.id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"a": "abort", "b": "abort", "c": "length"}
    assert not outputs(events)["b", 0]
    assert outputs(events)["c", 0] == generate(toy_engine(), [PROMPT], max_tokens=30)[0]
    assert engine.stats()["kv"]["full"]["held"] == 0


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("k", [1, 5])
def test_a_stop_token_anywhere_ends_there(drafter: str, k: int) -> None:
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    full = generate(toy_engine(), [prompt], max_tokens=30)[0]
    model = ToyModel()
    for position, token in enumerate(full):
        if token in full[:position]:
            continue
        engine = toy_engine(model, drafter=drafter, k=k)
        engine.add(request(prompt, id="stop", max_tokens=30, stop_token_ids=(token,)))
        events = drain(engine)
        assert outputs(events)["stop", 0] == full[: position + 1]
        assert events[-1].finish_reason == "stop" and events[-1].stop_token == token
        stats = engine.stats()
        assert stats["generated_tokens"] == position + 1
        assert all(a <= d for a, d in zip(stats["accepted"], stats["drafted"], strict=True))
        model.eos_token_ids = (token, next(i for i in range(VOCAB) if i not in full))
        engine = toy_engine(model, drafter=drafter, k=k)
        engine.add(request(prompt, id="eos", max_tokens=30))
        engine.add(request(prompt, id="ignored", max_tokens=30, ignore_eos=True))
        found = outputs(drain(engine))
        assert found["eos", 0] == full[: position + 1] and found["ignored", 0] == full
        model.eos_token_ids = ()


def test_min_tokens_masks_every_stop_and_counts_output_only() -> None:
    full = generate(toy_engine(), [PROMPT], max_tokens=12)[0]
    model = ToyModel()
    model.eos_token_ids = (full[0], full[1])
    for drafter in ("none", "ngram"):
        engine = toy_engine(model, drafter=drafter)
        item = request(PROMPT, min_tokens=5, max_tokens=12, stop_token_ids=(full[2],))
        engine.add(item)
        tokens = outputs(drain(engine))[item.id, 0]
        assert len(tokens) >= 5 and not {full[0], full[1], full[2]} & set(tokens[:5])


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_drafting_stays_within_max_tokens_and_the_context(max_tokens: int) -> None:
    for n_prompt in (1, 2, 57, 60, 63):
        prompt = ([1, 2, 3] * 30)[:n_prompt]
        found = [
            generate(toy_engine(drafter=drafter, k=5, max_model_len=64), [prompt], max_tokens=max_tokens)
            for drafter in ("none", "ngram")
        ]
        assert found[0] == found[1] and len(found[0][0]) == min(max_tokens, 64 - n_prompt)


@pytest.mark.parametrize("cache", ["none", "hash", "radix"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 16])
def test_prompt_logprobs_do_not_depend_on_chunks_or_caches(cache: str, extra: int) -> None:
    prompt = [(5 * i + i * i) % VOCAB for i in range(16 + extra)]

    def scores(engine, **params) -> list:
        item = request(prompt, max_tokens=1, prompt_logprobs=2, logprobs=2, **params)
        engine.add(item)
        return next(e.prompt_logprobs for e in drain(engine) if e.id == item.id and e.prompt_logprobs)

    whole = scores(toy_engine(**NULL, budget=512, kv_tokens=2048))
    assert whole[0] is None and len(whole) == len(prompt)
    assert [entry.token for entry in whole[1:]] == prompt[1:]
    engine = toy_engine(budget=16, cache=cache)
    generate(engine, [[*prompt[:8], 3, 3, 3]])
    for _ in range(2):
        again = scores(engine)
        assert [e.token for e in again[1:]] == prompt[1:]
        torch.testing.assert_close(
            torch.tensor([e.logprob for e in again[1:]]), torch.tensor([e.logprob for e in whole[1:]]),
            atol=1e-4, rtol=0,
        )

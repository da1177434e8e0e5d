"""Streams: the same text as whole answers, ends said once, usage when asked, errors as events."""

from __future__ import annotations

import json

import pytest

from tests.serve.harness import MODEL, Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def say(text: str, **script: object) -> str:
    return "[[" + json.dumps({"say": text, **script}) + "]]"


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def text_of(events: list, index: int = 0) -> str:
    pieces = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in pieces)


def ends(events: list, index: int = 0) -> list[str]:
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


@pytest.mark.parametrize("group", [1, 3, 50])
@pytest.mark.parametrize("stop", ["nor shine", "shine a", "§", "hin"])
def test_stop_strings_end_both_modes_alike(server: Running, group: int, stop: str):
    text = "rain nor shine and more words after it"
    prompt = say(text, group=group)
    whole = server.complete(prompt, max_tokens=200, stop=[stop], logprobs=1, return_token_ids=True).json()
    events = server.stream(TEXT, prompt=prompt, max_tokens=200, stop=[stop], stream_options={"include_usage": True})
    choice = whole["choices"][0]
    assert choice["text"] == text.partition(stop)[0] == text_of(events)
    assert choice["finish_reason"] == "stop"
    assert ends(events) == ["stop"]
    until_stop = len(text.partition(stop)[0]) + len(stop) if stop in text else len(text) + 1
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == until_stop
    assert whole["usage"]["completion_tokens"] == until_stop == events[-2]["usage"]["completion_tokens"]


def test_no_delta_holds_part_of_a_stop_string(server: Running):
    events = server.stream(CHAT, messages=user(say("one two three")), stop=["two three"])
    assert text_of(events) == "one "
    events = server.stream(CHAT, messages=user(say("one two three")), stop=["two three§"])
    assert text_of(events) == "one two three"


def test_a_stop_string_ends_the_engines_work(server: Running):
    before = server.metrics()["partwise_steps_total"]
    answer = server.complete("x", max_tokens=900, stop="hello world", ignore_eos=True).json()
    assert answer["choices"][0]["text"] == ""
    server.wait_for_metrics({"partwise_requests_running": 0})
    assert server.metrics()["partwise_steps_total"] - before < 100


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_usage_is_null_before_the_last_chunk_where_it_is_asked_for(server: Running, route: str):
    asked = {"messages": user("x")} if route == CHAT else {"prompt": "x"}
    *chunks, last, done = server.stream(route, max_tokens=5, stream_options={"include_usage": True}, **asked)
    assert done == "[DONE]" and last["usage"]["completion_tokens"] == 5 and last["choices"] == []
    assert len(chunks) >= 2 and all(chunk["usage"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in server.stream(route, max_tokens=5, **asked)[:-1])


def test_one_choices_stop_string_leaves_the_others_running(server: Running):
    events = server.stream(TEXT, prompt="x", n=3, max_tokens=8, stop=["never"], stream_options={"include_usage": True})
    assert events[-2]["usage"]["completion_tokens"] == 24
    whole = server.complete("x", n=3, max_tokens=20, stop=["world"]).json()
    assert [choice["text"] for choice in whole["choices"]] == ["hello "] * 3


@pytest.mark.parametrize("route", [CHAT, TEXT])
def test_each_choice_ends_once_and_done_is_last(server: Running, route: str):
    for prompt, reason in ((say("abc"), "stop"), ("no end", "length")):
        asked = {"messages": user(prompt)} if route == CHAT else {"prompt": prompt}
        events = server.stream(route, n=3, seed=1, max_tokens=5, **asked)
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        for index in range(3):
            assert ends(events, index) == [reason]
            last = [c for e in events[:-1] for c in e["choices"] if c["index"] == index][-1]
            assert last["finish_reason"] == reason


def test_usage_comes_when_asked_for_and_once(server: Running):
    prompt, n = user(say("abcdef")), 2
    for options in ({}, {"stream_options": {}}):
        events = server.stream(CHAT, messages=prompt, **options)
        assert not [event for event in events[:-1] if event.get("usage")]
    for n in (1, 2):
        events = server.stream(CHAT, messages=prompt, n=n, stream_options={"include_usage": True})
        with_usage = [event for event in events[:-1] if event.get("usage")]
        assert with_usage == [events[-2]]
        assert events[-2]["choices"] == []
        whole = server.chat(prompt[0]["content"], n=n).json()["usage"]
        assert events[-2]["usage"] == whole
        assert whole["completion_tokens"] == 7 * n
        assert whole["prompt_tokens"] == server.post("/tokenize", messages=prompt).json()["count"]
    refused = server.chat("x", stream_options={"include_usage": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("text", ["🌶ď客", "a🌶b", "👩‍👩‍👧 ok"])
def test_characters_are_whole_in_every_delta(server: Running, text: str, group: int):
    events = server.stream(CHAT, messages=user(say(text, group=group)))
    deltas = [choice["delta"].get("content", "") for event in events[:-1] for choice in event["choices"]]
    assert "".join(deltas) == text == server.chat(say(text)).json()["choices"][0]["message"]["content"]
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_cut_by_max_tokens_is_one_replacement(server: Running):
    for cut, left in ((1, "\ufffd"), (3, "\ufffd"), (4, "🌶"), (5, "🌶\ufffd")):
        asked = {"prompt": say("🌶ď"), "max_tokens": cut}
        assert server.complete(**asked).json()["choices"][0]["text"] == left
        assert text_of(server.stream(TEXT, **asked)) == left


def test_bad_input_never_opens_a_stream(server: Running):
    for wrong in ({"n": 0}, {"max_tokens": -1}, {"temperature": 9}, {"messages": []}):
        answer = server.post(CHAT, **{"model": MODEL, "messages": user("x"), "stream": True, **wrong})
        assert answer.status_code == 400
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["error"]["param"] == next(iter(wrong))


def test_a_fault_in_a_stream_is_an_event_and_the_end(server: Running):
    healthy = server.events(CHAT, messages=user(say("x" * 100, delay=0.01)))
    next(healthy)
    events = list(server.events(CHAT, messages=user(say("abcdef", fault_at=3))))
    assert events[-1]["error"]["message"] == "scripted fault"
    assert events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    assert ends([*events[:-1], "end"]) == []
    assert text_of([*events[:-1], "end"]) == "abc"
    assert text_of(list(healthy)) == "x" * 100
    assert server.chat(say("abcdef", fault_at=3)).status_code == 500


def test_deltas_are_sent_as_they_come(server: Running):
    events = server.events(CHAT, messages=user(say("a" * 40, delay=0.1)))
    for _ in range(3):
        next(events)
    assert server.metrics()["partwise_requests_running"] == 1, "three deltas have come, and the rest is still computed"
    assert len(list(events)) > 30


def test_token_ids_and_logprobs_of_deltas_join_to_the_whole(server: Running):
    asked = {"prompt": say("é and 🌶"), "logprobs": 2, "return_token_ids": True, "stop": ["never"]}
    events = server.stream(TEXT, **asked)
    whole = server.complete(**asked).json()["choices"][0]
    parts = [event["choices"][0] for event in events[:-1]]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for part in parts for each in part["logprobs"][name]] == whole["logprobs"][name]

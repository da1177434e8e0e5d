"""What callers may send: nulls, types, ranges, prompts, and answers that name the field at fault."""

from __future__ import annotations

import json
import math
import time

import pytest

from tests.serve.harness import MODEL, Running
from tests.serve.test_streams import CHAT, TEXT, say, user

L = 1024
NULLABLE = (
    "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "logit_bias", "stream", "stream_options",
    "user", "presence_penalty", "frequency_penalty", "top_k", "min_p", "echo", "best_of", "min_tokens", "priority",
    "predicted_tokens", "cache_salt", "stop_token_ids", "ignore_eos", "repetition_penalty", "metadata", "store",
)  # fmt: skip


def refused(answer, param: str | None, status: int = 400) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error["message"]


@pytest.mark.parametrize("name", NULLABLE)
def test_null_is_an_absent_field(server: Running, name: str):
    answer = server.complete("test", **{"max_tokens": 5, name: None})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"].startswith("hello")


@pytest.mark.parametrize("name", ["response_format", "tools", "top_logprobs", "logprobs", "max_completion_tokens"])
def test_null_is_an_absent_field_in_chat(server: Running, name: str):
    assert server.chat("test", **{"max_tokens": 5, name: None}).status_code == 200


def test_no_tools_are_no_tools(server: Running):
    assert server.chat("test", max_tokens=5, tools=[]).status_code == 200
    refused(server.chat("test", max_tokens=5, tools=[{"type": "function"}]), "tools")


def test_max_tokens_counts_exactly(server: Running):
    for count in (1, 2, 5):
        answer = server.complete("a", max_tokens=count).json()
        assert answer["usage"]["completion_tokens"] == count
        assert answer["choices"][0]["finish_reason"] == "length"
    assert server.complete("a").json()["usage"]["completion_tokens"] == 16


def test_max_tokens_zero_echoes_the_prompt_with_its_logprobs(server: Running):
    answer = server.complete("Your answer: Yes", max_tokens=0, echo=True, logprobs=1).json()
    choice = answer["choices"][0]
    assert choice["text"] == "Your answer: Yes"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["tokens"]) == 16
    assert answer["usage"]["completion_tokens"] == 0
    empty = server.complete("a", max_tokens=0).json()
    assert (empty["choices"][0]["text"], empty["usage"]["completion_tokens"]) == ("", 0)


def test_echo_joins_prompt_and_answer(server: Running):
    asked = {"prompt": [*"né ".encode()], "echo": True, "logprobs": 1, "max_tokens": 5}
    choice = server.complete(**asked).json()["choices"][0]
    assert choice["text"] == "né hello"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 3, 4, 5, 6, 7]
    assert len(choice["logprobs"]["top_logprobs"]) == 9
    parts = [event["choices"][0] for event in server.stream(TEXT, **asked)[:-1]]
    assert "".join(part["text"] for part in parts) == "né hello"
    assert [offset for part in parts for offset in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
    several = server.complete(["ab", "cd"], n=2, echo=True, max_tokens=2).json()["choices"]
    assert [each["text"] for each in several] == ["abhe", "abhe", "cdhe", "cdhe"]


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_is_refused(server: Running, stop):
    assert "stop" in refused(server.complete("Hello", stop=stop), "stop")
    assert server.complete("Hello", stop=[]).json()["choices"][0]["text"] != ""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["", [], [[]], [""], ["a", ""], [[1], []]])
def test_an_empty_prompt_is_refused(server: Running, prompt, stream: bool):
    refused(server.complete(prompt, stream=stream), "prompt")


def test_an_empty_conversation_is_refused_and_an_empty_message_is_not(server: Running):
    refused(server.post(CHAT, model=MODEL, messages=[]), "messages")
    refused(server.post(CHAT, model=MODEL), "messages")
    assert server.chat("").status_code == 200
    assert "refuses" in refused(server.chat("refuse"), "messages")


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_limit(server: Running, stream: bool):
    for extra in (-2, -1):
        for max_tokens in (1, L):
            answer = server.complete([65] * (L + extra), max_tokens=max_tokens).json()
            assert answer["usage"]["completion_tokens"] == min(max_tokens, -extra)
            assert answer["choices"][0]["finish_reason"] == "length"
    for length in (L, L + 1, 4 * L):
        message = refused(server.complete([65] * length, max_tokens=1, stream=stream), "prompt")
        assert str(length) in message
        assert str(L) in message


def test_a_model_that_is_not_here_is_not_served(server: Running):
    for stream in (False, True):
        message = refused(server.chat("x", model="no-such-model", stream=stream), "model", 404)
        assert MODEL in message
        for wrong in ("", 123):
            refused(server.chat("x", model=wrong, stream=stream), "model")
        refused(server.chat("x", model=None, stream=stream), "model")
    assert server.chat("x", max_tokens=1).json()["model"] == MODEL
    assert server.http.get("/v1/models").json()["data"][0]["id"] == MODEL
    assert server.http.get(f"/v1/models/{MODEL}").json()["max_model_len"] == L
    assert server.http.get("/v1/models/other").status_code == 404


def test_logprobs_of_chat(server: Running):
    for asked, n_top in (({}, 0), ({"top_logprobs": 0}, 0), ({"top_logprobs": 3}, 3)):
        choice = server.chat(say("aé"), logprobs=True, **asked).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 4
        assert b"".join(bytes(entry["bytes"] or []) for entry in entries).decode() == choice["message"]["content"]
        for entry in entries:
            assert len(entry["top_logprobs"]) == n_top
            values = [top["logprob"] for top in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
        if n_top:
            assert len({entry["top_logprobs"][0]["token"] for entry in entries}) == 4
    assert server.chat("x", max_tokens=1).json()["choices"][0]["logprobs"] is None
    for wrong in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        refused(server.chat("x", **wrong), "top_logprobs")


def test_logprobs_of_completions(server: Running):
    for n_top in range(6):
        logprobs = server.complete(say("é!x"), logprobs=n_top, max_tokens=4).json()["choices"][0]["logprobs"]
        assert logprobs["text_offset"] == [0, 0, 1, 2]
        assert [len(top) for top in logprobs["top_logprobs"]] == [max(1, n_top)] * 4
        for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
            assert token in top
    for wrong in (21, -1, True, "1"):
        refused(server.complete("x", logprobs=wrong), "logprobs")


@pytest.mark.parametrize("value", ["-inf", "nan"])
def test_logprobs_that_json_cannot_hold(server: Running, value: str):
    prompt = say("ab", logprob=value)
    whole = server.complete(prompt, logprobs=1, echo=True)
    logprobs = json.loads(whole.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]["token_logprobs"]
    assert all(logprob is None or math.isfinite(logprob) for logprob in logprobs)
    assert logprobs[-1] == -9999.0
    chunks = server.stream(CHAT, messages=user(prompt), logprobs=True, top_logprobs=2)
    assert len(chunks) > 2


@pytest.mark.parametrize(
    "body",
    [
        rb'{"model":"fake","messages":[{"role":"user","content":"emoji \ud83d"}]}',
        rb'{"model":"fake","messages":[{"role":"user","content":"x"}],"stop":"\udcf0"}',
        rb'{"model":"fake","messages":[{"role":"user","content":"x"}],"user":"\udcf0"}',
        rb'{"model":"fake","messages":[{"role":"user","content":"x"}],"\udcf0":1}',
        b'{"model":"fake","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"fake","messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"model":"fake","messages":[{"role":"user","content":"x"}],"temperature":Infinity}',
        b'{"model":"fake","messages":[{"role":"user","content":"x"}],"max_tokens":1e400}',
        b"[" * 100000,
        b"",
        b"[]",
        b'"x"',
    ],
)
def test_bodies_that_are_not_a_request(server: Running, body: bytes):
    refused(server.raw(CHAT, body), None)


def test_odd_but_valid_text(server: Running):
    body = rb'{"model":"fake","max_tokens":1,"messages":[{"role":"user","content":"\ud83d\ude00 \u0000 \uffff"}]}'
    assert server.raw(CHAT, body).status_code == 200


NUMBERS = [
    ("temperature", 2.1), ("temperature", -0.1), ("temperature", "0.5"), ("temperature", True), ("temperature", [1]),
    ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", 1.1), ("max_tokens", -1),
    ("max_tokens", 2.0), ("max_tokens", "16"), ("max_tokens", True), ("max_tokens", 10**30), ("seed", 2**63),
    ("seed", -(2**63) - 1), ("seed", 1.5), ("n", 0), ("n", -1), ("n", 10**6), ("n", 2**31), ("best_of", 2),
    ("min_tokens", -1), ("predicted_tokens", -1), ("predicted_tokens", 2.5),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"258": 1}), ("logit_bias", {"0": 1e9}),
    ("logit_bias", {"0": None}), ("logit_bias", {"1" * 5000: 1}), ("logit_bias", [1]), ("stop", 5),
    ("stop", ["x" * 2000]),
    ("stop_token_ids", [-1]), ("stop_token_ids", [258]), ("stop_token_ids", ["a"]), ("cache_salt", ""),
    ("cache_salt", 5), ("priority", 1.5), ("stream", "yes"), ("stream", 1), ("echo", 1), ("user", 5),
    ("suffix", "x"), ("chat_template", "{{ 1 }}"), ("tools", []), ("guided_regex", "x"), ("temprature", 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NUMBERS, ids=lambda value: str(value)[:20])
def test_a_wrong_field_is_named(server: Running, name: str, value):
    assert name in refused(server.complete("x", **{name: value}), name)


def test_a_typo_gets_a_hint(server: Running):
    assert "did you mean temperature" in refused(server.complete("x", temprature=1), "temprature")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e-320), ("temperature", 0), ("temperature", 2), ("top_p", 1e-9), ("top_k", 0), ("top_k", -1),
        ("top_k", 10**6), ("min_p", 1), ("seed", 2**63 - 1), ("seed", -(2**63)), ("max_tokens", 2**31 - 1),
        ("max_tokens", 10**18), ("logit_bias", {"257": 100}), ("best_of", 1), ("cache_salt", "a"), ("priority", -5),
        ("predicted_tokens", 0), ("predicted_tokens", 10**18),
        ("user", "me"), ("metadata", {"a": "b"}), ("store", False), ("stop_token_ids", [3]), ("ignore_eos", False),
    ],
)  # fmt: skip
def test_the_edges_of_what_is_right(server: Running, name: str, value):
    assert server.complete(say("ab"), **{name: value}).status_code == 200


def test_limits_that_depend_on_each_other(server: Running):
    refused(server.complete("x", min_tokens=6, max_tokens=5), "min_tokens")
    refused(server.chat("x", max_tokens=5, max_completion_tokens=6), "max_completion_tokens")
    assert server.chat("x", max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "prompt", [[258], [-1], [2**63], [2**70], [1.5], [True], ["a", 1], [1, "a"], {"a": 1}, 5, [None]]
)
def test_a_prompt_of_the_wrong_kind_is_refused(server: Running, prompt):
    refused(server.complete(prompt), "prompt")


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nope"}}},
        {"type": "json_schema", "json_schema": 5},
        {"type": "json_schema"},
        {"type": "json_object"},
        {"type": "regex", "pattern": "foo**"},
        {},
        5,
    ],
)
def test_formats_that_are_not_supported_are_named(server: Running, response_format):
    assert "response_format" in refused(server.chat("x", response_format=response_format), "response_format")


def test_text_format_is_what_one_gets_anyway(server: Running):
    assert server.chat("x", response_format={"type": "text"}, max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": "x", "tool_calls": []}],
        ["x"],
        "x",
        {"role": "user"},
    ],
)
def test_messages_of_the_wrong_kind_are_refused(server: Running, messages):
    assert "messages" in refused(server.post(CHAT, model=MODEL, messages=messages), "messages")


def test_messages_as_clients_send_them(server: Running):
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
        {"role": "user", "content": "c", "name": "me"},
    ]
    tokens = server.post("/tokenize", messages=messages).json()["tokens"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == (
        "<start>system: be brief\nuser: ab\nassistant: \nuser: c\nassistant: "
    )
    assert server.post(CHAT, model=MODEL, messages=messages, max_tokens=1).status_code == 200


def test_a_conversation_begins_with_one_start(server: Running):
    tokens = server.post("/tokenize", messages=user("hi")).json()["tokens"]
    assert tokens.count(257) == 1
    assert server.chat("hi", max_tokens=1).json()["usage"]["prompt_tokens"] == len(tokens)


def test_tokenize_and_detokenize(server: Running):
    answer = server.post("/tokenize", model=MODEL, prompt="é x").json()
    assert answer == {"tokens": list("é x".encode()), "count": 4, "max_model_len": L}
    assert server.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "é x"}
    refused(server.post("/tokenize"), "prompt")
    refused(server.post("/tokenize", prompt="a", messages=user("b")), "prompt")
    refused(server.post("/tokenize", prompt="a", model="other"), "model", 404)
    for wrong in ([258], "x", [True]):
        refused(server.post("/detokenize", tokens=wrong), "tokens")


def test_several_prompts_and_choices_come_in_order(server: Running):
    prompts = [say("ab"), say("cd")]
    whole = server.complete(prompts, n=3, seed=7).json()
    assert [choice["index"] for choice in whole["choices"]] == list(range(6))
    assert [choice["text"] for choice in whole["choices"]] == ["ab"] * 3 + ["cd"] * 3
    assert whole["usage"]["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert whole["usage"]["completion_tokens"] == 18
    assert [c["text"] for c in server.complete([[72, 105], [72]], max_tokens=2).json()["choices"]] == ["he", "he"]


def test_many_prompts_are_handed_over_at_once(server: Running):
    slow = server.open_stream(say("x" * 100, delay=0.1))
    before = server.metrics()["partwise_steps_total"]
    assert len(server.complete(["a"] * 40, max_tokens=1).json()["choices"]) == 40
    assert server.metrics()["partwise_steps_total"] - before < 20, "one after the other they would take a step each"
    slow.close()


def test_one_wrong_prompt_refuses_all(server: Running):
    refused(server.complete([[65], [65] * L], max_tokens=3), "prompt")
    server.wait_for_metrics({"partwise_requests_running": 0, "partwise_requests_waiting": 0})


def test_cached_tokens_are_told(server: Running):
    usage = server.complete('[[{"cached": 16}]]', max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 16


def test_lists_without_end_are_refused_quickly(server: Running):
    started = time.process_time()
    for name, value in (("stop", ["a"] * 10**5), ("logit_bias", {str(i): 1 for i in range(10**5)}), ("n", 10**6)):
        assert server.complete("x", **{name: value}).status_code == 400
    refused(server.complete(["a"] * 10**5), "prompt")
    refused(server.complete(["a"] * 100, n=2), "prompt")
    refused(server.post(CHAT, model=MODEL, messages=user("x") * 10**4), "messages")
    assert server.complete("x", **{f"k{i}": 1 for i in range(10**5)}).status_code == 400
    assert time.process_time() - started < 8


def test_an_unexpected_failure_says_nothing_of_the_inside(server: Running):
    assert server.complete('[[{"add_raises": true}]]').status_code == 500


def test_unknown_routes_have_the_same_shape(server: Running):
    refused(server.http.get("/v1/nothing"), None, 404)
    refused(server.http.get(TEXT), None, 405)


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/health/live"])
def test_head_answers_like_get(server: Running, path: str):
    head, get = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_a_wrong_method_is_told_the_right_ones(server: Running):
    answer = server.http.delete("/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")

"""The `openai` package as a caller."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.serve.harness import MODEL, Running
from tests.serve.test_streams import say, user


@pytest.fixture(scope="module")
def client(shared: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=shared.server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=user(say("hi 客")), temperature=0, seed=1)
    assert answer.choices[0].message.content == "hi 客"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    again = client.chat.completions.create(
        model=MODEL, messages=[*user("a"), answer.choices[0].message, *user(say("ok"))]
    )
    assert again.choices[0].message.content == "ok"


def test_streams(client: openai.OpenAI):
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=user(say("abc")), stream=True, n=2, stream_options={"include_usage": True}
        )
    )
    for index in range(2):
        texts = [c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index]
        assert "".join(texts) == "abc"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])
    texts = [c.choices[0].text for c in client.completions.create(model=MODEL, prompt=say("xyz"), stream=True)]
    assert "".join(texts) == "xyz"


def test_the_stream_helper(client: openai.OpenAI):
    with client.chat.completions.stream(model=MODEL, messages=user(say("abc"))) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "abc"


def test_completions(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=[say("ab"), say("cd")], n=2, echo=False, logprobs=2)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["a", "b", "<eos>"]
    extra = client.completions.create(model=MODEL, prompt="x", extra_body={"top_k": 3, "min_p": 0.1}, max_tokens=2)
    assert extra.choices[0].text == "he"


def test_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(model=MODEL, messages=user(say("ab")), logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["a", "b", "<eos>"]
    assert content[0].bytes == [97]
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]


def test_models(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors(client: openai.OpenAI, shared: Running):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="none", messages=user("x"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=user("x"), temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL, messages=user("x"), tools=[{"type": "function", "function": {"name": "f"}}]
        )
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model=MODEL, messages=user(say("abc", fault_at=1)))
    with pytest.raises(openai.APIError, match="scripted fault"):
        list(client.chat.completions.create(model=MODEL, messages=user(say("abc", fault_at=2)), stream=True))

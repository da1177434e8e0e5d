"""The default recipe with its real model, as a newcomer starts it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import openai
import pytest

from core.compose import compose
from core.models.source import read_spec, resolve
from core.models.tokenizer import Tokenizer, load_tokenizer
from core.text import Detokenizer, Vocabulary
from tests.serve.test_real_engine import Served

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("cwd"), "recipe=premium_chat", "server.port=0")
    yield server
    assert server.end() == 0
    assert list(server.cwd.iterdir()) == []


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(resolve(read_spec(compose("premium_chat").model)))


def test_it_answers(client: openai.OpenAI, tokenizer: Tokenizer):
    asked = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=3)
    content = answer.choices[0].message.content
    assert content is not None
    assert "Paris" in content
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokenizer.encode_chat(QUESTION))
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == content
    entries = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert entries
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == content
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)


def test_a_stop_string_over_several_tokens(client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 40}
    text = client.completions.create(**asked).choices[0].text
    stop = text[9:21]
    whole = client.completions.create(**asked, stop=[stop]).choices[0]
    streamed = client.completions.create(**asked, stop=[stop], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text == text.partition(stop)[0]
    never = client.completions.create(**asked, stop=[stop[:-1] + "§"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in never) == text


def test_offsets_and_tokens_match_the_text(client: openai.OpenAI):
    asked = {"prompt": "Ünïcödé 客 says:", "echo": True, "logprobs": 2, "max_tokens": 12, "temperature": 0}
    choice = client.completions.create(model=MODEL, **asked).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("Ünïcödé 客 says:")
    assert logprobs is not None
    assert logprobs.text_offset == sorted(logprobs.text_offset or [])
    for token, offset in zip(logprobs.tokens or [], logprobs.text_offset or [], strict=True):
        if "\\x" not in token:
            assert choice.text[offset:].startswith(token)


def test_any_tokens_come_out_as_they_decode(tokenizer: Tokenizer):
    vocabulary, rng = Vocabulary(tokenizer.backend), random.Random(0)
    for _ in range(100):
        prompt = tokenizer.encode("ok then")
        tokens = [rng.randrange(vocabulary.size) for _ in range(40)]
        detokenizer = Detokenizer(tokenizer.backend, prompt)
        text = "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()
        assert text == tokenizer.decode(prompt + tokens)[len(tokenizer.decode(prompt)) :]
        joined = b"".join(vocabulary.bytes(token) for token in tokens if not vocabulary.special(token))
        assert joined.decode("utf-8", "replace") == text

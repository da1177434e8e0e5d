"""The offline door: prompts of every kind in, results in order out, the same rules as the server's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from core import LLM
from core.types import InvalidRequest, PartwiseError
from tests.serve.tiny_model import save_tiny_model

SMALL = ["engine.threads=1", "engine.max_model_len=256", "memory.kv_bytes=8MiB"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


def open_llm(folder: Path, *overrides: str, recipe: str = "premium_chat") -> LLM:
    return LLM(recipe=recipe, overrides=[f"model={folder}", *SMALL, *overrides])


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as opened:
        yield opened


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats["running"], stats["waiting"]) == (0, 0)
    assert all(group["held"] == 0 for group in stats["kv"].values())


def test_prompts_of_every_kind(llm: LLM):
    texts = ["hello", "good morning", "x"]
    results = llm.generate(texts, temperature=0, max_tokens=8)
    assert [result.prompt_token_ids for result in results] == [list(text.encode()) for text in texts]
    ids = llm.generate([list(text.encode()) for text in texts], temperature=0, max_tokens=8)
    assert [each.token_ids for each in ids] == [each.token_ids for each in results]
    for one in (
        llm.generate("hello", temperature=0, max_tokens=8),
        llm.generate(list(b"hello"), temperature=0, max_tokens=8),
    ):
        assert [each.token_ids for each in one] == [results[0].token_ids]
    for result in results:
        assert result.finish_reason in ("length", "stop")
        assert len(result.token_ids) == 8 or result.finish_reason == "stop"
        assert (
            result.text
            == llm.tokenizer.decode(list(result.prompt_token_ids) + result.token_ids)[
                len(llm.tokenizer.decode(result.prompt_token_ids)) :
            ]
        )
    assert llm.generate([]) == []
    assert_idle(llm)


def test_the_default_length_and_no_limit(llm: LLM):
    assert len(llm.generate("abc", temperature=0, ignore_eos=True)[0].token_ids) == 16
    assert len(llm.generate("abc", temperature=0, ignore_eos=True, max_tokens=None)[0].token_ids) == 256 - 3
    assert len(llm.chat([{"role": "user", "content": "a"}], ignore_eos=True)[0].token_ids) > 200


def test_other_parts_give_the_same_tokens(llm: LLM, folder: Path):
    prompts = ["hello", "hello there", "z" * 60]
    wanted = [each.token_ids for each in llm.generate(prompts, temperature=0, max_tokens=24)]
    with open_llm(folder, "scheduler=static", "drafter=none") as other:
        assert other.recipe.scheduler.name == "static"
        assert [each.token_ids for each in other.generate(prompts, temperature=0, max_tokens=24)] == wanted


def test_several_choices(llm: LLM):
    (first, second) = llm.generate(["ab", "cd"], n=3, seed=7, temperature=1.0, max_tokens=8)
    assert len(first.choices) == len(second.choices) == 3
    assert first.text == first.choices[0].text
    assert len({tuple(choice.token_ids) for choice in first.choices}) > 1
    again = llm.generate(["ab", "cd"], n=3, seed=7, temperature=1.0, max_tokens=8)
    assert [c.token_ids for r in again for c in r.choices] == [c.token_ids for r in (first, second) for c in r.choices]


def test_stop_strings_end_everything_at_one_token(llm: LLM):
    plain = llm.generate("hello", temperature=0, max_tokens=20, ignore_eos=True)[0]
    letters = [place for place in range(4, 20) if plain.token_ids[place] < 128]
    stop = chr(plain.token_ids[letters[0]])
    before = llm.stats()["generated_tokens"]
    cut = llm.generate("hello", temperature=0, max_tokens=200, ignore_eos=True, stop=stop, logprobs=1)[0]
    assert cut.text == plain.text.partition(stop)[0]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == plain.token_ids[: len(cut.token_ids)]
    assert cut.token_ids[-1] == ord(stop)
    assert cut.logprobs is not None
    assert [record.token for record in cut.logprobs] == cut.token_ids
    assert llm.stats()["generated_tokens"] - before < 40
    assert_idle(llm)


def test_logprobs(llm: LLM):
    result = llm.generate("hello", temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)[0]
    assert result.logprobs is not None
    for token, record in zip(result.token_ids, result.logprobs, strict=True):
        assert record.token == token == record.top[0][0]
        assert len(record.top) == 3
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert [record.token for record in result.prompt_logprobs[1:] if record] == list(b"ello")
    assert llm.generate("hello", max_tokens=1)[0].logprobs is None


def test_ids_that_stand_for_no_token_are_never_chosen(llm: LLM):
    results = llm.generate("q", n=16, seed=3, temperature=2.0, max_tokens=64)
    assert max(token for choice in results[0].choices for token in choice.token_ids) < 258


def test_chat_takes_one_conversation_or_several(llm: LLM):
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "user", "content": "ho"}]
    results = llm.chat([one, two], temperature=0, max_tokens=6)
    assert [r.token_ids for r in llm.chat(one, temperature=0, max_tokens=6)] == [results[0].token_ids]
    assert results[0].prompt_token_ids.count(257) == 2
    with pytest.raises(InvalidRequest, match="no"):
        llm.chat([{"role": "user", "content": "refuse"}])


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("", {}, "prompt"),
        ([[]], {}, "prompt"),
        ([9999], {}, "prompt"),
        ("x" * 300, {}, "prompt"),
        ("a", {"temperature": 3.0}, "temperature"),
        ("a", {"n": 0}, "n"),
        ("a", {"stop": ""}, "stop"),
        ("a", {"temprature": 0}, "temprature"),
        ("a", {"max_tokens": True}, "max_tokens"),
        ("a", {"min_tokens": "b"}, "min_tokens"),
        ("a", {"stop": 5}, "stop"),
        ("a", {"stop_token_ids": 5}, "stop_token_ids"),
        ("a", {"logit_bias": [5]}, "logit_bias"),
        (None, {}, "prompts"),
        ([None], {}, "prompt"),
    ],
)
def test_wrong_requests_name_the_field_and_leave_nothing(llm: LLM, prompt, params, param):
    with pytest.raises(InvalidRequest) as error:
        llm.generate(prompt, **params)
    assert error.value.param == param
    with pytest.raises(InvalidRequest):
        llm.generate(["good", "x" * 300])
    llm.generate("a", max_tokens=1)
    assert_idle(llm)


def test_a_parameter_of_none_is_absent(llm: LLM):
    wanted = llm.generate("abc", temperature=0)[0].token_ids
    assert llm.generate("abc", temperature=0, min_tokens=None, stop=None, seed=None)[0].token_ids == wanted


@pytest.mark.parametrize("messages", ["hello", {"role": "user", "content": "hello"}])
def test_what_is_no_conversation(llm: LLM, messages):
    with pytest.raises(InvalidRequest, match="messages must be a list"):
        llm.chat(messages)


def test_more_prompts_than_the_queue_holds(folder: Path):
    with open_llm(folder, "engine.max_waiting=3", "scheduler.max_running=2") as small:
        prompts = [bytes([65 + n]) * 5 for n in range(20)]
        results = small.generate([list(prompt) for prompt in prompts], temperature=0, max_tokens=4)
        assert [result.prompt_token_ids for result in results] == [list(prompt) for prompt in prompts]
        assert all(result.token_ids for result in results)


def test_an_interrupted_call_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    steps = iter(range(3))
    step = llm.engine.step

    def interrupted():
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], max_tokens=100, ignore_eos=True)
    llm.generate("c", max_tokens=1)
    assert_idle(llm)


def test_what_cannot_be_composed_is_an_error_for_a_person():
    with pytest.raises(PartwiseError, match="continuous"):
        LLM(overrides=["scheduler=continous"])
    with pytest.raises(PartwiseError, match="premium_chat"):
        LLM(recipe="premium_chart")


def test_importing_core_is_light():
    code = "import sys, core; assert 'torch' not in sys.modules; assert 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The words of a command line: the exact typed value, or an error that says what to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from core.compose import compose, compose_words
from core.recipe import kv_bytes
from core.serve.__main__ import main
from core.serve.run import show
from core.types import PartwiseError


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("server.api_key='a,b'", "a,b"),
        ('server.api_key="a=b"', "a=b"),
        ("server.api_key=a|b", "a|b"),
        ("server.api_key=a@b", "a@b"),
        ("server.api_key=a%b", "a%b"),
        ("server.api_key='a#b'", "a#b"),
        ("server.api_key='a b'", "a b"),
        ("server.api_key=a\\b", "a\\b"),
        ("server.api_key='李明'", "李明"),
        ("server.api_key='[\"a,b\"]'", '["a,b"]'),
        ("server.api_key='007'", "007"),
        ("server.api_key='1e-3'", "1e-3"),
        ("server.api_key='null'", "null"),
        ("server.api_key=on", "on"),
        ("server.api_key=2023-09-16", "2023-09-16"),
        ("server.api_key=${oc.env:HOME}", os.environ.get("HOME")),
        ("server.api_key=null", None),
    ],
)
def test_a_text_arrives_as_it_was_written(word: str, value: str | None):
    assert compose(overrides=[word]).server.api_key == value


@pytest.mark.parametrize("path", ["/m/a=b,c", "/m/a b", "/m/ü#x", "/m/(1)", "/m/a:b"])
def test_paths_of_models(path: str):
    assert compose(overrides=[f"model='{path}'"]).model["path"] == path


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=/m/a=b,c"], "quote a value"),
        (["server.api_key=a#b"], "quote a value"),
        (["server.api_key=true"], "server.api_key"),
        (["server.api_key=1"], "server.api_key"),
        (["server.api_key="], "server.api_key"),
        (["server.api_key=1"], "quote it"),
        (["hydra.run.dir=/tmp"], "hydra.run.dir"),
        (["attention=sdpa"], "attention.kernel"),
        (["quantizer=int8"], "quantizer.weights"),
        (["schedular=static"], "did you mean scheduler"),
        (["server.port=abc"], "server.port"),
        (["server.port=1e3x"], "server.port"),
        (["engine.threads=1e-3"], "engine.threads"),
        (["engine.max_model_len=0"], "engine.max_model_len"),
        (["server.port=8001", "server.port=8002"], "given twice"),
        (["scheduler.max_num_seq=4"], "max_running"),
        (["scheduler=contious"], "did you mean continuous"),
        (["recipe=premium_chart"], "premium_chat"),
        (["memory.kv_bytes=lots"], "memory.kv_bytes"),
        (["memory.kv_bytes=0"], "memory.kv_bytes"),
        (["foo=1"], "foo"),
        (["server"], "server"),
        (["=1"], "no key"),
    ],
)
def test_what_is_wrong_is_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(PartwiseError) as error:
        compose_words(words)
    assert told in str(error.value)
    assert show(words) == 1
    assert told in capsys.readouterr().err


def test_a_key_of_the_wrong_type_is_not_repeated():
    with pytest.raises(PartwiseError) as error:
        compose(overrides=["server.api_key=8675309"])
    assert "8675309" not in str(error.value)


def test_a_model_in_braces():
    assert compose(overrides=["model={path: /m/a, name: b}"]).model == {"path": "/m/a", "name": "b"}


def test_more_memory_than_there_is():
    with pytest.raises(PartwiseError, match=r"memory\.kv_bytes.*this machine has"):
        kv_bytes(compose(overrides=["memory.kv_bytes=1000TiB"]))


@pytest.mark.parametrize("word", ["scheduler.max_running=0", "kv_allocator.page_size=-1", "drafter.k=many"])
def test_what_is_wrong_with_a_part_is_named(word: str, capsys: pytest.CaptureFixture[str]):
    assert show([word]) == 1
    assert word.partition("=")[0] in capsys.readouterr().err


def test_two_recipes_in_one_process_do_not_meet():
    first = compose("premium_chat", ["scheduler.max_running=3"])
    second = compose("baseline")
    assert first.scheduler.options["max_running"] == 3
    assert second.scheduler.name == "static"
    assert second.scheduler.options["max_running"] != 3
    assert compose("premium_chat") == compose("premium_chat")


def test_the_recipe_is_shown_without_its_secret(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert show(["recipe=async_agents", "server.api_key=hush", "server.port=8001"]) == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert "hush" not in text
    assert (shown["name"], shown["server"]["port"], shown["scheduler"]["name"]) == ("async_agents", 8001, "continuous")
    assert list(tmp_path.iterdir()) == []


def test_help_starts_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["recipe=premium_chat", "--help"]) == 0
    text = capsys.readouterr().out
    assert "python -m core.serve" in text
    assert "server.port" in text

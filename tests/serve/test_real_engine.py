"""The command, the real engine and a tiny model: what the scripted engine cannot show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

WORDS = ["engine.threads=1", "engine.max_model_len=256", "memory.kv_bytes=8MiB", "server.port=0"]


class Served:
    """`python -m core.serve` in an empty folder."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.cwd = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "core.serve", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self.lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"ready at (http\S+) after ([\d.]+) s", line):
                self.http = httpx.Client(base_url=found[1], timeout=60)
                self.seconds = float(found[2])
                return
        raise AssertionError(self.process.communicate()[1])

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny-llama", "prompt": prompt, "return_token_ids": True, **fields}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def ids(self, prompt: Any, **fields: Any) -> list[int]:
        return self.complete(prompt, temperature=0, **fields)["choices"][0]["token_ids"]

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").text.splitlines()
        pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in pairs}

    def assert_idle(self, seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds
        while True:
            found = self.metrics()
            held = [value for name, value in found.items() if 'state="held"' in name]
            if found["partwise_requests_running"] == found["partwise_requests_waiting"] == 0 and not any(held):
                return
            assert time.monotonic() < end, found
            time.sleep(0.05)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=15)
        assert "Traceback" not in errors, errors
        return self.process.returncode


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = Served(tmp_path_factory.mktemp("cwd"), "recipe=premium_chat", f"model={tiny_model}", *WORDS)
    yield server
    server.assert_idle()
    assert server.end() == 0
    assert list(server.cwd.iterdir()) == []


def test_the_terminal_names_the_parts(served: Served):
    shown = "".join(served.lines)
    for seam, part in (("scheduler", "continuous"), ("attention.kernel", "(cpu_paged|sdpa)"), ("drafter", "ngram")):
        assert re.search(rf"{re.escape(seam)}\W+{part}\b", shown)
    assert served.lines[-1].startswith("Partwise is ready at http://127.0.0.1:")


def test_the_same_tokens_through_every_door(served: Served, tiny_model: Path):
    from core import LLM

    prompts = ["hello", "abc abc abc abc ", "x" * 40]
    words = ["engine.threads=1", "engine.max_model_len=256", "memory.kv_bytes=8MiB"]
    with LLM("baseline", [f"model={tiny_model}", *words]) as llm:
        results = llm.generate(prompts, temperature=0, max_tokens=32, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        assert served.ids(prompt, max_tokens=32, ignore_eos=True) == result.token_ids
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda prompt: served.ids(prompt, max_tokens=32, ignore_eos=True), prompts * 4))
    assert found == [result.token_ids for result in results] * 4
    several = served.complete(prompts, temperature=0, max_tokens=32, ignore_eos=True)
    assert [choice["token_ids"] for choice in several["choices"]] == [result.token_ids for result in results]


def test_a_stop_inside_a_drafted_block_ends_everything_at_one_token(served: Served):
    prompt = "abcabcabcabcabc"
    plain = served.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True)["choices"][0]
    for place in range(3, 30, 4):
        stop = plain["token_ids"][place]
        first = plain["token_ids"].index(stop)
        cut = served.complete(prompt, temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=[stop], logprobs=2)
        choice = cut["choices"][0]
        assert choice["token_ids"] == plain["token_ids"][: first + 1]
        assert len(choice["logprobs"]["tokens"]) == first + 1 == cut["usage"]["completion_tokens"]
        assert choice["finish_reason"] == "stop"


def test_a_stop_string_inside_a_drafted_block_is_the_same_in_streams(served: Served):
    prompt, asked = "xyxyxyxyxyxy", {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    text = served.complete(prompt, **asked)["choices"][0]["text"]
    places = [n for n in range(4, len(text) - 3) if "\ufffd" not in text[n : n + 2]]
    assert places
    for place in places[::7]:
        stop = text[place : place + 2]
        whole = served.complete(prompt, **asked, stop=stop, logprobs=1)
        choice = whole["choices"][0]
        assert choice["text"] == text.partition(stop)[0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
        body = {"model": "tiny-llama", "prompt": prompt, **asked, "stop": stop, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line and line != "data: [DONE]"]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == choice["text"]


def test_choices_of_a_seed_differ_and_repeat(served: Served):
    asked = {"n": 3, "seed": 7, "temperature": 1, "max_tokens": 8}
    first, second = (served.complete(["a", "b"], **asked)["choices"] for _ in range(2))
    ids = [choice["token_ids"] for choice in first]
    assert ids == [choice["token_ids"] for choice in second]
    assert [choice["index"] for choice in first] == list(range(6))
    assert len(set(map(tuple, ids[:3]))) > 1
    assert len(set(map(tuple, ids[3:]))) > 1
    assert (
        served.complete("a", temperature=1, max_tokens=20)["choices"]
        != served.complete("a", temperature=1, max_tokens=20)["choices"]
    )


@pytest.mark.parametrize(
    "odd",
    [{"temperature": t} for t in (1e-4, 1e-8, 1e-320)]
    + [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}, {"top_k": 10**6, "temperature": 0}],
    ids=str,
)
def test_the_edges_of_sampling_are_greedy_and_disturb_nobody(served: Served, odd: dict[str, Any]):
    greedy = served.ids("edge", max_tokens=12)
    with ThreadPoolExecutor(2) as pool:
        beside = pool.submit(served.ids, "edge", max_tokens=12)
        found = served.complete("edge", max_tokens=12, **odd)["choices"][0]["token_ids"]
    assert found == greedy == beside.result()


def test_penalties_and_biases_stay_with_their_request(served: Served):
    asked = {"max_tokens": 24, "ignore_eos": True}
    alone = served.ids("plain", **asked)
    odd = [
        {"frequency_penalty": 1.05}, {"presence_penalty": -2}, {"repetition_penalty": 3.0},
        {"logit_bias": {str(alone[0]): -100}}, {"min_p": 0.5, "temperature": 1, "seed": 1},
    ]  # fmt: skip
    own = [served.ids("plain and longer", **asked, **fields) for fields in odd if "seed" not in fields]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(served.complete, "plain and longer", **{"temperature": 0, **asked, **f}) for f in odd]
        assert [each.result() for each in [pool.submit(served.ids, "plain", **asked) for _ in range(3)]] == [alone] * 3
        assert [each.result()["choices"][0]["token_ids"] for each in others[:4]] == own


def test_min_tokens_and_ignore_eos(served: Served):
    plain = served.ids("count", max_tokens=30, ignore_eos=True)
    assert len(plain) == 30
    stop = plain[3]
    cut = served.ids("count", max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
    assert cut == plain[: plain.index(stop) + 1]
    for least in (6, 12):
        kept = served.complete("count", temperature=0, max_tokens=30, stop_token_ids=[stop], min_tokens=least)
        assert kept["usage"]["completion_tokens"] >= least
        assert stop not in kept["choices"][0]["token_ids"][:least]


def test_a_seed_gives_the_same_text_whatever_the_neighbours(served: Served):
    asked = {"seed": 42, "temperature": 0.8, "max_tokens": 16}
    alone = served.complete("seeded", **asked)["choices"][0]["token_ids"]
    with ThreadPoolExecutor(8) as pool:
        others = [pool.submit(served.complete, f"other {n}", max_tokens=20 + n) for n in range(6)]
        beside = [pool.submit(served.complete, "seeded", **asked) for _ in range(2)]
        assert [each.result()["choices"][0]["token_ids"] for each in beside] == [alone, alone]
        for each in others:
            each.result()


def test_prefixes_are_shared_by_salt_only(served: Served):
    prompt = list(b"a prefix that is sixty-four tokens long, which is four pages....")

    def cached(**fields: Any) -> int:
        usage = served.complete(prompt, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") == 48
    assert cached(cache_salt="b") == 0
    assert cached() == 0
    assert cached() == 48
    assert cached(cache_salt="tiny-llama") == 0


def test_prompt_logprobs_are_the_same_cold_and_cached(served: Served):
    prompt = "echo " * 20
    for length in (15, 16, 17, 33, 100):
        seen = [
            served.complete(prompt[:length], echo=True, logprobs=2, max_tokens=1, temperature=0)["choices"][0][
                "logprobs"
            ]
            for _ in range(2)
        ]
        assert len(seen[0]["token_logprobs"]) == length + 1
        assert seen[0]["token_logprobs"][0] is None
        assert seen[0]["token_logprobs"][1:] == pytest.approx(seen[1]["token_logprobs"][1:], abs=1e-4)


def test_random_bytes_are_always_valid_json(served: Served):
    for seed in range(12):
        fields = {"temperature": 2, "seed": seed, "max_tokens": 60, "logprobs": 1, "ignore_eos": True}
        whole = served.complete("noise", **fields)["choices"][0]
        body = {"model": "tiny-llama", "prompt": "noise", "stream": True, **fields}
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] for line in response.iter_lines() if line and line != "data: [DONE]"]
        chunks = [json.loads(line, parse_constant=pytest.fail)["choices"][0] for line in lines]
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]


def test_streams_that_are_left_hold_nothing(served: Served):
    body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "hi"}], "stream": True, "ignore_eos": True}

    def leave(_: int) -> None:
        with httpx.stream("POST", f"{served.http.base_url}/v1/chat/completions", json=body, timeout=60) as response:
            for _, _ in zip(range(3), response.iter_lines(), strict=False):
                pass

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(60)))
    served.assert_idle()
    assert served.ids("canary", max_tokens=3)


def test_figures_of_the_engine(served: Served):
    served.complete("abcabcabcabc", temperature=0, max_tokens=40, ignore_eos=True)
    found = served.metrics()
    for name in ("scheduler", "model", "sampling"):
        assert any(key.startswith("partwise_seam_seconds_total") and name in key for key in found), name
    assert found['partwise_drafted_tokens_total{position="0"}'] >= found['partwise_accepted_tokens_total{position="0"}']
    assert found["partwise_batch_size_count"] > 0
    assert found["partwise_prefix_cache_hit_tokens_total"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["scheduler=continous", "recipe=baseline"], "continuous"),
        (["server.prot=1"], "port"),
        (["scheduler.max_running=0"], "max_running"),
        (["model=/nowhere/at/all"], "there is no model at /nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_is_said_and_ends(words: list[str], told: str, tmp_path: Path):
    command = [sys.executable, "-m", "core.serve", *words]
    ended = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode != 0
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []

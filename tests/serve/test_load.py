"""The load benchmark, short, over both engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.serve.load import load, server
from tests.serve.harness import serving


def test_load_on_the_scripted_engine():
    with serving() as running:
        tally, problems = asyncio.run(load(running.server.url, clients=48, seconds=2.0))
    assert problems == []
    assert min(tally.ends[end] for end in ("whole", "stream", "left")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["premium_chat", "async_agents"])
def test_load_on_a_tiny_model(tiny_model: Path, recipe: str):
    words = [f"recipe={recipe}", f"model={tiny_model}", "engine.max_model_len=512", "memory.kv_bytes=1MiB"]
    with server([*words, "engine.threads=1"]) as url:
        tally, problems = asyncio.run(load(url, clients=64, seconds=8.0))
    assert problems == []
    assert tally.ends["left"] > 0

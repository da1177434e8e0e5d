"""How much of the prompts each prefix cache finds computed, with each eviction policy, when memory is short.

The real engine, scheduler, allocator and memory with a model that computes nothing, so only tokens are counted. The
share found is of all prompt tokens; what is found is not prefilled. Branches of one context that run at the same time
share it under every cache that could give it to them.

    python -m pytest benchmarks/memory/test_prefix_caches.py -s
"""

from __future__ import annotations

import os

import pytest

from benchmarks.memory.blank import answers, blank_engine, request
from benchmarks.memory.workloads import LOADS, replay, serve

CACHES = ("exact", "hash", "radix")
POLICIES = ("lru", "lfu", "fifo", "slru", "priority", "cost_aware")
ARMS = [("none", "lru"), *((cache, policy) for cache in CACHES for policy in POLICIES)]
KV_TOKENS = 12_288
TRACE = "mooncake_conversation_trace.jsonl"
TRACE_REQUESTS = int(os.environ.get("PARTWISE_TRACE_REQUESTS", 2000))
TRACE_BLOCK, TRACE_KV_TOKENS, TRACE_AT_ONCE = 16, 131_072, 12
FOUND: dict[tuple[str, str, str], dict] = {}


def engine_of(cache: str, policy: str, kv_tokens: int, max_model_len: int = 2048):
    return blank_engine(
        {
            "kv_allocator": {"name": "paged", "page_size": 16},
            "scheduler": {"name": "continuous", "max_running": 16, "token_budget": 2048},
            "prefix_cache": {"name": cache, "eviction": policy},
        },
        kv_tokens=kv_tokens,
        max_model_len=max_model_len,
    )


def run(sessions, cache: str, policy: str, at_once: int, **sizes: int) -> dict:
    engine = engine_of(cache, policy, **sizes)
    serve(engine, sessions, at_once)
    engine.check()
    counted = engine.stats()
    return {
        "prompt": counted["prompt_tokens"],
        "saved": counted["cached_tokens"],
        "hit %": 100 * counted["cached_tokens"] / counted["prompt_tokens"],
        "evicted": counted["prefix_cache"]["evicted_pages"],
    }


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("cache", "policy"), ARMS)
def test_load(benchmark, cache, policy, load):
    def once() -> dict:
        sessions, at_once = LOADS[load]
        return run(sessions(), cache, policy, at_once, kv_tokens=KV_TOKENS)

    FOUND[load, cache, policy] = found = benchmark.pedantic(once, rounds=1)
    benchmark.extra_info.update(found)


@pytest.mark.parametrize(("cache", "policy"), [("exact", "lru"), *((c, p) for c, p in ARMS if c in ("hash", "radix"))])
def test_trace(benchmark, data_file, cache, policy):
    path = data_file(TRACE)

    def once() -> dict:
        sessions = replay(path, TRACE_REQUESTS, TRACE_BLOCK)
        return run(sessions, cache, policy, TRACE_AT_ONCE, kv_tokens=TRACE_KV_TOKENS, max_model_len=8192)

    FOUND["trace", cache, policy] = found = benchmark.pedantic(once, rounds=1)
    benchmark.extra_info.update(found)


def table(load: str) -> list[dict]:
    return [{"cache": c, "eviction": p, **found} for (of, c, p), found in FOUND.items() if of == load]


def test_shared_prefixes_are_found(results):
    for load, (sessions, at_once) in LOADS.items():
        told = " ".join(line.strip() for line in (sessions.__doc__ or "").splitlines())
        note = f"{told} {KV_TOKENS:,} tokens of memory; at most {at_once} go on at once."
        results.show(f"Prefix caches: {load}", table(load), note)
        assert FOUND[load, "none", "lru"]["saved"] == 0
        for policy in POLICIES:
            exact, pages, tree = (FOUND[load, cache, policy]["saved"] for cache in CACHES)
            assert exact < min(pages, tree)


def test_trace_prefixes_are_found(results, data_file):
    data_file(TRACE)
    results.show(
        "Prefix caches: a conversation trace replayed",
        table("trace"),
        f"The first {TRACE_REQUESTS:,} requests of Mooncake's conversation trace by its hash ids, each block of 512 "
        f"tokens as {TRACE_BLOCK}, in order, {TRACE_AT_ONCE} at once; {TRACE_KV_TOKENS:,} tokens of memory.",
    )
    assert FOUND["trace", "exact", "lru"]["saved"] < FOUND["trace", "radix", "lru"]["saved"]


def test_an_edited_prompt(results):
    prompt = list(range(2, 514))
    asked = {"first": prompt, "same again": prompt, "one word changed": [*prompt[:256], 1, *prompt[257:]]}
    rows = {}
    for cache in CACHES:
        engine = engine_of(cache, "lru", 4096)
        rows[cache] = {"cache": cache}
        for name, tokens in asked.items():
            engine.add(request(name, tokens, 4))
            ((_, rows[cache][name]),) = answers(engine)
    results.show(
        "Prefix caches: an edited prompt",
        rows.values(),
        "Prompt tokens found of 512, page 16; the word changed is the 257th. The last token is always computed.",
    )
    for cache, found in rows.items():
        assert list(found.values())[1:] == [0, 496, 0 if cache == "exact" else 256]

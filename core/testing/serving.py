"""A part at work in the real engine, over tiny models, beside the null parts and beside busy ones."""

from __future__ import annotations

import random
import time
import unittest
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from core.recipe import Recipe, RecipeError
from core.types import Event, Request, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from core.engine import Engine
    from core.testing.suite import Suite

    _Base = Suite
else:
    _Base = object

TIE = 1e-3
"""Two best logits closer than this may change places between shapes of one sum."""
MAX_TOKENS = 20
MAX_STEPS = 3000

NULL: dict[str, str] = {
    "attention.structure": "native",
    "attention.kernel": "eager",
    "kv_allocator": "contiguous",
    "scheduler": "static",
    "quantizer.weights": "none",
    "quantizer.kv": "none",
    "prefix_cache": "none",
    "prefix_cache.eviction": "lru",
    "drafter": "none",
    "context_reduction": "none",
}
BUSY: dict[str, str] = {
    **NULL,
    "attention.kernel": "sdpa",
    "kv_allocator": "paged",
    "scheduler": "continuous",
    "prefix_cache": "radix",
    "drafter": "ngram",
}


@dataclass(slots=True)
class Served:
    """What each request came to."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class SameOutput(_Base):
    """Checks that run the engine."""

    def test_l2_serves_every_request(self) -> None:
        for model, around in (("plain", NULL), ("plain", BUSY), ("windowed", BUSY)):
            served = self._served(model, around)
            assert not served.errors, f"{self._where(model, around)}: {next(iter(served.errors.values()))}"
            for name, tokens in served.tokens.items():
                reason = served.reasons[name]
                assert reason in ("length", "stop"), f"{self._where(model, around)}: {name} ends by {reason}"
                assert reason == "stop" or len(tokens) == MAX_TOKENS, f"{name} ends after {len(tokens)} tokens"

    def test_l2_output_equals_the_null_parts(self) -> None:
        if "lossless" not in self.card.provides:
            raise unittest.SkipTest("does not declare lossless: its output may differ")
        for model, around in (("plain", NULL), ("plain", BUSY), ("windowed", BUSY)):
            assert_same(served_by_null_parts(model), self._served(model, around), self._where(model, around))

    def _served(self, model: str, around: dict[str, str]) -> Served:
        try:
            key = tuple(sorted({**around, self.seam: self.part}.items()))
            options = tuple(sorted((k, repr(v)) for k, v in self.options.items()))
            asked = _Unhashed(dict(self.options))
            return _serve_once(model, key, self.seam, options, self.plugin_path, self.page_size, asked)
        except RecipeError as error:
            if model == "windowed":
                raise unittest.SkipTest(f"does not work with this model: {error}") from None
            raise

    def _where(self, model: str, around: dict[str, str]) -> str:
        return f"{model} model, {'null' if around is NULL else 'busy'} parts beside it"


class _Unhashed(dict[str, Any]):
    """Options that ride along in a cached call, whose key holds them in another form."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@lru_cache(maxsize=64)
def _serve_once(
    model: str,
    parts: tuple[tuple[str, str], ...],
    seam: str,
    options_key: tuple[tuple[str, str], ...],
    plugin_path: str | None,
    page_size: int,
    options: _Unhashed,
) -> Served:
    given = {seam: dict(options)}
    return serve(recipe_of(dict(parts), model, options=given, plugin_path=plugin_path, page_size=page_size))


@lru_cache
def served_by_null_parts(model: str) -> Served:
    return serve(recipe_of(NULL, model))


def recipe_of(
    parts: dict[str, str],
    model: str,
    *,
    options: dict[str, dict[str, Any]] | None = None,
    plugin_path: str | None = None,
    page_size: int = 4,
    kv_tokens: int = 160,
) -> Recipe:
    """A small recipe in which memory is short: `kv_tokens`, or 10 pages if that is more, for requests of up to 60."""
    from core.testing.tiny_model import KV_BYTES_PER_TOKEN, tiny_model

    def slot(seam: str) -> dict[str, Any]:
        return {"name": parts[seam], "options": (options or {}).get(seam, {})}

    allocator, cache = slot("kv_allocator"), slot("prefix_cache")
    allocator["options"].setdefault("page_size", page_size)
    cache["eviction"] = slot("prefix_cache.eviction")
    scheduler = slot("scheduler")
    scheduler["options"] = {"max_running": 4, "token_budget": 16, **scheduler["options"]}
    return Recipe.model_validate(
        {
            "name": "conformance",
            "model": {"path": str(tiny_model(model))},
            "attention": {"structure": slot("attention.structure"), "kernel": slot("attention.kernel")},
            "kv_allocator": allocator,
            "scheduler": scheduler,
            "quantizer": {"weights": slot("quantizer.weights"), "kv": slot("quantizer.kv")},
            "prefix_cache": cache,
            "drafter": slot("drafter"),
            "context_reduction": slot("context_reduction"),
            "memory": {"kv_bytes": max(kv_tokens, 10 * page_size) * KV_BYTES_PER_TOKEN},
            "engine": {"max_model_len": 80, "threads": 1, "seed": 0},
            "plugin_path": plugin_path,
        }
    )


def prompts() -> list[tuple[int, ...]]:
    """Short and long, repetitive and not, some with a common start."""
    source = random.Random(3)
    shared = tuple(source.randrange(2, 64) for _ in range(13))
    texts = [(5,), (9, 9), shared, (*shared, 7, 8), (*shared[:8], 30, 31, 32), (4, 6, 4, 6, 4, 6, 4, 6)]
    texts += [tuple(source.randrange(2, 64) for _ in range(n)) for n in (16, 17, 37)]
    return [*texts, shared]


def greedy(id: str, prompt: tuple[int, ...], salt: str = "") -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2)
    return Request(id, prompt, params, time.monotonic(), cache_salt=salt)


def serve(recipe: Recipe) -> Served:
    """Serve the prompts in two waves; the pages are counted after every step."""
    from core.build import build_engine

    engine = build_engine(recipe)
    try:
        served = Served()
        waves = [list(enumerate(prompts())), list(enumerate(prompts()))[::3]]
        for wave, texts in enumerate(waves):
            for n, prompt in texts:
                engine.add(greedy(f"w{wave}-p{n}", prompt, salt="b" if wave and n % 2 else ""))
            drain(engine, served)
        return served
    finally:
        engine.close()


def drain(engine: Engine, served: Served) -> None:
    """Step until nothing is left, and count the pages after every step."""
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return
        for event in engine.step():
            note(served, event)
        engine.check()
    raise AssertionError(f"requests are still running after {MAX_STEPS} steps")


def note(served: Served, event: Event) -> None:
    served.tokens.setdefault(event.id, []).extend(event.tokens)
    served.logprobs.setdefault(event.id, []).extend(event.logprobs)
    if event.finish_reason:
        served.reasons[event.id] = event.finish_reason
    if event.error:
        served.errors[event.id] = event.error


def assert_same(expected: Served, found: Served, where: str) -> None:
    """Equal tokens; from a tie on, a request may go its own way."""
    for name, tokens in expected.tokens.items():
        for position, (right, got) in enumerate(zip(tokens, found.tokens[name], strict=False)):
            if right == got:
                continue
            best = expected.logprobs[name][position].top
            if best[0][1] - best[1][1] > TIE:
                raise AssertionError(f"{where}: {name} gets token {got} at {position}, the null parts give {right}")
            break

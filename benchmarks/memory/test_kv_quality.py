"""What each KV format and context reduction costs in quality, against the bytes that the cache really holds.

SmolLM2-135M over windows of 768 tokens of WikiText-2's test text: the first 512 are the prompt, then the engine
decodes and is given the text's own next token instead of the best one, so that every logit comes from the cache as it
is stored, token by token. Beside them the same engine continues some of the prompts freely. Bytes are those of the
pages that sequences hold while decoding, for each token of their context, those forgotten included. Weights are the
file's own, computed exactly; the reference keeps keys and values in fp32.

An arm takes a minute or two of one core. What it found is kept in pytest's cache, so the arms may run one at a time
(`-k int4`), and the table is of all that were run since `--cache-clear`.

    python -m pytest benchmarks/memory/test_kv_quality.py -s
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from torch import Tensor

from core.build import assemble, build_engine
from core.compose import compose
from core.engine import Engine
from core.kv import shared_bytes
from core.lab.quality import TOP, Answers, Step, compare
from core.models.source import read_spec, resolve
from core.models.tokenizer import load_tokenizer
from core.recipe import resolve as resolve_parts
from core.runner import Row, Runner
from core.sampling import token_logprobs
from core.types import Batch, Request, SamplingParams, TokenLogprob

WINDOWS, PROMPT, FORCED = 8, 512, 256
FREE, GENERATED = 3, 48
TEXT = "wikitext2_test.txt"
WORDS = [
    "attention.kernel=sdpa",
    "quantizer.weights=native",
    "scheduler=continuous",
    f"scheduler.max_running={WINDOWS + FREE}",
    "scheduler.token_budget=256",
    "memory.kv_bytes=2GiB",
    "engine.max_model_len=768",
    "engine.threads=1",
]
REFERENCE = "fp32"
ARMS = {
    REFERENCE: [],
    "int8": ["quantizer.kv=int8"],
    "fp8_e4m3": ["quantizer.kv=fp8_e4m3"],
    "int4": ["quantizer.kv=int4"],
    **{
        f"{name}, {budget} tokens": [f"context_reduction={name}", *words]
        for budget in (256, 128)
        for name, words in {
            "sink_window": ["context_reduction.sinks=16", f"context_reduction.window={budget - 16}"],
            "h2o": [f"context_reduction.recent={budget // 2}", f"context_reduction.heavy={budget // 2}"],
            "snapkv": [f"context_reduction.budget={budget}"],
        }.items()
    },
    "h2o by head, 128 tokens": [
        "kv_allocator=paged_per_head",
        "context_reduction=h2o",
        "context_reduction.recent=64",
        "context_reduction.heavy=64",
    ],
}
KEPT = "partwise/kv_quality/"


class TeacherForced(Runner):
    """A runner after which some sequences get their next token from a text; `steps` keeps how likely it was."""

    def __init__(self, runner: Runner, texts: dict[str, Sequence[int]]) -> None:
        vars(self).update(vars(runner))
        self._texts = texts
        self.steps: dict[str, list[Step]] = {id: [] for id in texts}

    def run(self, batch: Batch, rows: Sequence[Row] = ()) -> tuple[Tensor, Tensor]:
        hidden, logits = super().run(batch, rows)
        logits = logits.clone()
        sampled = [row for row in rows if row.samples]
        for line, row in enumerate(sampled):
            text = self._texts.get(row.seq.request.id)
            if text is not None:
                token = text[row.seq.num_tokens]
                (found,) = token_logprobs(logits[line : line + 1], [token], TOP)
                self.steps[row.seq.request.id].append(_step(found))
                logits[line, token] = logits[line].max() + 1
        return hidden, logits


def _step(found: TokenLogprob) -> Step:
    return Step(f"{found.token}", found.logprob, {f"{token}": logprob for token, logprob in found.top})


def held_bytes(engine: Engine) -> int:
    """Of the pages that sequences hold, and of what a format keeps beside them."""
    return sum(
        pages.n_held * pages.allocator.page_bytes + shared_bytes(pages.pool.group, pages.pool.format)
        for pages in engine.memory.groups
    )


def judge(engine: Engine, windows: list[list[int]]) -> tuple[Answers, float]:
    """The answers, and bytes held for each token of context."""
    texts = {f"text-{n}": window for n, window in enumerate(windows)}
    engine.runner = forced = TeacherForced(engine.runner, texts)
    free: dict[str, list[Step]] = {f"free-{n}": [] for n in range(FREE)}
    for id, tokens in [*texts.items(), *zip(free, windows, strict=False)]:
        n_tokens, top = (FORCED, None) if id in texts else (GENERATED, TOP)
        params = SamplingParams(temperature=0.0, max_tokens=n_tokens, ignore_eos=True, logprobs=top)
        engine.add(Request(id, tuple(tokens[:PROMPT]), params, time.monotonic()))
    sizes = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            free.get(event.id, []).extend(map(_step, event.logprobs))
        decoding = all(seq.remaining == 1 for seq in engine.running) and not engine.waiting
        if decoding and engine.running:
            sizes.append(held_bytes(engine) / sum(seq.num_tokens for seq in engine.running))
    assert all(len(steps) == FORCED for steps in forced.steps.values())
    return Answers(list(free.values()), list(forced.steps.values())), statistics.mean(sizes)


@pytest.fixture(scope="module")
def windows(data_file) -> list[list[int]]:
    text = data_file(TEXT).read_text(encoding="utf-8")
    tokenizer = load_tokenizer(resolve(read_spec(compose("baseline").model)))
    tokens = tokenizer.encode(text[: (WINDOWS + 2) * 1024 * 8])
    apart = len(tokens) // WINDOWS
    assert apart >= PROMPT + FORCED
    return [list(tokens[n * apart : n * apart + PROMPT + FORCED]) for n in range(WINDOWS)]


@pytest.fixture(scope="module")
def model() -> Any:
    return build_engine(compose("baseline", WORDS)).runner.model


@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arm", ARMS)
def test_quality(benchmark, arm, windows, model, pytestconfig):
    own = ARMS[arm]
    allocator = [] if "kv_allocator=paged_per_head" in own else ["kv_allocator=paged"]
    recipe = compose("baseline", [*WORDS, *own, *allocator])
    registry = recipe.registry()
    engine = assemble(recipe, resolve_parts(recipe, registry), registry, model)
    found = benchmark.pedantic(judge, args=(engine, windows), rounds=1)
    pytestconfig.cache.set(KEPT + arm, msgspec.to_builtins(found))


def draw(rows: list[dict], path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for row in rows:
        point = row["KiB a token"], row["perplexity"]
        axis.plot(*point, "o")
        axis.annotate(row["kept"], point, (4, 4), textcoords="offset points", fontsize=8)
    axis.set(xlabel="KiB held a token of context", ylabel="perplexity", xlim=0)
    figure.tight_layout()
    figure.savefig(path)


def test_quality_against_bytes(results, pytestconfig):
    kept = {arm: pytestconfig.cache.get(KEPT + arm, None) for arm in ARMS}
    found = {arm: msgspec.convert(one, tuple[Answers, float]) for arm, one in kept.items() if one}
    if REFERENCE not in found:
        pytest.skip(f"{REFERENCE} has not run yet")
    reference, whole = found[REFERENCE]
    rows = []
    for arm, (answers, size) in found.items():
        quality = compare(answers, reference)
        rows.append({
            "kept": arm,
            "KiB a token": round(size / 1024, 1),
            "bytes %": 100 * size / whole,
            "perplexity": quality.perplexity,
            "ratio": f"{quality.perplexity_ratio:.4f}",
            "KL nats": f"{quality.kl:.6f}",
            "greedy agreement %": 100 * quality.agreement,
        })  # fmt: skip
    picture = results.picture("kv_quality.svg")
    if picture:
        draw(rows, picture)
    results.show(
        "KV formats and context reductions: quality against bytes",
        [{**row, "perplexity": f"{row['perplexity']:.3f}"} for row in rows],
        f"{WINDOWS} windows of WikiText-2, {FORCED} tokens judged after {PROMPT} each; {FREE} prompts continued by "
        f"{GENERATED} tokens, agreement counted up to the first difference.",
        "kv_quality.svg",
    )
    if len(found) < len(ARMS):
        pytest.skip(f"not run yet: {', '.join(arm for arm in ARMS if arm not in found)}")
    by_arm = {row["kept"]: row for row in rows}
    assert by_arm[REFERENCE]["greedy agreement %"] == 100
    assert by_arm["int8"]["bytes %"] < 30 and by_arm["int8"]["perplexity"] < 1.01 * by_arm[REFERENCE]["perplexity"]
    assert by_arm["int4"]["bytes %"] < by_arm["fp8_e4m3"]["bytes %"] < 30
    for name in ("sink_window", "h2o", "snapkv"):
        small, large = by_arm[f"{name}, 128 tokens"], by_arm[f"{name}, 256 tokens"]
        assert small["bytes %"] < large["bytes %"] < 75
        assert all(math.isfinite(row["perplexity"]) for row in (small, large))

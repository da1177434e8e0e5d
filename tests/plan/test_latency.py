"""Step times against arithmetic by hand and published formulas, and what must only grow or shrink."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.plan import Efficiency, Load, PlanError, Roofline, load_device, load_model
from core.plan.catalogue import read_device
from core.plan.figures import assumed
from core.plan.latency import (
    attended,
    expected_tokens,
    expected_tokens_by_position,
    speculation_speedup,
)
from core.plan.recipe import Recipe, Speculation

PERFECT = Efficiency(
    **{n: assumed(1.0, "fraction", "") for n in ("bandwidth", "rate", "kv_bandwidth", "attention_rate")},
    overhead=assumed(0.0, "s", ""),
    sequence_overhead=assumed(0.0, "s", ""),
)
SMALL_MODELS = [
    "smollm2-135m",
    "gemma-3-4b",
    "mistral-7b",
    "gpt-oss-20b",
    "deepseek-v2-lite",
    "deepseek-v3.2",
]


def roofline(model: str = "mistral-7b", device: str = "h100-sxm", **changes: object) -> Roofline:
    return Roofline(load_model(model), load_device(device), Recipe(**changes), PERFECT)


def test_one_decode_step_by_hand() -> None:
    """Mistral-7B, 16-bit, one sequence of 4,096: all but the input embedding is read once."""
    step = roofline().step(Load(sequences=1, context=4096))
    embedding = 32768 * 4096
    weights = 2 * (7_248_023_552 - embedding) + 2 * 4096
    kv = 4097 * 131_072
    assert step.weight_bytes == weights
    assert step.kv_bytes == kv
    assert step.seconds == pytest.approx((weights + kv) / 3350e9)
    norms = 65 * 4096
    assert step.linear_operations == 2 * (7_248_023_552 - embedding - norms)
    assert step.attention_operations == 4 * 32 * 4096 * 4096
    assert step.bound == "memory bandwidth (weights)"
    assert 0.9 < step.intensity < 1.2


def test_a_large_batch_of_short_sequences_is_bound_by_the_matrix_rate() -> None:
    step = roofline().step(Load(sequences=1000, context=16))
    assert step.bound == "matrix rate"
    assert step.product_seconds == pytest.approx(step.linear_operations / 989e12)
    few, ridge = roofline().step(Load(sequences=250, context=1)), 989e12 / 3350e9
    assert few.bound == "memory bandwidth (weights)"
    assert roofline().ridge == pytest.approx(ridge) == pytest.approx(295, abs=0.5)


def test_long_contexts_are_bound_by_kv() -> None:
    assert roofline().step(Load(sequences=32, context=30_000)).bound == "memory bandwidth (KV)"


def test_prefill_by_hand() -> None:
    """2,048 tokens on Llama-2-7B: two operations a parameter and token, the head once, causal attention."""
    step = roofline("llama-2-7b", prompt=2048, chunk=None).prefill_alone()
    layers = 6_738_415_616 - 2 * 32000 * 4096 - 65 * 4096
    assert step.linear_operations == 2 * layers * 2048 + 2 * 32000 * 4096
    assert step.attention_operations == 32 * 4 * 4096 * (2048 * 2049 / 2)
    assert step.seconds == pytest.approx((step.linear_operations + step.attention_operations) / 989e12)


def test_attended_pairs_are_counted_one_by_one() -> None:
    group = load_model("mistral-7b-v0.1").groups[0]
    full = load_model("mistral-7b").groups[0]
    for past, tokens in ((0, 1), (0, 5000), (4090, 10), (5000, 3), (100, 4000)):
        assert attended(past, tokens, group) == sum(min(past + i, 4096) for i in range(1, tokens + 1))
        assert attended(past, tokens, full) == sum(past + i for i in range(1, tokens + 1))


def test_chunks_do_the_same_attention_as_one_prompt() -> None:
    r = roofline()
    whole = r.step(Load(chunk=1024)).attention_operations
    parts = sum(r.step(Load(chunk=256, past=past)).attention_operations for past in range(0, 1024, 256))
    assert parts == whole


def test_sparse_attention_reads_the_chosen_tokens_and_all_index_keys() -> None:
    r = roofline("deepseek-v3.2", "h200", tp=8)
    short, long = (r.step(Load(sequences=1, context=n)) for n in (4096, 8192))
    assert long.kv_bytes - short.kv_bytes == 4096 * 8_052


def test_experts_are_read_as_far_as_they_are_hit() -> None:
    """One token of gpt-oss-20b hits 4 of 32 experts; many tokens hit them all: 1 - (1 - 4/32)^n."""
    r = roofline("gpt-oss-20b")
    experts = load_model("gpt-oss-20b").weight_bytes("checkpoint", "experts")
    one, many = (r.step(Load(sequences=n, context=1)).weight_bytes for n in (1, 2))
    biases = 2 * 24 * 32 * (2 * 2880 + 2880)
    embedding_row = 2 * 2880
    more = (1 - 0.875**2) - (1 - 0.875)
    assert many - one == pytest.approx((experts + biases) * more + embedding_row)
    rng = np.random.default_rng(0)
    hits = [len({e for _ in range(6) for e in rng.choice(32, 4, replace=False)}) / 32 for _ in range(4000)]
    assert np.mean(hits) == pytest.approx(1 - 0.875**6, abs=0.01)


def test_eight_bit_products_use_the_eight_bit_rate_where_there_is_one() -> None:
    load = Load(chunk=4096)
    sixteen, eight = (roofline(weights=w).step(load) for w in ("bf16", "fp8"))
    quantized = 2 * 6_979_321_856 * 4096
    saved = quantized / 989e12 - quantized / 1978e12
    assert sixteen.product_seconds - eight.product_seconds == pytest.approx(saved)
    on_a100 = [roofline(device="a100-80", weights=w).step(load).product_seconds for w in ("bf16", "fp8")]
    assert on_a100[0] == on_a100[1]


def test_four_bit_weights_are_read_faster_but_multiplied_in_sixteen_bits() -> None:
    load = Load(sequences=1, context=128)
    sixteen, four = (roofline(weights=w).step(load) for w in ("bf16", "int4"))
    assert four.stream_seconds < 0.32 * sixteen.stream_seconds
    assert four.product_seconds == sixteen.product_seconds


def test_tensor_parallelism_splits_work_and_pays_for_all_reduces() -> None:
    """Two ring all-reduces a layer of [tokens, hidden] in 16 bits, over 450 GB/s in one direction."""
    one, four = (roofline(tp=n).step(Load(sequences=8, context=1024)) for n in (1, 4))
    assert one.communication_seconds == 0
    assert four.communication_seconds == pytest.approx(2 * 3 / 4 * 2 * 32 * 8 * 4096 * 2 / 450e9)
    assert four.kv_bytes == one.kv_bytes / 4
    assert four.seconds < one.seconds


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one token"):
        roofline().step(Load())


def test_a_device_without_a_rate_is_refused_with_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"a10g has no dense matrix rate for bf16 or fp32.*devices=FILE"):
        roofline(device="a10g")


def test_efficiencies_slow_a_step_down_by_their_share() -> None:
    half = PERFECT.model_copy(update={"bandwidth": assumed(0.5, "fraction", "")})
    load = Load(sequences=1, context=1)
    step = Roofline(load_model("mistral-7b"), load_device("l4"), Recipe(), half).step(load)
    assert step.stream_seconds == pytest.approx(2 * roofline(device="l4").step(load).stream_seconds)


# Speculation


def test_expected_tokens_is_leviathans() -> None:
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616)
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))
    assert expected_tokens(0.0, 4) == 1
    assert speculation_speedup(0.8, 4, 0.0) == pytest.approx(3.3616)
    assert speculation_speedup(0.8, 4, 0.1) == pytest.approx(3.3616 / 1.4)


def test_expected_tokens_against_simulated_drafts() -> None:
    rng = np.random.default_rng(1)
    accepted = rng.random((200_000, 5)) < 0.7
    assert expected_tokens(0.7, 5) == pytest.approx(1 + np.cumprod(accepted, axis=1).sum(1).mean(), abs=0.01)
    chances = [0.9, 0.6, 0.3]
    accepted = rng.random((200_000, 3)) < chances
    simulated = 1 + np.cumprod(accepted, axis=1).sum(1).mean()
    assert expected_tokens_by_position(chances) == pytest.approx(simulated, abs=0.01)
    assert expected_tokens_by_position([0.8] * 4) == pytest.approx(expected_tokens(0.8, 4))


def test_speculation_gains_what_is_published_while_bound_by_memory_and_loses_it_at_a_large_batch() -> None:
    draft = Speculation(accept=0.8, tokens=4, cost=0.05)
    with_draft, without = roofline(speculation=draft), roofline()
    gains = [without.token_seconds(n, 64) / with_draft.token_seconds(n, 64) for n in (1, 16, 128, 1024)]
    assert gains[0] == pytest.approx(speculation_speedup(0.8, 4, 0.05), rel=0.01)
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1


def test_chunks_shorten_the_pause_of_running_streams_and_lengthen_the_first_token() -> None:
    whole, chunked = roofline(prompt=8192, chunk=None), roofline(prompt=8192, chunk=256)
    pause = [r.token_seconds(16, 1024, *r.last_chunk) for r in (whole, chunked)]
    first = [r.prefill(16, 1024) for r in (whole, chunked)]
    assert pause[1] < pause[0] / 10
    assert first[1] > first[0]


def test_a_shared_prefix_is_not_prefilled_again() -> None:
    alone, shared = roofline(prompt=4096), roofline(prompt=4096, prefix_share=0.75)
    assert shared.prefill() < 0.3 * alone.prefill()
    assert shared.prefill_alone().linear_operations < 0.26 * alone.prefill_alone().linear_operations


loads = st.builds(
    Load,
    sequences=st.integers(0, 300),
    context=st.integers(1, 6000),
    each=st.integers(1, 8),
    chunk=st.integers(0, 2000),
    past=st.integers(0, 4000),
)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(SMALL_MODELS), loads)
def test_a_step_lies_between_the_whole_roofline_and_the_sum_of_all_times(name: str, load: Load) -> None:
    assume(load.tokens)
    step = roofline(name).step(load)
    sum_of_all = step.stream_seconds + step.product_seconds + step.kv_seconds + step.attention_seconds
    whole = max(step.stream_seconds + step.kv_seconds, step.product_seconds + step.attention_seconds)
    assert whole <= step.seconds * (1 + 1e-12)
    assert step.seconds <= sum_of_all * (1 + 1e-12)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(SMALL_MODELS), loads, st.integers(0, 50), st.integers(0, 500), st.integers(0, 500))
def test_more_work_never_takes_less_time(
    name: str, load: Load, sequences: int, context: int, chunk: int
) -> None:
    assume(load.tokens)
    r = roofline(name)
    more = Load(load.sequences + sequences, load.context + context, load.each, load.chunk + chunk, load.past)
    assert r.step(load).seconds <= r.step(more).seconds * (1 + 1e-12)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SMALL_MODELS), loads, st.floats(1, 4), st.floats(1, 4))
def test_a_better_device_is_never_slower(name: str, load: Load, bandwidth: float, rate: float) -> None:
    assume(load.tokens)
    entry = {"source": "made up", "date": "2026-01-01", "memory": "80 GB"}
    plain = read_device("plain", {**entry, "bandwidth": "2000 GB/s", "rates": {"bf16": "400 TFLOP/s"}})
    better = read_device(
        "better",
        {
            **entry,
            "bandwidth": f"{2000 * bandwidth:.6f} GB/s",
            "rates": {"bf16": f"{400 * rate:.6f} TFLOP/s"},
        },
    )
    times = [Roofline(load_model(name), d, Recipe(), PERFECT).step(load).seconds for d in (plain, better)]
    assert times[1] <= times[0] * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(SMALL_MODELS), loads)
def test_smaller_formats_never_slow_a_decode_down(name: str, load: Load) -> None:
    assume(load.tokens)
    times = [
        roofline(name, "l4", weights=w, kv=k).step(load).seconds
        for w, k in (("bf16", "bf16"), ("bf16", "fp8"), ("int8", "fp8"), ("int4", "int4"))
    ]
    assert times[1] <= times[0] * (1 + 1e-12)
    assert times[2] <= times[1] * (1 + 1e-12)
    if load.chunk == 0 and load.sequences < 20:
        assert times[3] <= times[1] * (1 + 1e-12)

"""Users, contexts, pages, sharing, waste and the first fix."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.plan import PlanError, load_device, load_model, load_recipe, plan_memory
from core.plan.catalogue import known_models
from core.plan.formats import KV_FORMATS, WEIGHT_FORMATS, kv_format
from core.plan.memory import Budget, kv_bytes, largest, plan_waste
from core.plan.recipe import Recipe

MODELS = sorted(known_models())
SMALL_MODELS = [
    "smollm2-135m",
    "qwen2.5-3b",
    "gemma-3-4b",
    "mistral-7b-v0.1",
    "gpt-oss-20b",
    "deepseek-v2-lite",
]
DEVICES = ["l4", "a100-80", "h200"]


def budget(model: str = "mistral-7b", device: str = "a100-80", **changes: object) -> Budget:
    return Budget(load_model(model), load_device(device), Recipe(**changes))


def test_users_by_hand() -> None:
    """Mistral-7B on 80 GB: 72 GB may be used, 14.496 are weights, a sequence of 4,096 tokens holds 0.537."""
    b = budget(prompt=4096, output=1, chunk=1)
    assert b.weight_bytes == 2 * 7_248_023_552
    assert b.sequence_bytes(4096) == 4096 * 131_072
    activations = b.activation_bytes(100) / 100
    by_hand = (72e9 - b.weight_bytes) / (4096 * 131_072 + activations)
    assert b.users_at(4096) == pytest.approx(by_hand, abs=1)
    assert b.needed(b.users_at(4096), 4096) <= b.total < b.needed(b.users_at(4096) + 1, 4096)


def test_activations_are_no_less_than_the_logits() -> None:
    assert budget().activation_bytes(64) > 64 * 32768 * 4


def test_pages_round_up() -> None:
    paged = budget(page=16)
    assert paged.sequence_bytes(1) == paged.sequence_bytes(16) == 16 * 131_072
    assert paged.sequence_bytes(17) == 32 * 131_072
    assert budget(allocator="contiguous").sequence_bytes(17) == 17 * 131_072


def test_a_window_holds_the_pages_it_may_touch() -> None:
    """A window of 4,096 that starts inside a page touches 257 pages of 16."""
    b = budget("mistral-7b-v0.1", page=16)
    assert b.sequence_bytes(30_000) == 257 * 16 * 131_072
    assert b.sequence_bytes(4096) == 256 * 16 * 131_072


def test_a_contiguous_allocator_knows_no_windows() -> None:
    assert budget("mistral-7b-v0.1", allocator="contiguous").sequence_bytes(30_000) == 30_000 * 131_072


def test_a_shared_prefix_is_kept_once() -> None:
    b = budget(prompt=1000, output=24, prefix_share=0.5, page=16)
    assert b.shared_tokens(1024) == 496
    assert b.shared_bytes(1024) == 496 * 131_072
    assert b.sequence_bytes(1024) == (1024 - 496) * 131_072
    alone = budget(prompt=1000, output=24)
    assert b.needed(10, 1024) - alone.needed(10, 1024) == -9 * 496 * 131_072


def test_tensor_parallelism_splits_heads_as_far_as_they_go() -> None:
    """Qwen2.5-7B has 28 query heads and four of keys and values, which repeat beyond four devices."""
    token = 57_344
    for tp, share in ((1, 1), (2, 2), (4, 4), (7, 4), (28, 4)):
        b = budget("qwen2.5-7b", tp=tp)
        assert sum(b.token_bytes(g) for g in b.model.groups) == token / share
    whole, half = budget("qwen2.5-7b"), budget("qwen2.5-7b", tp=2)
    norms_and_biases = 2 * (57 * 3584 + 28 * (3584 + 2 * 512))
    assert half.weight_bytes == (whole.weight_bytes + norms_and_biases) / 2


def test_heads_must_split_evenly() -> None:
    with pytest.raises(PlanError, match="tp=3 does not divide the 32 heads of mistral-7b"):
        budget(tp=3)


def test_waste_by_allocator() -> None:
    contiguous, paged = plan_waste(Recipe(prompt=512, output=256, output_limit=1024, page=16))
    assert contiguous.share == pytest.approx(1 - 640 / 1536)
    assert paged.share == pytest.approx(7.5 / 647.5)


def test_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(PlanError, match="40,000 tokens are beyond the 32,768 that mistral-7b takes"):
        plan_memory(load_model("mistral-7b"), load_device("h200"), load_recipe("baseline"), context=40_000)


def test_a_request_beyond_the_model_is_refused_whatever_context_is_asked_for() -> None:
    with pytest.raises(PlanError, match="5,120 tokens are beyond the 4,096 that llama-2-7b takes"):
        plan_memory(load_model("llama-2-7b"), load_device("h200"), load_recipe("async_agents"), context=1000)


@pytest.mark.parametrize(
    ("device", "recipe", "users", "context", "fix"),
    [
        ("h100-sxm", {}, 150, 4096, "recipe.kv=fp8"),
        ("l4", {"kv": "fp8"}, 30, 4096, "recipe.weights=fp8"),
        ("a100-80", {"kv": "fp8"}, 220, 4096, "recipe.weights=int8"),
        ("l4", {"kv": "fp8"}, 60, 4096, "recipe.weights=int4"),
        ("l4", {}, 80, 4096, "recipe.tp=4"),
        ("l4", {}, 4000, 4096, "at most 13 users of 4,096 tokens"),
    ],
)
def test_the_first_fix(device: str, recipe: dict[str, object], users: int, context: int, fix: str) -> None:
    model, card = load_model("mistral-7b"), load_device(device)
    plain = Recipe(prompt=1024, chunk=512, **recipe)
    memory = plan_memory(model, card, plain, users, context)
    assert not memory.fits
    assert memory.missing_bytes > 0
    assert memory.fix == fix
    if fix.startswith("recipe."):
        key, value = fix.removeprefix("recipe.").split("=")
        fixed = plain.model_copy(update={key: int(value) if value.isdigit() else value})
        assert plan_memory(model, card, fixed, users, context).fits


def test_a_contiguous_allocator_is_not_the_first_thing_to_blame_when_pages_do_not_help() -> None:
    recipe = Recipe(allocator="contiguous", chunk=512)
    memory = plan_memory(load_model("mistral-7b"), load_device("h100-sxm"), recipe, 150, 4096)
    assert memory.fix == "recipe.kv=fp8"


def test_a_model_that_never_fits_says_how_much_is_missing() -> None:
    memory = plan_memory(load_model("llama-3.1-405b"), load_device("l4"), load_recipe("baseline"))
    assert memory.users == memory.longest_context == 0
    assert memory.fix is not None
    assert "a larger device" in memory.fix


@given(limit=st.integers(0, 5000), edge=st.integers(-5, 5100))
def test_largest_is_a_linear_search(limit: int, edge: int) -> None:
    assert largest(lambda n: n <= edge, limit) == max(
        (n for n in range(1, limit + 1) if n <= edge), default=0
    )


contexts = st.integers(1, 8000)
recipes = st.builds(
    Recipe,
    kv=st.sampled_from(sorted(KV_FORMATS)),
    weights=st.sampled_from(["checkpoint", "bf16", "int8", "int4"]),
    page=st.sampled_from([1, 16, 64, 256]),
    prefix_share=st.sampled_from([0.0, 0.3, 0.9]),
    prompt=st.integers(1, 4000),
    chunk=st.sampled_from([None, 128, 2048]),
    tp=st.just(1),
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SMALL_MODELS), st.sampled_from(DEVICES), recipes, contexts, contexts)
@example("smollm2-135m", "l4", Recipe(page=16, prefix_share=0.3, prompt=54), 1, 16)
def test_more_context_never_fits_more_users(name: str, device: str, recipe: Recipe, a: int, b: int) -> None:
    this = Budget(load_model(name), load_device(device), recipe)
    short, long = sorted((a, b))
    assert this.users_at(long) <= this.users_at(short)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SMALL_MODELS), recipes, st.integers(1, 200), st.integers(1, 200))
def test_more_users_never_have_more_context(name: str, recipe: Recipe, a: int, b: int) -> None:
    this = Budget(load_model(name), load_device("a100-80"), recipe)
    few, many = sorted((a, b))
    assert this.context_at(many) <= this.context_at(few)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(SMALL_MODELS), recipes, st.integers(0, 100), st.integers(1, 4000))
def test_what_fits_is_what_is_counted(name: str, recipe: Recipe, users: int, context: int) -> None:
    """`users_at` and `needed` agree: that many fit and one more does not."""
    this = Budget(load_model(name), load_device("l4"), recipe)
    most = this.users_at(context)
    if most:
        assert this.needed(most, context) <= this.total
    assert this.needed(most + 1, context) > this.total


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(MODELS), contexts, st.sampled_from(sorted(KV_FORMATS)))
def test_pages_hold_at_least_what_is_kept(name: str, context: int, kv: str) -> None:
    model = load_model(name)
    this = Budget(model, load_device("h200"), Recipe(kv=kv, page=16))
    held, kept = this.sequence_bytes(context), kv_bytes(model, kv_format(kv), context)
    assert kept <= held
    groups = sum(g.token_bytes(kv_format(kv)) for g in model.groups)
    assert held - kept < 32 * groups


@pytest.mark.parametrize("name", MODELS)
def test_fewer_bits_never_cost_more_memory(name: str) -> None:
    model = load_model(name)
    weights = {n: model.weight_bytes(n) for n in WEIGHT_FORMATS}
    for a in WEIGHT_FORMATS.values():
        for b in WEIGHT_FORMATS.values():
            if a.bits < b.bits:
                assert weights[a.name] <= weights[b.name]
    kv = {n: kv_bytes(model, kv_format(n), 1000) for n in KV_FORMATS}
    assert kv["int2"] < kv["int4"] < kv["fp8"] < kv["bf16"] < kv["fp32"]


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith("deepseek")])
def test_kv_of_a_sequence_layer_by_layer(name: str) -> None:
    """The groups' closed form against counting every layer's tokens."""
    model = load_model(name)
    s = model.shape
    for tokens in (1, 127, 128, 129, 5000):
        kept = sum(min(tokens, w) if w else tokens for w in s.windows)
        assert kv_bytes(model, kv_format("bf16"), tokens) == kept * 2 * s.kv_heads * s.head_dim * 2


def test_pages_of_a_long_sequence() -> None:
    b = budget("gemma-3-4b", page=64)
    full = ceil(10_000 / 64) * 64 * 20_480
    window = (ceil(1023 / 64) + 1) * 64 * 118_784
    assert b.sequence_bytes(10_000) == full + window

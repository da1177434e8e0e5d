"""Targets, the batch they allow, rates, cost, traffic and the ranking."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.plan import (
    Load,
    Plan,
    PlanError,
    Roofline,
    load_device,
    load_model,
    load_recipe,
    make_plan,
    own_price,
    rank,
)
from core.plan.plan import Server
from core.plan.recipe import RECIPES, Recipe, Speculation

PRICE = own_price(2.0, "2026-11-30")


def planned(
    model: str = "mistral-7b", device: str = "h100-sxm", *, traffic: float | None = None, **changes
) -> Plan:
    return make_plan(load_model(model), load_device(device), Recipe(**changes), price=PRICE, traffic=traffic)


def server(model: str = "mistral-7b", device: str = "h100-sxm", **changes) -> Server:
    return Server(Roofline(load_model(model), load_device(device), Recipe(**changes)))


CASES = [
    {"goal": "latency", "itl_ms": 20, "ttft_ms": 300, "prompt": 2048},
    {"goal": "latency", "itl_ms": 12, "prompt": 512, "chunk": 128},
    {"goal": "latency", "ttft_ms": 200, "prompt": 4096, "chunk": 512},
    {"goal": "latency", "prompt": 1024},
    {
        "goal": "latency",
        "itl_ms": 15,
        "speculation": Speculation(accept=0.7, tokens=3, cost=0.05),
        "chunk": 128,
    },
]


@pytest.mark.parametrize("case", CASES)
def test_latency_first_takes_the_largest_batch_that_meets_the_targets(case: dict[str, object]) -> None:
    this = server(**case)
    good = [n for n in range(1, this.users + 1) if not this.misses(n)]
    assert this.choose() == max(good)
    assert good == list(range(1, max(good) + 1))
    serving = planned(**case).serving
    assert serving is not None
    assert serving.batch == max(good)
    assert serving.itl_in_prefill_seconds <= case.get("itl_ms", 1e9) / 1e3
    assert serving.ttft_seconds <= case.get("ttft_ms", 1e9) / 1e3


@pytest.mark.parametrize("case", CASES)
def test_throughput_first_takes_the_best_rate(case: dict[str, object]) -> None:
    this = server(**{**case, "goal": "throughput"})
    good = [n for n in range(1, this.users + 1) if not this.misses(n)]
    assert this.rate(this.choose()) == pytest.approx(max(this.rate(n) for n in good), rel=1e-3)


def test_what_limits_the_batch_is_named() -> None:
    assert planned(goal="latency", itl_ms=12, chunk=128).serving.limited_by == "itl_ms"
    assert planned(goal="latency", ttft_ms=150, prompt=4096).serving.limited_by == "ttft_ms"
    assert planned(goal="latency", prompt=8192).serving.limited_by == "memory"
    assert planned(goal="latency", max_batch=8).serving.limited_by == "max_batch"


@pytest.mark.parametrize(("output", "chunk"), [(64, 256), (256, 256), (512, 512), (256, None), (64, 4096)])
def test_the_rate_by_simulation(output: int, chunk: int | None) -> None:
    """A closed loop of 24 streams, step by step; prompts take a step's chunk in their order."""
    prompt, batch = 1024, 24
    this = server(prompt=prompt, output=output, chunk=chunk)
    context = prompt + output // 2
    written = [output * i // batch for i in range(batch)]
    waiting: list[int] = []
    done, clock = 0, 0.0
    while done < 400:
        room = chunk or prompt
        load = Load(len(written), context, 1, min(room, sum(waiting)), prompt - waiting[0] if waiting else 0)
        clock += this.roofline.step(load).seconds
        written = [n + 1 for n in written]
        while waiting and room:
            taken = min(room, waiting[0])
            room -= taken
            waiting[0] -= taken
            if waiting[0] == 0:
                waiting.pop(0)
                written.append(0)
        finished = sum(n >= output for n in written)
        written = [n for n in written if n < output]
        waiting += [prompt] * finished
        done += finished
    assert this.rate(batch) == pytest.approx(done / clock, rel=0.12)


def test_littles_law() -> None:
    """Requests in the system are the rate times the time in it: prefill, then `output` tokens."""
    plan = planned(goal="latency", itl_ms=20, ttft_ms=300, utilization=0.5)
    s = plan.serving
    assert s.rate == 0.5 * s.full_rate
    decode = s.batch / s.full_rate
    assert s.in_system == pytest.approx(s.rate * (s.ttft_seconds + decode))
    assert decode >= plan.recipe.output * s.itl_seconds
    assert s.output_tokens_per_second == pytest.approx(s.rate * 256)


def test_cost_by_hand() -> None:
    plan = planned(utilization=0.5, prompt=1000, output=100)
    s, c = plan.serving, plan.cost
    request = 2.0 / 3600 / s.rate
    assert c.per_request == pytest.approx(request)
    assert c.input_per_million * 1000 / 1e6 + c.output_per_million * 100 / 1e6 == pytest.approx(request)
    assert c.blended_per_million == pytest.approx(request / 1100 * 1e6)
    assert c.output_per_million > c.input_per_million


def test_cost_counts_every_device_of_a_replica() -> None:
    four = planned("llama-3.1-70b", tp=4, traffic=100)
    assert four.cost.per_request == pytest.approx(4 * 2.0 / 3600 / four.serving.rate)
    assert four.traffic.replicas == ceil(100 / four.serving.rate)
    assert four.traffic.devices == 4 * four.traffic.replicas
    assert four.traffic.usd_per_hour == 2.0 * four.traffic.devices


def test_impossible_targets_say_which_and_the_best() -> None:
    plan = planned(device="l4", goal="latency", itl_ms=5, ttft_ms=1)
    assert plan.serving is None
    assert not plan.ok
    assert [i.target for i in plan.impossible] == ["itl_ms", "ttft_ms"]
    itl, ttft = plan.impossible
    best_step = server(device="l4", chunk=32).itl_in_prefill(1)
    assert itl.wanted == "5.00 ms"
    assert itl.best == f"{best_step * 1e3:.2f} ms at batch 1"
    assert itl.advice is None
    assert "at batch 1" in ttft.best


def test_a_smaller_chunk_is_advised_when_it_would_do() -> None:
    plan = planned(goal="latency", itl_ms=9, prompt=4096, chunk=4096)
    (target,) = plan.impossible
    assert target.target == "itl_ms"
    key, chunk = target.advice.split("=")
    assert key == "recipe.chunk"
    assert planned(goal="latency", itl_ms=9, prompt=4096, chunk=int(chunk)).ok
    assert not planned(goal="latency", itl_ms=9, prompt=4096, chunk=2 * int(chunk)).ok


def test_a_smallest_batch_that_does_not_fit_is_a_target_too() -> None:
    plan = planned(device="l4", min_batch=200, prompt=4096)
    (target,) = plan.impossible
    assert target.target == "min_batch"
    assert int(target.best) < 200
    key, devices = target.advice.split("=")
    assert key == "recipe.tp"
    assert planned(device="l4", min_batch=200, prompt=4096, tp=int(devices)).serving.batch >= 200


def test_ranking_orders_by_cost_and_says_why() -> None:
    names = ["l4", "a100-80", "h100-sxm", "mi300x", "a10g", "rtx-4090"]
    plans: list[tuple[str, Plan | PlanError]] = []
    for name in names:
        try:
            plans.append(
                (name, make_plan(load_model("llama-3.1-8b"), load_device(name), load_recipe("premium_chat")))
            )
        except PlanError as error:
            plans.append((name, error))
    ranking = rank(plans)
    costs = [r.plan.cost.blended_per_million for r in ranking if r.plan and r.plan.ok and r.plan.cost]
    assert costs == sorted(costs)
    reasons = {r.name: r.reason for r in ranking}
    assert set(reasons) == set(names)
    assert reasons["h100-sxm"] == "the lowest cost a token"
    assert "times the cost a token" in reasons["a100-80"]
    assert "no price with a date" in reasons["mi300x"]
    assert "no dense matrix rate" in reasons["a10g"]
    assert "itl_ms" in reasons["l4"]
    assert [r.name for r in ranking].index("mi300x") > [r.name for r in ranking].index("a100-80")


def test_a_dearer_hour_can_be_the_cheaper_token() -> None:
    recipe = load_recipe("async_agents")
    small, large = (make_plan(load_model("mistral-7b"), load_device(d), recipe) for d in ("l4", "h100-sxm"))
    assert large.cost.price.usd_per_hour > small.cost.price.usd_per_hour
    assert large.cost.blended_per_million < small.cost.blended_per_million


@pytest.mark.parametrize("name", [p.stem for p in RECIPES.glob("*.yaml")])
def test_every_recipe_plans(name: str) -> None:
    plan = make_plan(load_model("mistral-7b"), load_device("h100-sxm"), load_recipe(name), traffic=10)
    assert plan.ok
    assert plan.traffic.devices >= 1
    assert set(Recipe.model_fields) == set(load_recipe(name).model_dump())


def test_recipes_say_what_is_wrong() -> None:
    with pytest.raises(PlanError, match="unknown recipe 'premum_chat'; did you mean premium_chat"):
        load_recipe("premum_chat")
    with pytest.raises(PlanError, match="unknown recipe key 'kvs'; did you mean kv"):
        load_recipe("baseline", kvs="fp8")
    with pytest.raises(PlanError, match="unknown KV format 'fp9'; did you mean fp8"):
        load_recipe("baseline", kv="fp9")
    with pytest.raises(PlanError, match=r"output_limit \(10\) is below the average output"):
        load_recipe("baseline", output_limit=10)
    with pytest.raises(PlanError, match="prefix_share needs allocator=paged"):
        load_recipe("baseline", prefix_share=0.5)
    with pytest.raises(PlanError, match=r"recipe\.utilization: .*less than or equal to 1"):
        load_recipe("baseline", utilization=1.5)


cases = st.fixed_dictionaries(
    {
        "prompt": st.integers(16, 4000),
        "output": st.integers(1, 800),
        "chunk": st.sampled_from([None, 128, 1024]),
        "kv": st.sampled_from(["bf16", "fp8"]),
        "speculation": st.sampled_from([None, Speculation(accept=0.6, tokens=4, cost=0.1)]),
    }
)


@settings(deadline=None, max_examples=25)
@given(cases, st.floats(5, 200), st.floats(1, 5))
def test_a_looser_target_never_shrinks_the_batch(case: dict[str, object], itl: float, factor: float) -> None:
    tight, loose = (server(goal="latency", itl_ms=ms, **case).choose() for ms in (itl, itl * factor))
    assert tight <= loose


@settings(deadline=None, max_examples=25)
@given(cases)
def test_a_larger_batch_never_speeds_a_stream_up(case: dict[str, object]) -> None:
    this = server(**case)
    batches = this.candidates(max(this.users, 1))
    for time in (this.itl, this.itl_in_prefill, this.ttft):
        times = [time(n) for n in batches]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))

"""The pictures show what the plan says, and the page needs nothing but itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from core.plan import Plan, load_device, load_model, load_recipe, make_plan, rank
from core.plan.catalogue import read_device
from core.plan.memory import Budget
from core.plan.pictures import cost_by_itl, roofline, users_by_context, write_report
from core.plan.report import summary


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    model, recipe = load_model("mistral-7b"), load_recipe("async_agents")
    return [make_plan(model, load_device(d), recipe) for d in ("h100-sxm", "l40s")]


def test_the_roofline_has_its_ridge_and_its_steps_below_it(plans: list[Plan]) -> None:
    plan = plans[0]
    roof, decode, prefill = roofline(plan).axes[0].lines
    assert max(roof.get_ydata()) == pytest.approx(0.6 * 989)
    slope = 0.8 * 3350e9 / 1e12
    for line, step in ((decode, plan.decode), (prefill, plan.prefill)):
        (x,), (y,) = line.get_xdata(), line.get_ydata()
        assert x == pytest.approx(step.intensity)
        assert y <= min(slope * x, 0.6 * 989)


def test_users_fall_with_context_and_rise_with_smaller_formats(plans: list[Plan]) -> None:
    plan = plans[0]
    lines = {
        line.get_label(): dict(zip(*line.get_data(), strict=True))
        for line in users_by_context(plan).axes[0].lines
    }
    assert set(lines) >= {
        "native, KV fp8",
        "native, KV bf16",
        "native, KV int4",
        "mha, KV fp8",
        "mla, KV fp8",
    }
    for line in lines.values():
        users = [line[n] for n in sorted(line)]
        assert users == sorted(users, reverse=True)
    assert lines["native, KV bf16"][4096] < lines["native, KV fp8"][4096] < lines["native, KV int4"][4096]
    assert lines["mha, KV fp8"][4096] < lines["native, KV fp8"][4096] < lines["mla, KV fp8"][4096]
    recipe = plan.recipe.model_copy(update={"prefix_share": 0.0, "kv": "bf16"})
    assert lines["native, KV bf16"][4096] == Budget(plan.model, plan.device, recipe).users_at(4096)


def test_the_planned_batch_lies_on_its_cost_curve(plans: list[Plan]) -> None:
    lines = cost_by_itl(plans).axes[0].lines
    assert [line.get_label() for line in lines[::2]] == ["h100-sxm", "l40s"]
    for plan, star in zip(plans, lines[1::2], strict=True):
        assert star.get_ydata()[0] == pytest.approx(plan.cost.blended_per_million)
    curve = lines[0]
    assert curve.get_ydata()[-1] == pytest.approx(plans[0].cost.blended_per_million, rel=0.05)


def test_the_page_is_self_contained(plans: list[Plan], tmp_path: Path) -> None:
    ranking = rank([(p.device.name, p) for p in plans])
    written = write_report(tmp_path / "out", plans, ranking)
    assert all(p.stat().st_size > 1000 for p in written)
    for path in written[:3]:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = written[3].read_text()
    assert page.count("<svg") == 3
    assert summary(plans[0]) in page
    assert "Ranking by cost a token" in page

    links: list[str] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            assert tag not in ("script", "link", "img", "iframe")
            links.extend(v or "" for k, v in attributes if k in ("src", "href", "xlink:href"))

    Links().feed(page)
    assert all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)", page)


def test_a_plan_that_fits_nothing_still_has_a_page_and_names_are_escaped(tmp_path: Path) -> None:
    figures = {"source": "sheet", "date": "2026-01-01", "memory": "100 MB", "bandwidth": "1 GB/s"}
    device = read_device("<b>small", {**figures, "rates": {"bf16": "1 TFLOP/s"}})
    plan = make_plan(load_model("mistral-7b"), device, load_recipe("premium_chat"))
    page = write_report(tmp_path, [plan], [])[3].read_text()
    assert "a larger device" in page
    assert "<b>small" not in page
    assert "&lt;b&gt;small" in page

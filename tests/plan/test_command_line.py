"""`python -m core.plan` as a stranger uses it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from core.plan import __main__ as command_line
from core.plan.recipe import Recipe

ROOT = Path(__file__).parents[2]


class Run:
    """Runs the command in this process, in an empty folder that must stay empty."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            command_line.main()
        out, err = self.capsys.readouterr()
        return int(stop.value.code or 0), out, err

    def json(self, *arguments: str) -> Any:
        status, out, err = self("--json", *arguments)
        assert status in (0, 1), err
        return json.loads(out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield Run(capsys, monkeypatch)
    assert list(folder.iterdir()) == []


def test_a_plan_as_tables(run: Run) -> None:
    status, out, err = run("model=mistral-7b", "gpu=h100-sxm", "recipe=premium_chat")
    assert (status, err) == (0, "")
    assert out.startswith("mistral-7b on h100-sxm, recipe premium_chat: ")
    for part in (
        "Weights",
        "Memory of one device",
        "Waste by allocator",
        "Serving, one replica",
        "Cost at $",
    ):
        assert part in out


def test_a_plan_as_json(run: Run) -> None:
    plan = run.json("model=mistral-7b", "gpu=h100-sxm", "traffic=50")
    assert plan["ok"] is True
    assert plan["memory"]["weight_bytes"] == {"value": 14_496_047_104, "unit": "B", "kind": "derived"}
    assert plan["device"]["bandwidth"]["value"] == 3350e9
    assert plan["device"]["bandwidth"]["kind"] == "given"
    assert plan["efficiency"]["rate"]["kind"] == "assumed"
    assert plan["traffic"]["devices"]["value"] >= 1
    assert plan["recipe"]["kv"] == {"value": "bf16", "kind": "given"}


def test_every_number_has_a_kind(run: Run) -> None:
    plan = run.json("model=gemma-3-4b", "gpu=l4", "traffic=5")
    kinds = {"given", "measured", "derived", "assumed"}
    bare = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            if value.get("kind") in kinds and "value" in value:
                return
            for key, inner in value.items():
                walk(inner, f"{path}.{key}")
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                walk(inner, f"{path}[{i}]")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            bare.append(path)

    walk(plan, "")
    assert {path.rpartition(".")[2] for path in bare} <= {"usd_per_hour"}


def test_overrides_of_a_recipe(run: Run) -> None:
    plain = run.json("model=mistral-7b", "gpu=a100-80")
    eight = run.json("model=mistral-7b", "gpu=a100-80", "recipe.kv=fp8")
    assert eight["memory"]["kv_token_bytes"]["value"] * 2 == plain["memory"]["kv_token_bytes"]["value"]


def test_users_that_do_not_fit(run: Run) -> None:
    status, out, _ = run("model=mistral-7b", "gpu=l4", "users=80", "context=4096")
    assert status == 1
    first = out.splitlines()[0]
    assert "80 of 4,096 tokens need 35.97 GB more memory, 13 fit; what would help: recipe.tp=4" in first


def test_a_sweep_is_one_ranking(run: Run) -> None:
    status, out, _ = run("-m", "model=mistral-7b", "gpu=l4,l40s,a100-80,h100-sxm,h200")
    assert status == 0
    assert out.count("Ranking by cost a token") == 1
    for name in ("l4", "l40s", "a100-80", "h100-sxm", "h200"):
        assert name in out


def test_a_sweep_over_anything_names_what_differs(run: Run) -> None:
    ranking = run.json("-m", "model=mistral-7b", "gpu=h100-sxm", "recipe.kv=bf16,fp8")
    assert {entry["name"] for entry in ranking} == {"recipe.kv=bf16", "recipe.kv=fp8"}
    ranking = run.json("-m", "model=mistral-7b,llama-3.1-8b", "gpu=h100-sxm,l40s", "recipe=async_agents")
    assert len(ranking) == 4
    assert {"model=mistral-7b h100-sxm", "model=llama-3.1-8b l40s"} <= {entry["name"] for entry in ranking}


def test_all_devices_and_lists_of_them(run: Run) -> None:
    everything = run.json("model=mistral-7b", "gpu=all", "recipe=async_agents")
    assert len(everything) == 15
    assert all(entry["reason"] for entry in everything)
    assert [e["name"] for e in run.json("model=mistral-7b", "gpu=[l4,h100-sxm]", "recipe=async_agents")] == [
        "h100-sxm",
        "l4",
    ]


def test_a_report_is_written_only_when_asked_for(run: Run, tmp_path: Path) -> None:
    status, _, err = run("model=mistral-7b", "gpu=h100-sxm", f"output={tmp_path / 'report'}")
    assert status == 0
    names = sorted(p.name for p in (tmp_path / "report").iterdir())
    assert names == ["cost_by_itl.png", "report.html", "roofline.png", "users_by_context.png"]
    assert all(name in err for name in names)


def test_lists_of_what_is_known(run: Run) -> None:
    assert "gpt-oss-120b" in run("models")[1]
    assert "rtx-pro-6000" in run("devices")[1]
    assert {row["device"] for row in run.json("devices")} >= {"l4", "h200"}


def test_flags_go_anywhere(run: Run) -> None:
    status, out, _ = run("model=mistral-7b", "gpu=l40s,h100-sxm", "-m", "--json")
    assert status == 0
    assert len(json.loads(out)) == 2


def test_ones_own_price(run: Run) -> None:
    plan = run.json("model=mistral-7b", "gpu=mi300x", "price=1.5", "price_date=2026-11-30")
    assert plan["cost"]["price"] == {
        "usd_per_hour": 1.5, "date": "2026-11-30", "provider": "yours", "source": "given",
    }  # fmt: skip


BAD = [
    ([], "name a model, for example model=mistral-7b"),
    (["model=mistral-7b"], "name a device, for example gpu=h100-sxm"),
    (["model=mistrel-7b", "gpu=l4"], "unknown model 'mistrel-7b'; did you mean mistral-7b"),
    (["model=mistral-7b", "gpu=h100"], "unknown device 'h100'; did you mean h100-"),
    (["-m", "model=mistral-7b", "gpu=l4,l5"], "unknown device 'l5'"),
    (
        ["model=mistral-7b", "gpu=l4", "recipe=premum_chat"],
        "unknown recipe 'premum_chat'; did you mean premium_chat",
    ),
    (["model=mistral-7b", "gpu=l4", "recipe.kvs=fp8"], "unknown recipe key 'kvs'; did you mean kv"),
    (["model=mistral-7b", "gpu=l4", "kv=fp8"], "'kv' belongs to the recipe: write recipe.kv=fp8"),
    (["model=mistral-7b", "gpu=l4", "contxt=8"], "unknown option 'contxt'; did you mean context"),
    (["model=mistral-7b", "gpu=l4", "users=many"], "users: Input should be a valid integer"),
    (["model=mistral-7b", "gpu=l4", "users=0"], "users: Input should be greater than or equal to 1"),
    (["model=mistral-7b", "gpu=l4", "recipe.tp=5"], "tp=5 does not divide the 32 heads"),
    (["model=mistral-7b", "gpu=l4", "recipe.structure=xyz"], "unknown attention structure 'xyz'"),
    (["model=mistral-7b", "gpu=l4", "price=2"], "a price without a date is refused"),
    (["model=mistral-7b", "gpu=l4", "context=99999"], "99,999 tokens are beyond the 32,768"),
    (["model=mistral-7b", "gpu=a10g"], "a10g has no dense matrix rate"),
    (["model=mistral-7b", "calibration=none.json"], "none.json cannot be read"),
    (
        ["calibrate", "model=smollm2-135m"],
        "calibrate measures the engine recipe's own model",
    ),
    (["calibrate", "engine=baselin"], "baselin"),
    (["calibrat"], "unknown command 'calibrat'; did you mean calibrate"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_bad_input(run: Run, arguments: list[str], reason: str) -> None:
    status, out, err = run(*arguments)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert reason in err
    assert "Traceback" not in err


def test_recipe_names_in_the_command_are_those_of_the_library() -> None:
    from omegaconf import OmegaConf

    for path in (Path(command_line.CONF) / "recipe").glob("*.yaml"):
        assert set(OmegaConf.load(path)) == set(Recipe.model_fields)


def test_the_library_needs_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys, core.plan as p\n"
        "p.make_plan(p.load_model('mistral-7b'), p.load_device('l4'), p.load_recipe('baseline'))\n"
        "loaded = {m.split('.')[0] for m in sys.modules}\n"
        "heavy = {'torch', 'transformers', 'hydra', 'matplotlib', 'gguf', 'plugins', 'kernels'}\n"
        "assert not loaded & heavy, loaded & heavy\n"
        "others = {m for m in sys.modules if m.startswith('core.') and not m.startswith('core.plan')}\n"
        "assert others <= {'core.names'}, others\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "core.plan", "model=mistral-7b", "gpu=h100-sxm"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith("mistral-7b on h100-sxm")
    assert done.stderr == ""

"""The suites themselves: each part that is broken on purpose fails the checks that are named for it, and no other."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase

from core.testing import SUITES, conformance, hypothesis_settings, suite_for
from core.testing.suite import level_of, run

FOLDER = Path(__file__).parent / "broken"
INTEGRATED = {
    "l2_serves_every_request",
    "l2_output_equals_the_null_parts",
    "l3_any_order",
    "l3_any_batch",
    "l3_any_numbers",
}
"""Checks that many faults trip; they run where the table names them."""

UNTRIPPED = {"prefix_cache.eviction": {"l2_output_equals_the_null_parts"}}
"""What goes first cannot change output, only which prompts are computed again."""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FILES = {path: load(path) for path in sorted(FOLDER.glob("broken_*.py"))}
BROKEN = [
    pytest.param(path, card, expected, id=f"{card.seam}-{card.name}")
    for path, module in FILES.items()
    for card in module.CARDS
    for expected in [next((v for part, v in module.BROKEN.items() if part.__name__ == card.name), set())]
]


@pytest.fixture(autouse=True)
def found_is_enough(monkeypatch):
    """Failing examples need not be made small here."""
    monkeypatch.setattr(hypothesis_settings, "PHASES", [Phase.generate])


@pytest.mark.parametrize(("path", "card", "expected"), BROKEN)
def test_fails_the_named_checks_only(path, card, expected):
    right = not expected

    def runs(check: str) -> bool:
        name = check.removeprefix("test_")
        if level_of(check) == 0:
            return not name.startswith(("l0_importing", "l0_loads"))
        return right or name in expected or (level_of(check) < 4 and name not in INTEGRATED)

    outcomes = list(run(conformance(card.seam, card.name, plugin_path=str(path)), keep=runs))
    failed = {o.check.removeprefix("test_"): o.detail for o in outcomes if o.status == "failed"}
    assert failed.keys() == expected, failed
    assert all(failed.values()), "a failure must say what is wrong"


@pytest.mark.parametrize("seam", SUITES)
def test_every_seam_has_broken_parts_for_its_checks(seam):
    tables = [module.BROKEN for module in FILES.values() if module.CARDS[0].seam == seam]
    assert sum(len(table) for table in tables) >= 4
    caught = {check for table in tables for expected in table.values() for check in expected}
    checks = {name.removeprefix("test_") for name in suite_for(seam).checks() if level_of(name) > 0}
    assert checks - caught == UNTRIPPED.get(seam, set()), (
        "no part fails these checks, so nothing shows that they can fail"
    )

"""The contract does not change without saying so: public signatures against their snapshot, and what loads."""

import copy
import json
import re

import pytest

from core.interfaces import SEAMS, PluginInfo, plugin
from core.registry import PartError, Registry
from core.testing import conformance
from core.testing.suite import run
from tests.contract.surface import REQUIRED, SNAPSHOT, change, snapshot, stepped, surface

NOW = snapshot()
KEPT = json.loads(SNAPSHOT.read_text())
RENEW = "then run `python -m tests.contract.surface`"


def test_every_seam_is_kept():
    assert KEPT.keys() == SEAMS.keys(), f"seams came or went; {RENEW}"


@pytest.mark.parametrize("seam", SEAMS)
def test_a_change_steps_the_version(seam):
    kept, now = KEPT[seam], NOW[seam]
    needed = change(kept["surface"], now["surface"])
    given = stepped(tuple(kept["version"]), SEAMS[seam])
    order = ["none", "minor", "major"]
    assert order.index(given) >= order.index(needed), (
        f"the interface of {seam} changed ({_difference(kept['surface'], now['surface'])}): step the {needed} number "
        f"of its version in core.interfaces.plugin.SEAMS, {RENEW}"
    )
    assert needed == "none" and given == "none", f"{seam} changed with its version; {RENEW}"


def _difference(before, after):
    names = {(owner, name) for surface in (before, after) for owner in surface for name in surface[owner]}
    changed = (n for n in names if before.get(n[0], {}).get(n[1]) != after.get(n[0], {}).get(n[1]))
    return ", ".join(f"{owner}.{name}" for owner, name in sorted(changed))


def test_the_surface_holds_what_parts_rely_on():
    scheduler = surface("scheduler")
    assert scheduler["Scheduler"]["plan"].endswith(REQUIRED)
    assert "memory: Memory" in scheduler["Scheduler"]["plan"]
    assert not scheduler["Scheduler"]["removed"].endswith(REQUIRED)
    assert {"Queues", "Budget", "Memory", "Plan", "Scheduled", "SequenceView", "PluginInfo"} <= scheduler.keys()
    assert scheduler["Scheduled"]["n_tokens"] == "int" + REQUIRED
    assert "Draft" not in scheduler
    assert surface("drafter")["DrafterOptions"]["k"].endswith("= 4")


BASE = {"Part": {"do": "(self) -> int" + REQUIRED}}


@pytest.mark.parametrize(
    ("owner", "name", "member", "needed"),
    [
        ("Part", "more", "(self) -> int", "minor"),
        ("Part", "more", "(self) -> int" + REQUIRED, "major"),
        ("Part", "do", "(self, x: int) -> int" + REQUIRED, "major"),
        ("Part", "do", None, "major"),
        ("Another", "field", "int" + REQUIRED, "minor"),
    ],
)
def test_steps_by_kind_of_change(owner, name, member, needed):
    after = copy.deepcopy(BASE)
    if member is None:
        del after[owner][name]
    else:
        after.setdefault(owner, {})[name] = member
    assert change(BASE, after) == needed
    assert change(BASE, BASE) == "none"


@pytest.mark.parametrize(
    ("now", "api", "fault"),
    [
        ((2, 1), (2, 1), None),
        ((2, 1), (2, 0), None),
        ((2, 1), (1, 0), None),
        ((2, 1), (1, 9), None),
        ((2, 1), (2, 2), "update partwise"),
        ((2, 1), (3, 0), "update partwise"),
        ((2, 1), (0, 9), "update the part"),
        ((1, 0), (1, 0), None),
        ((1, 0), (1, 1), "update partwise"),
        ((1, 0), (0, 9), "update the part"),
    ],
)
def test_the_major_version_before_still_loads(monkeypatch, tmp_path, now, api, fault):
    """And level 0 of the suite says the same as the registry."""
    monkeypatch.setitem(plugin.SEAMS, "scheduler", now)
    path = tmp_path / f"api_{'_'.join(map(str, (*now, *api)))}.py"
    path.write_text(
        "from core.interfaces import PluginInfo, SchedulerOptions\n"
        "CARD = PluginInfo(name='old', seam='scheduler', part='plugins.scheduler.static:StaticScheduler',\n"
        f"    options=SchedulerOptions, summary='Old', api={api})\n"
    )
    registry = Registry(path)
    suite = conformance("scheduler", "old", plugin_path=str(path))
    checked = {outcome.status: outcome.detail for outcome in run(suite, {0}, lambda name: "card" in name)}
    if fault is None:
        assert isinstance(registry.info("scheduler", "old"), PluginInfo)
        assert registry.load("scheduler", "old").__name__ == "StaticScheduler"
        assert "failed" not in checked and "passed" in checked
    else:
        told = f"API {api[0]}.{api[1]}.*this is {now[0]}.{now[1]}: {fault}"
        with pytest.raises(PartError, match=told):
            registry.info("scheduler", "old")
        assert re.search(told, checked["failed"])

"""Parts that cannot be used: one clear error each, which names the distribution and says what is wrong."""

import json

import pytest

from core.compose import compose
from core.plugins.cli import main
from core.plugins.doctor import examine
from core.recipe import RecipeError, resolve
from core.registry import PartError, Registry
from core.testing import suite
from tests.testing.distributions import installed

CARD = """
from core.interfaces import {imports}
{before}
CARD = PluginInfo(name="{name}", seam="scheduler", part="{part}", api={api}, options={options}, summary="A test")
"""


def card(name="mine", part="mine_part:Mine", api=(1, 0), options="SchedulerOptions", before="", imports=""):
    names = ", ".join(["PluginInfo", "SchedulerOptions", *filter(None, [imports])])
    return CARD.format(name=name, part=part, api=api, options=options, before=before, imports=names)


PART = "from plugins.scheduler.static import StaticScheduler\nclass Mine(StaticScheduler): pass\n"
POINT = {"scheduler.mine": "mine_card:CARD"}
LABEL = "scheduler part 'mine' of acme-parts 1.2.3"


@pytest.fixture
def acme(tmp_path):
    """Installs acme-parts with the given card and class, for one test."""
    entered = []

    def enter(card_source=None, part_source=PART, points=None, name="acme-parts"):
        modules = {"mine_card": card_source or card(), "mine_part": part_source}
        context = installed(tmp_path, name, points or POINT, modules)
        context.__enter__()
        entered.append(context)
        suite._registry.cache_clear()  # it may have looked at what is installed for an earlier test
        return Registry()

    yield enter
    for context in reversed(entered):
        context.__exit__(None, None, None)
    suite._registry.cache_clear()


def recipe_error(*words):
    with pytest.raises(RecipeError) as caught:
        recipe = compose("baseline", list(words))
        resolve(recipe, recipe.registry())
    return str(caught.value)


def kinds(registry):
    return {(f.distribution, f.name, f.kind) for f in examine(registry) if f.distribution != "partwise"}


def test_a_good_one_works(acme):
    registry = acme()
    assert registry.load("scheduler", "mine").__name__ == "Mine"
    assert kinds(registry) == set()
    assert resolve(compose("baseline", ["scheduler=mine"]), registry)["scheduler"].distribution == "acme-parts"


def test_a_class_that_does_not_import(acme):
    registry = acme(part_source="import no_such_module\n")
    with pytest.raises(PartError) as caught:
        registry.load("scheduler", "mine")
    assert str(caught.value).startswith(LABEL) and "No module named 'no_such_module'" in str(caught.value)
    assert kinds(registry) == {("acme-parts", "mine", "import")}


def test_a_card_that_does_not_import(acme):
    registry = acme(card_source="1 / 0\n")
    assert "acme-parts 1.2.3" in recipe_error("scheduler=mine") and "ZeroDivisionError" in recipe_error(
        "scheduler=mine"
    )
    assert kinds(registry) == {("acme-parts", "mine", "card")}


def test_a_broken_part_that_no_recipe_names_stops_nothing(acme):
    acme(card_source="1 / 0\n")
    recipe = compose("baseline")
    assert resolve(recipe, recipe.registry())["scheduler"].info.name == "static"


def test_two_parts_of_one_name(acme, tmp_path):
    acme()
    with installed(tmp_path, "other-parts", {"scheduler.mine": "other_card:CARD"}, {"other_card": card()}):
        for message in (recipe_error("scheduler=mine"), examine(Registry())[0].message):
            assert "acme-parts 1.2.3" in message and "other-parts 1.2.3" in message and "uninstall" in message
        assert {f.kind for f in examine(Registry())} == {"clash"}


def test_a_part_of_our_name_does_not_replace_ours(acme):
    acme(card_source=card(name="static"), points={"scheduler.static": "mine_card:CARD"})
    assert "offered by" in recipe_error("scheduler=static")


@pytest.mark.parametrize(("api", "cure"), [((2, 0), "update partwise"), ((1, 7), "update partwise")])
def test_an_api_that_does_not_fit(acme, api, cure):
    registry = acme(card_source=card(api=api))
    if cure is None:
        assert registry.info("scheduler", "mine").api == api
        return
    message = recipe_error("scheduler=mine")
    assert LABEL in message and f"{api[0]}.{api[1]}" in message and cure in message
    assert kinds(registry) == {("acme-parts", "mine", "api")}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("+scheduler.max_runing=3", ["scheduler.max_runing", "did you mean max_running"]),
        ("scheduler.max_running=many", ["scheduler.max_running", "valid integer", "'many'"]),
        ("scheduler.max_running=0", ["scheduler.max_running", "greater than 0"]),
        ("scheduler.token_budget=1.5", ["scheduler.token_budget", "1.5"]),
        ("scheduler.token_budget=null", ["scheduler.token_budget", "None"]),
    ],
)
def test_options_that_do_not_fit(acme, word, said):
    acme()
    message = recipe_error("scheduler=mine", word)
    assert "acme-parts 1.2.3" in message
    for text in said:
        assert text in message


@pytest.mark.parametrize(
    ("point", "source", "said"),
    [
        ({"scheduler.mine": "mine_card:PluginInfo"}, card(), "must give a PluginInfo"),
        ({"scheduler.mine": "mine_card:NOTHING"}, card(), "NOTHING"),
        ({"scheduler.mine": "mine_card:CARD"}, card(name="yours"), "must agree"),
        ({"scheduler.mine": "mine_card:CARD"}, card(part="mine_part:Nobody"), "Nobody"),
        ({"scheduler.mine": "mine_card:CARD"}, card(part="mine_part:StaticScheduler.plan"), "is not a class"),
    ],
)
def test_cards_and_classes_that_are_not_what_they_should_be(acme, point, source, said):
    registry = acme(card_source=source, points=point)
    with pytest.raises(PartError) as caught:
        registry.load("scheduler", "mine")
    assert "acme-parts 1.2.3" in str(caught.value) and said in str(caught.value)
    assert len(kinds(registry)) == 1


@pytest.mark.parametrize("point", ["mine", "schedulers.mine", "scheduler."])
def test_entry_points_that_name_no_seam(acme, point):
    registry = acme(points={point: "mine_card:CARD"})
    (finding,) = examine(registry)
    assert finding.kind == "name" and "acme-parts 1.2.3" in finding.message and "<seam>.<name>" in finding.message


@pytest.mark.parametrize(
    ("source", "part", "kind", "said"),
    [
        (card(options="Options", imports="Options"), PART, "options", "SchedulerOptions"),
        (card(), "from core.interfaces import Drafter\nclass Mine(Drafter): pass\n", "class", "must derive from"),
        (card(), "from core.interfaces import Scheduler\nclass Mine(Scheduler): pass\n", "class", "lacks plan"),
    ],
)
def test_doctor_sees_what_loads_and_is_still_wrong(acme, capsys, source, part, kind, said):
    acme(card_source=source, part_source=part)
    assert main(["doctor", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["kind"] == kind and said in finding["message"] and "acme-parts" in finding["message"]


def test_the_constructor_raises(acme):
    registry = acme(part_source=PART.replace("pass", "\n    def __init__(self, *a): raise OSError('no disk')"))
    with pytest.raises(PartError, match=r"acme-parts 1\.2\.3 cannot be built: OSError: no disk"):
        registry.build("scheduler", "mine", registry.options("scheduler", "mine", {}), None)


def test_an_unknown_part_gets_near_names():
    assert "did you mean continuous" in recipe_error("scheduler=continous")


def test_all_problems_at_once(acme):
    acme(part_source="1 / 0\n")
    recipe = compose("baseline", ["scheduler=mine", "scheduler.max_running=3"])
    broken = recipe.model_copy(
        update={
            "drafter": recipe.drafter.model_copy(update={"name": "nobody"}),
            "kv_allocator": recipe.kv_allocator.model_copy(update={"options": {"page_sise": 4}}),
        }
    )
    with pytest.raises(RecipeError) as caught:
        resolve(broken, broken.registry())
    assert "nobody" in str(caught.value) and "page_sise" in str(caught.value)


# --- the card's own checks, as an author sees them ------------------------------------------------------------------


def l0(part="mine", plugin_path=None):
    from core.testing import conformance
    from core.testing.suite import run

    outcomes = list(run(conformance("scheduler", part, plugin_path=plugin_path), {0}))
    return {o.check.removeprefix("test_l0_"): o.detail for o in outcomes if o.status == "failed"}


LOOSE = "class Loose(SchedulerOptions):\n    model_config = {'extra': 'ignore', 'frozen': True}\n"
THAWED = "class Thawed(SchedulerOptions):\n    model_config = {'frozen': False}\n"
UNWRITABLE = (
    "class Unwritable(SchedulerOptions):\n"
    "    model_config = {'arbitrary_types_allowed': True}\n"
    "    what: object = object()\n"
)


@pytest.mark.parametrize(
    ("source", "part", "failed"),
    [
        (card(), PART, set()),
        (card().replace("A test", " "), PART, {"card_is_complete"}),
        (card().replace('summary="A test"', 'summary="A test", provides={"two words"}'), PART, {"card_is_complete"}),
        (card(before=LOOSE, options="Loose"), PART, {"options_are_strict"}),
        (card(before=THAWED, options="Thawed"), PART, {"options_are_strict"}),
        (card(before=UNWRITABLE, options="Unwritable"), PART, {"options_can_be_written_in_a_recipe"}),
        (card(), "from core.interfaces import Drafter\nclass Mine(Drafter): pass\n", {"class_fits_its_seam"}),
    ],
)
def test_level_0_catches(acme, monkeypatch, source, part, failed):
    acme(card_source=source, part_source=part)
    monkeypatch.setattr("core.testing.suite._new_process", lambda *a: {"heavy": [], "class": "Mine"})
    assert l0().keys() == failed, l0()


def test_level_0_sees_a_heavy_card_and_a_part_that_only_loads_here(acme, monkeypatch):
    import sys

    here = "import sys\nif 'pytest' not in sys.modules: raise ImportError('not here')\n" + PART
    acme(card_source="import torch\n" + card(), part_source=here)
    monkeypatch.setenv("PYTHONPATH", sys.path[0])
    failed = l0()
    assert failed.keys() == {"importing_the_card_is_light", "loads_in_a_spawned_process"}
    assert "not here" in failed["loads_in_a_spawned_process"]

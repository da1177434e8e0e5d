"""The arms of a study as recipes: what each switch turns on and off."""

from pathlib import Path

import pytest

import recipes as recipes_folder
from core.ablate.run import KNOWN, planned
from core.lab import recipes, words
from core.lab.designs import AGAIN
from core.lab.errors import UsageError
from core.recipe import resolve

NAMES = sorted(path.stem for path in (Path(recipes_folder.__file__).parent / "recipe").glob("*.yaml"))


def study(*given):
    return planned(words.split([*given, "quality=false"], KNOWN))


def filled(arm):
    """Part by slot; each part's options must be ones that it has."""
    made = recipes.compose(arm.words)
    resolve(made, made.registry())
    return {slot: choice.name for slot, choice in made.slots()}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "baseline"])
def test_a_ladder_leads_from_baseline_to_the_recipe(name):
    design = study(f"recipe={name}").design
    rungs = [filled(arm) for arm in design.arms if not arm.name.endswith(AGAIN)]
    assert rungs[0] == filled(recipes.Arm("baseline", "baseline"))
    assert rungs[-1] == filled(recipes.Arm(name, name))
    order = [slot for slot in recipes.ORDER if rungs[0][slot] != rungs[-1][slot]]
    for below, above, slot in zip(rungs, rungs[1:], order, strict=False):
        assert {s for s in above if above[s] != below[s]} == {slot}
    assert list(design.slots.values()) == order


def test_the_order_is_that_of_the_published_ladder():
    published = ["quantizer.weights", "kv_allocator", "scheduler", "prefix_cache", "drafter", "attention.kernel"]
    assert [slot for slot in recipes.ORDER if slot in published] == published


@pytest.mark.parametrize("design", ["ladder", "leave_one_out", "one_at_a_time", "factorial"])
def test_words_of_a_switched_slot_go_with_its_part(design):
    own = ["prefix_cache=radix", "prefix_cache.books_only=true", "scheduler=continuous", "scheduler.max_running=4"]
    made = study("recipe=baseline", f"design={design}", *own, "engine.threads=1").design
    for arm in made.arms:
        recipe = recipes.compose(arm.words)
        assert recipe.engine.threads == 1
        assert recipe.scheduler.options["max_running"] == 4, "a setting that the null part has too"
        assert recipe.prefix_cache.books_only == (recipe.prefix_cache.name == "radix")
    assert {filled(arm)["scheduler"] for arm in made.arms} == {"static", "continuous"}
    assert set(made.slots) == {"continuous", "radix (books only)"}


def test_an_option_that_only_the_switched_part_has_is_left_out_without_it():
    switches = recipes.switches("cpu_fast", ["drafter.k=2"])
    drafter = next(s for s in switches if s.slot == "drafter")
    assert drafter.on == ("drafter.k=2",)
    assert recipes.common(["drafter.k=2", "engine.threads=1"], switches) == ["engine.threads=1"]


def test_a_slot_within_a_slot_is_switched_by_itself():
    made = study("recipe=premium_chat", "prefix_cache.eviction=lfu", "design=one_at_a_time", "parts=[eviction]").design
    assert [filled(arm)["prefix_cache.eviction"] for arm in made.arms] == ["lru", "lfu", "lru"]
    assert {filled(arm)["prefix_cache"] for arm in made.arms} == {"radix"}
    with pytest.raises(UsageError, match="did you mean 'prefix_cache'"):
        study("parts=[prefix_cach]")

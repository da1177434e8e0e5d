"""What can be known without weights is told before any is loaded."""

import pytest

from core.build import build_engine, reasons
from core.recipe import MemoryConfig, RecipeError
from core.testing.serving import BUSY, recipe_of


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    monkeypatch.setattr("core.models.loading.Parts", lambda *given: pytest.fail("a weight was about to be loaded"))


def recipe(**changes):
    return recipe_of(BUSY, "plain").model_copy(update=changes)


def test_too_little_memory_for_a_page():
    with pytest.raises(RecipeError, match=r"memory.kv_bytes is 100 bytes, but a page of 4 tokens takes \d"):
        build_engine(recipe(memory=MemoryConfig(kv_bytes=100)))


def test_an_observer_that_nobody_offers():
    with pytest.raises(RecipeError, match="no observer named 'dashbord'"):
        build_engine(recipe(observers=("dashbord",)))
    assert reasons(recipe(observers=("dashbord",))) == ["there is no observer named 'dashbord'"]


def test_reasons_are_those_that_building_gives():
    wrong = recipe_of({**BUSY, "quantizer.kv": "int4"}, "plain", page_size=2)
    found = reasons(wrong)
    assert len(found) == 1 and "kv_allocator.page_size must be" in found[0]
    with pytest.raises(RecipeError) as caught:
        build_engine(wrong)
    assert found[0] in str(caught.value)
    assert reasons(recipe()) == []


def test_reasons_name_all_that_cannot_be_found():
    assert len(reasons(recipe_of({**BUSY, "drafter": "ngrm", "scheduler": "continous"}, "plain"))) == 3

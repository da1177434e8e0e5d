"""Books-only twins: all the work of a part, none of its benefit, and the same output."""

import pytest

from core.compose import compose
from core.interfaces import BuildContext, Drafter, DrafterOptions
from core.recipe import Recipe, RecipeError, resolve
from core.testing.serving import BUSY, NULL, Served, assert_same, drain, greedy, prompts, recipe_of, serve
from core.twins import TWINS, UnusedDrafter, UnusedPrefixCache
from core.types import Draft, DraftView


def recipe(seam, part, books_only):
    plain = recipe_of({**BUSY, seam: part}, "plain", kv_tokens=320)
    slot = getattr(plain, seam).model_copy(update={"books_only": books_only})
    return plain.model_copy(update={seam: slot})


def stats(recipe):
    from core.build import build_engine

    engine = build_engine(recipe)
    served = Served()
    for wave in range(3):
        for n, prompt in enumerate(prompts()):
            engine.add(greedy(f"w{wave}-p{n}", prompt))
        drain(engine, served)
    found = engine.stats()
    engine.close()
    return found


@pytest.mark.parametrize(("seam", "part"), [("prefix_cache", "radix"), ("prefix_cache", "hash"), ("drafter", "ngram")])
def test_output_is_that_of_the_null_parts(seam, part):
    assert_same(serve(recipe_of(NULL, "plain")), serve(recipe(seam, part, True)), f"{seam}={part} books only")


@pytest.mark.parametrize("part", ["radix", "hash"])
def test_a_prefix_cache_works_and_helps_nobody(part):
    real, twin, none = (stats(recipe("prefix_cache", *arm)) for arm in ((part, False), (part, True), ("none", False)))
    assert real["cached_tokens"] > 0 and twin["cached_tokens"] == none["cached_tokens"] == 0
    assert twin["computed_tokens"] > real["computed_tokens"]
    books = twin["prefix_cache"]
    assert books["lookups"] and books["inserted_pages"] and books["pages"] and not books["hit_tokens"]
    assert twin["seconds"]["prefix_cache"] > 0


def test_a_drafter_works_and_helps_nobody():
    real, twin, none = (stats(recipe("drafter", *arm)) for arm in (("ngram", False), ("ngram", True), ("none", False)))
    assert sum(real["drafted"]) > 0 and not twin["drafted"] and not none["drafted"]
    assert twin["computed_tokens"] == none["computed_tokens"]
    assert twin["seconds"]["drafter"] > 0


def test_a_twin_drafter_asks_the_real_one():
    class Spy(Drafter):
        def propose(self, views):
            return [Draft((1, 2)) for _ in views]

        def forget(self, id):
            forgotten.append(id)

    forgotten = []
    twin = UnusedDrafter(Spy(DrafterOptions(k=2), BuildContext(vocab_size=9)))
    assert twin.propose([DraftView("a", [1], 2, 0.0), DraftView("b", [1], 2, 0.0)]) == [Draft(), Draft()]
    twin.forget("a")
    assert forgotten == ["a"] and twin.options.k == 2 and twin.context.vocab_size == 9


def test_it_is_said_in_a_recipe():
    words = ["prefix_cache=radix", "prefix_cache.books_only=true", "drafter=ngram", "drafter.books_only=true"]
    composed = compose("baseline", words)
    assert composed.prefix_cache.books_only and composed.drafter.books_only and not composed.scheduler.books_only
    assert "books_only" not in composed.drafter.options
    chosen = resolve(composed, composed.registry())
    assert {seam for seam, part in chosen.items() if part.books_only} == set(TWINS)
    assert not compose("baseline").drafter.books_only


def test_a_seam_without_a_twin_says_so():
    wrong = Recipe.model_validate({"model": {}, "scheduler": {"name": "static", "books_only": True}})
    with pytest.raises(RecipeError, match="scheduler cannot be books_only; what can is prefix_cache and drafter"):
        resolve(wrong, wrong.registry())


def test_the_twins_pass_on_every_verb():
    for twin, base in ((UnusedPrefixCache, UnusedPrefixCache.__mro__[1]), (UnusedDrafter, UnusedDrafter.__mro__[1])):
        verbs = {name for name, value in vars(base).items() if callable(value) and not name.startswith("_")}
        assert verbs <= vars(twin).keys(), f"{twin.__name__} does not pass on {verbs - vars(twin).keys()}"

"""The compatibility page is what the cards of today say, and says why a pair does not work."""

from core.plugins.matrix import PAGE, page
from core.registry import Registry

CARDS = """
from core.interfaces import DrafterOptions, PluginInfo, SchedulerOptions

def card(seam, name, options=None, **about):
    part = {"scheduler": "plugins.scheduler.static:StaticScheduler", "drafter": "plugins.drafter.none:NoDrafter"}[seam]
    options = {"scheduler": SchedulerOptions, "drafter": DrafterOptions}[seam]
    return PluginInfo(name=name, seam=seam, part=part, options=options, summary="x",
                      **{key: frozenset({value}) for key, value in about.items()})

A = card("scheduler", "wants_radix", requires="prefix_cache:radix")
B = card("drafter", "wants_states", requires="states_of_no_model")
C = card("scheduler", "alone", conflicts="drafter:ngram")
"""


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    names = [line.split("|")[2].strip() for line in lines[1:]]
    return {
        (a, b): cell.strip()
        for a, line in zip(names, lines[1:], strict=True)
        for b, cell in zip(names, line.split("|")[3:-1], strict=True)
    }


def test_the_page_is_current():
    assert PAGE.read_text() == page(Registry()), "run `python -m core.plugins matrix --write`"


def test_it_says_what_else_is_needed_and_what_cannot_work(tmp_path):
    path = tmp_path / "matrix_cards.py"
    path.write_text(CARDS)
    text = page(Registry(path), distribution=None)
    cells = rows(text)
    notes = dict(line.removeprefix("- ").split(": ", 1) for line in text.splitlines() if line.startswith("- "))

    def note(a, b):
        assert cells[a, b] == cells[b, a]
        return notes.get(cells[a, b], cells[a, b])

    assert note("scheduler=static", "drafter=ngram") == "·"
    assert note("scheduler=wants_radix", "prefix_cache=radix") == "·"
    assert note("scheduler=wants_radix", "drafter=ngram") == "with prefix_cache=radix"
    assert "wants_radix needs prefix_cache:radix" in note("scheduler=wants_radix", "prefix_cache=hash")
    assert "nothing gives" in note("drafter=wants_states", "scheduler=static")
    assert "does not work with drafter:ngram" in note("scheduler=alone", "drafter=ngram")
    assert note("scheduler=alone", "drafter=none") == "·"
    assert note("scheduler=static", "scheduler=alone") == "" and cells["drafter=none", "drafter=none"] == "="

"""Prompt lookup against a search written the slow way."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.interfaces import BuildContext
from core.types import Draft, DraftView
from plugins.drafter import NgramOptions
from plugins.drafter.ngram import NgramDrafter


def drafter(n_max=4, n_min=2):
    return NgramDrafter(NgramOptions(n_max=n_max, n_min=n_min), BuildContext())


def view(tokens, k=4, id="a"):
    return DraftView(id=id, tokens=tokens, k=k, temperature=0.0)


def search(tokens, k, n_max, n_min):
    """The latest earlier occurrence of the longest run of last tokens, by looking everywhere."""
    for size in range(n_max, n_min - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[len(tokens) - size :]:
                text, at = list(tokens), begin + size
                for _ in range(k):
                    text.append(text[at])
                    at += 1
                return tuple(text[len(tokens) :])
    return ()


SMALL = st.integers(0, 2)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(SMALL, min_size=1, max_size=12),
    added=st.lists(st.lists(SMALL, min_size=1, max_size=3), max_size=6),
    k=st.integers(1, 6),
    n_min=st.integers(1, 3),
    more=st.integers(0, 2),
)
def test_finds_what_a_plain_search_finds(prompt, added, k, n_min, more):
    part, tokens = drafter(n_min + more, n_min), list(prompt)
    for step in [[], *added]:
        tokens += step
        (draft,) = part.propose([view(tokens, k)])
        assert draft.tokens == search(tokens, k, n_min + more, n_min)
        assert draft.probs is None


def test_prefers_the_longest_run_and_then_the_latest():
    tokens = [1, 2, 3, 9, 2, 3, 8, 2, 3, 7, 1, 2, 3]
    assert drafter().propose([view(tokens, 1)])[0].tokens == (9,)
    assert drafter(n_max=2).propose([view(tokens, 1)])[0].tokens == (7,)


def test_goes_on_with_a_loop():
    assert drafter().propose([view([5, 6, 5, 6, 5], 6)])[0].tokens == (6, 5, 6, 5, 6, 5)


def test_sequences_are_apart_and_forgotten():
    part = drafter()
    one, other = part.propose([view([1, 2, 3, 1, 2], id="a"), view([4, 5], id="b")])
    assert one.tokens and other == Draft()
    part.forget("a")
    part.forget("never seen")
    assert part.propose([view([7, 8], id="a")]) == [Draft()]
    assert part.propose([view([1, 2], id="b")]) == [Draft()]


def test_a_step_does_not_cost_by_the_context():
    def step_time(n_tokens):
        part, tokens = drafter(), [(i * i) % 4001 for i in range(n_tokens)]
        part.propose([view(tokens)])
        best = float("inf")
        for token in range(200):
            tokens.append(token)
            start = time.thread_time()
            part.propose([view(tokens)])
            best = min(best, time.thread_time() - start)
        return best

    assert step_time(50_000) < 5 * step_time(500) + 5e-6


def test_options_out_of_order_are_errors():
    with pytest.raises(ValueError, match=r"n_min \(5\)"):
        NgramOptions(n_max=4, n_min=5)

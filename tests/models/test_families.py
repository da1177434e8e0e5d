"""Logits of every family equal transformers', however the tokens are cut into steps."""

from __future__ import annotations

import pytest
import torch

from tests.models.harness import Session, chunked, load, prefill
from tests.models.tiny import FAMILIES, logits, make

LENGTH = 29


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    made = {}

    def pair(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            reference = make(name, folder)
            made[name] = reference, load(str(folder), max_model_len=LENGTH + 3), folder
        return made[name]

    return pair


def ids(length=LENGTH, seed=0):
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_in_one_piece(pairs, name):
    reference, model, _ = pairs(name)
    expected = logits(reference, ids())
    assert expected.std() > 0.1
    close(prefill(model, ids()), expected)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [1, 7])
def test_chunks_and_decode(pairs, name, size):
    reference, model, _ = pairs(name)
    close(chunked(model, ids(), size), logits(reference, ids()))


@pytest.mark.parametrize("name", ["llama", "gemma-2", "llama-tied"])
def test_a_step_that_wants_no_logits(pairs, name):
    assert pairs(name)[1].logits(torch.zeros(0, 48)).shape == (0, 96)


@pytest.mark.parametrize("name", FAMILIES)
def test_neighbours_do_not_matter(pairs, name):
    reference, model, _ = pairs(name)
    texts = [ids(LENGTH, 1), ids(5, 2), ids(13, 3)]
    session = Session(model, rows=3)
    cuts = [(0, 3, 9), (6, 3, 9), (7, 5, 13), (29, 5, 13)]
    parts = [[], [], []]
    done = [0, 0, 0]
    for cut in cuts:
        step = [text[a:b] for text, a, b in zip(texts, done, cut, strict=True)]
        for part, found in zip(parts, session.step(step), strict=True):
            part.append(found)
        done = list(cut)
    for text, part in zip(texts, parts, strict=True):
        close(torch.cat(part), logits(reference, text))

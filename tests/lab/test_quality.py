import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import rel_entr

from core.lab.errors import TargetError, UsageError
from core.lab.quality import Answers, QualityPlan, Step, compare, divergence, perplexity, take
from core.lab.targets import OpenAITarget


def step(token, top):
    return Step(token, math.log(top[token]), {t: math.log(p) for t, p in top.items()})


PLAIN = {"a": 0.6, "b": 0.3, "c": 0.1}
SURE = {"a": 0.9, "b": 0.06, "c": 0.04}
TIED = {"a": 0.50001, "b": 0.49999}
weights = st.lists(st.floats(0.01, 1.0), min_size=3, max_size=8)


@given(weights, weights)
def test_kl_is_scipys_when_all_tokens_are_listed(p, q):
    n = min(len(p), len(q))
    p, q = ([x / sum(v[:n]) for x in v[:n]] for v in (p, q))
    logs = [{str(i): math.log(x) for i, x in enumerate(v)} for v in (p, q)]
    assert divergence(*logs) == pytest.approx(rel_entr(p, q).sum(), abs=1e-9)
    assert divergence(logs[0], logs[0]) == pytest.approx(0, abs=1e-12)


@given(weights, weights, st.integers(1, 3))
def test_fewer_listed_tokens_never_overstate(p, q, top):
    n = min(len(p), len(q))
    p, q = ([x / sum(v[:n]) for x in v[:n]] for v in (p, q))
    logs = [{str(i): math.log(x) for i, x in enumerate(v)} for v in (p, q)]
    short = [dict(sorted(each.items(), key=lambda item: -item[1])[:top]) for each in logs]
    assert divergence(*short) <= rel_entr(p, q).sum() + 1e-9


def test_the_same_answers_lose_exactly_nothing():
    mine = Answers([[step("a", PLAIN)] * 5], [[step("a", PLAIN), step("b", PLAIN)]])
    nearly = Answers(mine.greedy, [[Step(s.token, s.logprob + 1e-7, s.top) for s in mine.given[0]]])
    for other in (mine, nearly):
        found = compare(other, mine)
        assert found.lossless and found.kl == 0.0 and found.agreement == 1.0 and found.perplexity_ratio == 1.0


def test_differences_are_counted():
    reference = Answers([[step("a", PLAIN)] * 4, [step("a", PLAIN)] * 4], [[step("a", PLAIN)]])
    other = [step("a", PLAIN), step("b", PLAIN), step("a", PLAIN), step("a", PLAIN)]
    found = compare(Answers([reference.greedy[0], other], [[step("a", SURE)]]), reference)
    assert found.agreement == pytest.approx(5 / 8), "up to the first difference"
    assert found.kl == pytest.approx(rel_entr(list(PLAIN.values()), list(SURE.values())).sum(), abs=1e-6)
    assert found.perplexity == pytest.approx(1 / 0.9)
    assert found.perplexity_ratio == pytest.approx(0.6 / 0.9)
    assert not found.lossless


def test_a_near_tie_is_no_difference():
    reference = Answers([[step("a", TIED)] * 4], [[step("a", PLAIN)]])
    found = compare(Answers([[step("b", TIED)] * 4], reference.given), reference)
    assert found.agreement == 1.0


def test_perplexity_by_hand():
    answers = Answers([], [[step("a", PLAIN), step("b", PLAIN)], [step("c", PLAIN)]])
    assert perplexity(answers) == pytest.approx((0.6 * 0.3 * 0.1) ** (-1 / 3))


def test_asking_a_server(stub, tmp_path):
    path = tmp_path / "text"
    path.write_text("some words to read " * 50)
    plan = QualityPlan(str(path), tokens=200)
    with stub() as fine, stub("--loss", "0.3") as lossy:
        reference, again = (take(OpenAITarget(fine), plan) for _ in range(2))
        worse = take(OpenAITarget(lossy), plan)
    assert compare(again, reference).lossless
    found = compare(worse, reference)
    assert found.kl > 0.05 and found.perplexity_ratio > 1.1
    assert len(reference.greedy[0]) == 32 and reference.given[0][0].token == "words", "the first token has no context"
    with pytest.raises(UsageError, match="cannot read the quality text"):
        QualityPlan("/nowhere").windows()
    with pytest.raises(TargetError, match="gave no log probabilities"), stub("--fail-every", "1") as url:
        take(OpenAITarget(url, model="x"), plan)


def test_quality_keeps_to_the_time_left(stub):
    with stub() as url, pytest.raises(TargetError, match="no time was left"):
        take(OpenAITarget(url), QualityPlan(), left=lambda: 0.0)


def test_arms_of_two_models_are_not_compared():
    one = Answers([], [[step("a", PLAIN)]])
    two = Answers([], [[step("a", PLAIN)] * 2])
    with pytest.raises(UsageError, match="one model"):
        compare(two, one)

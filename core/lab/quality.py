"""What an arm's speed costs in quality: its answers against those of the reference arm.

Everything is asked through the OpenAI protocol, so any server that gives log probabilities and echoes prompts can
be judged. Three measures:

- agreement: share of greedily generated tokens that equal the reference's, counted up to the first difference of
  each answer. Where the reference's two best tokens are less than `NEAR_TIE` apart (nats), either is right: sums
  of floats differ a little with the shape of a batch.
- KL: mean Kullback-Leibler divergence, in nats, of the arm's next-token distributions from the reference's, over
  the positions of a given text. From the tokens that both list, all others taken as one; this never
  overstates the divergence.
- perplexity of the given text, read in windows of `WINDOW` characters.

KL is given in steps of a millionth of a nat, below which two orders of the same float sum differ, so that a part
that loses nothing shows exactly zero.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from core.lab import text
from core.lab.errors import TargetError, UsageError
from core.lab.targets import OpenAITarget

NEAR_TIE = 1e-3
KL_STEP = 1e-6
WINDOW = 1600
PROMPTS = 6
GENERATED = 32
TOP = 5
REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class QualityPlan:
    """`path`: the text for KL and perplexity; empty takes prose that Python ships. `tokens`: about how many."""

    path: str = ""
    tokens: int = 800

    def windows(self) -> list[str]:
        if self.path:
            try:
                whole = Path(self.path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"cannot read the quality text {self.path}: {error}.") from None
        else:
            whole = text.corpus("prose")
        wanted = whole[: self.tokens * text.CHARS_PER_TOKEN]
        return [wanted[i : i + WINDOW] for i in range(0, len(wanted), WINDOW)]


class Step(msgspec.Struct, frozen=True):
    """One position: the token that stands there, its log probability, and the likeliest ones."""

    token: str
    logprob: float
    top: dict[str, float]


class Answers(msgspec.Struct, frozen=True):
    """All that is kept of an arm to judge it later: generated answers and the given text, step by step."""

    greedy: list[list[Step]]
    given: list[list[Step]]


@dataclass(frozen=True, slots=True)
class Quality:
    """An arm beside the reference: see the module's text. `lossless` means that nothing differs at all."""

    agreement: float
    kl: float
    perplexity: float
    perplexity_ratio: float

    @property
    def lossless(self) -> bool:
        return self.agreement == 1.0 and self.kl == 0.0


def take(target: OpenAITarget, plan: QualityPlan, left: Callable[[], float] = lambda: math.inf) -> Answers:
    """Asks a running arm. TargetError when it does not give log probabilities, or no seconds are `left` before
    everything is asked."""
    rng = random.Random("quality")
    prompts = [text.passage(rng, 48) for _ in range(PROMPTS)]
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    with httpx.Client(base_url=target.url, headers=headers) as http:
        model = target.model or http.get("/v1/models").json()["data"][0]["id"]
        base = {"model": model, "temperature": 0, "logprobs": TOP}
        generate = base | {"max_tokens": GENERATED, "ignore_eos": True}
        greedy = [_steps(http, generate | {"prompt": p}, left) for p in prompts]
        read = base | {"echo": True, "max_tokens": 1}
        given = [_steps(http, read | {"prompt": w}, left)[:-1] for w in plan.windows()]
    return Answers(greedy, given)


def _steps(http: httpx.Client, body: Mapping[str, Any], left: Callable[[], float]) -> list[Step]:
    seconds = min(left(), REQUEST_S)
    if seconds <= 0:
        raise TargetError("quality was not measured: no time was left.")
    try:
        response = http.post("/v1/completions", json=body, timeout=seconds)
        response.raise_for_status()
        found = response.json()["choices"][0]["logprobs"]
        rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
        return [
            Step(token, _rounded(p), {t: _rounded(q) for t, q in top.items()})
            for token, p, top in rows
            if p is not None
        ]
    except httpx.TimeoutException:
        raise TargetError("quality was not measured: an answer took too long.") from None
    except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
        raise TargetError(f"quality cannot be measured: the target gave no log probabilities ({error}).") from None


def _rounded(logprob: float) -> float:
    """More digits than these are noise, and would be most of what is kept."""
    return round(logprob, 7)


def compare(arm: Answers, reference: Answers) -> Quality:
    """Judges an arm by the reference's answers to the same questions."""
    same = sum(_agreeing(a, r) for a, r in zip(arm.greedy, reference.greedy, strict=True))
    total = sum(len(r) for r in reference.greedy)
    if [len(window) for window in arm.given] != [len(window) for window in reference.given]:
        raise UsageError("two arms read the quality text as different tokens: only arms of one model can be compared.")
    steps = [step for window in reference.given for step in window]
    pairs = list(zip((step for window in arm.given for step in window), steps, strict=True))
    kl = sum(divergence(r.top, a.top) for a, r in pairs) / len(pairs)
    mine, theirs = perplexity(arm), perplexity(reference)
    return Quality(
        agreement=same / total,
        kl=abs(round(kl / KL_STEP) * KL_STEP),
        perplexity=mine,
        perplexity_ratio=1.0 if math.isclose(mine, theirs, rel_tol=KL_STEP) else mine / theirs,
    )


def _agreeing(arm: Sequence[Step], reference: Sequence[Step]) -> int:
    for i, (mine, theirs) in enumerate(zip(arm, reference, strict=False)):
        if mine.token != theirs.token:
            best = sorted(theirs.top.values(), reverse=True)
            near = len(best) > 1 and best[0] - best[1] < NEAR_TIE
            return len(reference) if near else i
    return min(len(arm), len(reference))


def divergence(p: Mapping[str, float], q: Mapping[str, float]) -> float:
    """KL(p || q) in nats from log probabilities of the likeliest tokens; unlisted ones count as one token."""
    shared = p.keys() & q.keys()
    rest_p = max(0.0, 1.0 - sum(math.exp(p[t]) for t in shared))
    rest_q = max(1e-12, 1.0 - sum(math.exp(q[t]) for t in shared))
    known = sum(math.exp(p[t]) * (p[t] - q[t]) for t in shared)
    return known + (rest_p * math.log(rest_p / rest_q) if rest_p > 1e-12 else 0.0)


def perplexity(answers: Answers) -> float:
    """exp of the mean negative log probability of the given text's tokens."""
    steps = [step for window in answers.given for step in window]
    return math.exp(-sum(step.logprob for step in steps) / len(steps))

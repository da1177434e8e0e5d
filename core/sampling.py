"""From logits to tokens: penalties, filters, seeded draws, and the verification of drafts.

Every row is worked on by itself, and every draw depends on (seed, choice, position) alone, so that neither neighbours
nor preemption nor drafting changes what a seeded request gets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.types import LOGPROB_FLOOR, Draft, SamplingParams, TokenLogprob

SORTED_FIRST = 1024


class Sampler:
    """The sampling state of one choice. `tokens` is its live token list, the prompt first."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        index: int,
        tokens: Sequence_[int],
        n_prompt: int,
        stops: frozenset[int],
    ) -> None:
        self.params = params
        self._key = np.array([seed & 0xFFFFFFFFFFFFFFFF, index], dtype=np.uint64)
        self._tokens = tokens
        self._n_prompt = n_prompt
        self._stops = torch.tensor(sorted(stops), dtype=torch.int64)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._counts: Counter[int] = Counter()
        self._seen: set[int] = set()
        self._counted = 0

    @property
    def plain(self) -> bool:
        """Whether the highest logit is the answer, with nothing to do to the logits first."""
        p = self.params
        return (
            p.greedy
            and not p.logit_bias
            and p.presence_penalty == p.frequency_penalty == 0.0
            and p.repetition_penalty == 1.0
            and len(self._tokens) - self._n_prompt >= p.min_tokens
        )

    def adjust(self, logits: Tensor, drafted: Sequence_[int] = ()) -> Tensor:
        """Bias and penalties on logits [V], as if `drafted` had been produced already. Returns a copy."""
        p = self.params
        logits = logits.clone()
        if p.logit_bias:
            logits[self._bias_ids] += self._bias
        self._count(len(self._tokens))
        if p.repetition_penalty != 1.0:
            ids = torch.tensor(sorted(self._seen.union(drafted)), dtype=torch.int64)
            at = logits[ids]
            logits[ids] = torch.where(at > 0, at / p.repetition_penalty, at * p.repetition_penalty)
        if p.presence_penalty or p.frequency_penalty:
            counts = self._counts + Counter(drafted)
            ids = torch.tensor(list(counts), dtype=torch.int64)
            number = torch.tensor(list(counts.values()), dtype=torch.float32)
            logits[ids] -= p.frequency_penalty * number + p.presence_penalty
        if len(self._tokens) - self._n_prompt + len(drafted) < p.min_tokens:
            logits[self._stops] = -torch.inf
        return logits

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution [V] that adjusted logits [V] are sampled from, float64: temperature, then min_p, top_k and
        top_p. top_p keeps the smallest set of likeliest tokens whose sum reaches it."""
        p = self.params
        if p.greedy:
            return torch.zeros_like(logits, dtype=torch.float64).index_fill_(0, logits.argmax(), 1.0)
        probs = torch.softmax((logits.double() - logits.max()) / p.temperature, -1)
        if p.min_p > 0:
            probs = torch.where(probs >= p.min_p * probs.max(), probs, 0.0)
        if 0 < p.top_k < len(probs):
            kept = torch.topk(probs, p.top_k)
            probs = torch.zeros_like(probs).scatter_(0, kept.indices, kept.values)
        if p.top_p < 1:
            probs = _nucleus(probs / probs.sum(), p.top_p)
        return probs / probs.sum()

    def draw(self, probs: Tensor, ahead: int = 0) -> int:
        """One token from `probs` [V], for the position `ahead` tokens after the next."""
        return _inverse_cdf(probs, self._uniforms(ahead)[0])

    def verify_drawn(self, probs: Tensor, token: int, proposal: Tensor, ahead: int) -> int:
        """Speculative sampling (Leviathan et al. 2022, arXiv 2211.17192): `token` was drawn from `proposal` [V]; keep
        it with probability min(1, p/q), else draw from what p has above q. Distributed exactly as `probs`."""
        accept, again = self._uniforms(ahead)
        q = float(proposal[token])
        if q > 0 and accept * q < float(probs[token]):
            return token
        left = (probs - proposal.double()).clamp_(min=0)
        return _inverse_cdf(left if float(left.sum()) > 0 else probs, again)

    def _uniforms(self, ahead: int) -> tuple[float, float]:
        position = len(self._tokens) - self._n_prompt + ahead
        first, second = np.random.Generator(np.random.Philox(key=self._key, counter=position << 64)).random(2)
        return float(first), float(second)

    def _count(self, n_tokens: int) -> None:
        for position in range(self._counted, n_tokens):
            token = self._tokens[position]
            self._seen.add(token)
            if position >= self._n_prompt:
                self._counts[token] += 1
        self._counted = n_tokens


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step produced for one row: `tokens` (accepted drafts, then one more), and whether they may be trusted."""

    tokens: tuple[int, ...]
    n_accepted: int
    finite: bool = True


def verify(logits: Tensor, samplers: Sequence_[Sampler], drafts: Sequence_[Draft]) -> list[Verified]:
    """Tokens for each sequence. logits float32 [R, V]: for each sequence in order, the row after its last token and
    one after each of its drafts."""
    best, ids = logits.max(-1)
    finite = torch.isfinite(best).tolist()
    greedy = ids.tolist()
    verified, row = [], 0
    for sampler, draft in zip(samplers, drafts, strict=True):
        rows = range(row, row + 1 + len(draft.tokens))
        row = rows.stop
        if not all(finite[r] for r in rows):
            verified.append(Verified((), 0, finite=False))
        elif sampler.plain:
            verified.append(_accept(draft.tokens, (greedy[r] for r in rows)))
        else:
            verified.append(_accept(draft.tokens, _targets(logits[rows.start : rows.stop], sampler, draft)))
    return verified


def _targets(logits: Tensor, sampler: Sampler, draft: Draft) -> Iterator[int]:
    """The target's token after each drafted one, drawn only as far as the drafts are accepted."""
    for ahead in range(len(logits)):
        adjusted = sampler.adjust(logits[ahead], draft.tokens[:ahead])
        if sampler.params.greedy:
            yield int(adjusted.argmax())
            continue
        probs = sampler.probs(adjusted)
        if draft.probs is not None and ahead < len(draft.tokens):
            yield sampler.verify_drawn(probs, draft.tokens[ahead], draft.probs[ahead], ahead)
        else:
            yield sampler.draw(probs, ahead)


def _accept(drafted: tuple[int, ...], targets: Iterable[int]) -> Verified:
    tokens: list[int] = []
    for position, target in enumerate(targets):
        tokens.append(target)
        if position >= len(drafted) or drafted[position] != target:
            break
    return Verified(tuple(tokens), len(tokens) - 1)


def token_logprobs(logits: Tensor, tokens: Sequence_[int], n_top: int) -> list[TokenLogprob]:
    """Each row's token with its log probability under raw logits [R, V], and the `n_top` best of its row."""
    logprobs = torch.log_softmax(logits.float(), -1)
    own = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0].tolist()
    top = torch.topk(logprobs, n_top, -1) if n_top else None
    found = []
    for row, token in enumerate(tokens):
        best = zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True) if top is not None else ()
        found.append(TokenLogprob(token, _floored(own[row]), tuple((i, _floored(v)) for i, v in best)))
    return found


def _floored(value: float) -> float:
    return max(value, LOGPROB_FLOOR)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Sort only as many as needed: most of the mass lies in few tokens."""
    kept = torch.topk(probs, min(SORTED_FIRST, len(probs)))
    if float(kept.values.sum()) < top_p:
        kept = torch.topk(probs, len(probs))
    before = kept.values.cumsum(0) - kept.values
    return torch.zeros_like(probs).scatter_(0, kept.indices, torch.where(before < top_p, kept.values, 0.0))


def _inverse_cdf(weights: Tensor, uniform: float) -> int:
    """The token at `uniform` of the cumulated weights [V]; never one of weight zero."""
    cumulated = weights.cumsum(0)
    point = uniform * float(cumulated[-1])
    token = int(torch.searchsorted(cumulated, point, right=True))
    return token if token < len(weights) else int(torch.nonzero(weights)[-1])

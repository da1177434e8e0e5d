"""From logits to tokens: penalties, filters, seeded draws, and the verification of drafts.

Every row is worked on by itself, and every draw depends on (seed, choice, position) alone, so that neither neighbours
nor preemption nor drafting changes what a seeded request gets. Rows are numpy's: its loops over one row of a large
vocabulary take a fifth of torch's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from core.types import LOGPROB_FLOOR, Draft, SamplingParams, TokenLogprob

Row = np.ndarray
"""Logits or weights of one position, float32 [V]."""
SORTED_FIRST = 1024
BLOCK = 256


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
        self._stops = np.array(sorted(stops), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self._counts = np.zeros(0, dtype=np.float32)
        self._seen = np.zeros(0, dtype=bool)
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

    def adjust(self, logits: Row, drafted: Sequence_[int] = ()) -> Row:
        """Bias and penalties on logits [V], as if `drafted` had been produced already. Returns a copy."""
        p = self.params
        logits = logits.copy()
        if p.logit_bias:
            logits[self._bias_ids] += self._bias
        if p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty:
            ids, counts = self._occurrences(len(logits), drafted)
            at = logits[ids]
            at = np.where(at > 0, at / p.repetition_penalty, at * p.repetition_penalty)
            logits[ids] = at - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
        if len(self._tokens) - self._n_prompt + len(drafted) < p.min_tokens:
            logits[self._stops] = -np.inf
        return logits

    def weights(self, logits: Row) -> Row:
        """What adjusted logits [V] are sampled by: probabilities up to a factor, after temperature, then min_p, top_k
        and top_p. top_p keeps the smallest set of likeliest tokens whose sum reaches it."""
        p = self.params
        scaled = logits - logits.max()
        scaled /= max(p.temperature, np.finfo(np.float32).tiny)
        weights: Row = np.exp(scaled, out=scaled)
        if p.min_p > 0:
            weights[weights < p.min_p] = 0.0
        if 0 < p.top_k < len(weights):
            weights = _largest(weights, p.top_k, np.partition(weights, -p.top_k)[-p.top_k])
        if p.top_p < 1:
            weights = _nucleus(weights, p.top_p)
        return weights

    def draw(self, weights: Row, ahead: int = 0) -> int:
        """One token by `weights` [V], for the position `ahead` tokens after the next."""
        return _inverse_cdf(weights, self._uniforms(ahead)[0])

    def verify_drawn(self, weights: Row, token: int, proposal: Row, ahead: int) -> int:
        """Speculative sampling (Leviathan et al. 2022, arXiv 2211.17192): `token` was drawn from `proposal` [V]; keep
        it with probability min(1, p/q), else draw from what p has above q. Distributed exactly as `weights`."""
        accept, again = self._uniforms(ahead)
        probs = weights / weights.sum(dtype=np.float64)
        q = float(proposal[token])
        if q > 0 and accept * q < float(probs[token]):
            return token
        left = np.maximum(probs - proposal, 0)
        return _inverse_cdf(left if left.any() else probs, again)

    def _uniforms(self, ahead: int) -> tuple[float, float]:
        position = len(self._tokens) - self._n_prompt + ahead
        first, second = np.random.Generator(np.random.Philox(key=self._key, counter=position << 64)).random(2)
        return float(first), float(second)

    def _occurrences(self, vocab_size: int, drafted: Sequence_[int]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that the prompt, the answer or `drafted` holds, and how often each was produced."""
        if not len(self._seen):
            self._counts, self._seen = np.zeros(vocab_size, dtype=np.float32), np.zeros(vocab_size, dtype=bool)
        new = np.array(self._tokens[self._counted :], dtype=np.int64)
        np.add.at(self._counts, new[max(0, self._n_prompt - self._counted) :], 1)
        self._seen[new] = True
        self._counted += len(new)
        counts, seen = self._counts, self._seen
        if drafted:
            ahead = np.array(drafted, dtype=np.int64)
            counts, seen = counts.copy(), seen.copy()
            np.add.at(counts, ahead, 1)
            seen[ahead] = True
        ids = np.flatnonzero(seen)
        return ids, counts[ids]


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step produced for one row: `tokens` (accepted drafts, then one more), and whether they may be trusted."""

    tokens: tuple[int, ...]
    n_accepted: int
    finite: bool = True


def verify(logits: Tensor, samplers: Sequence_[Sampler], drafts: Sequence_[Draft]) -> list[Verified]:
    """Tokens for each sequence. logits float32 [R, V]: for each sequence in order, the row after its last token and
    one after each of its drafts."""
    rows = logits.numpy(force=True)
    greedy = rows.argmax(-1)  # the first that is not a number, where there is one
    finite = [math.isfinite(value) for value in rows[np.arange(len(rows)), greedy].tolist()]
    greedy = greedy.tolist()
    verified, row = [], 0
    for sampler, draft in zip(samplers, drafts, strict=True):
        end = row + 1 + len(draft.tokens)
        if not all(finite[row:end]):
            verified.append(Verified((), 0, finite=False))
        elif sampler.plain:
            verified.append(_accept(draft.tokens, greedy[row:end]))
        else:
            verified.append(_accept(draft.tokens, _targets(rows[row:end], sampler, draft)))
        row = end
    return verified


def _targets(rows: np.ndarray, sampler: Sampler, draft: Draft) -> Iterator[int]:
    """The target's token after each drafted one, drawn only as far as the drafts are accepted."""
    for ahead, row in enumerate(rows):
        adjusted = sampler.adjust(row, draft.tokens[:ahead])
        if sampler.params.greedy:
            yield int(adjusted.argmax())
            continue
        weights = sampler.weights(adjusted)
        if draft.probs is not None and ahead < len(draft.tokens):
            proposal = draft.probs[ahead].numpy(force=True)
            yield sampler.verify_drawn(weights, draft.tokens[ahead], proposal, ahead)
        else:
            yield sampler.draw(weights, ahead)


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


def _largest(weights: Row, n: int, least: np.float32) -> Row:
    """Set all of `weights` [V] to zero but the `n` largest, of which `least` is the smallest; of equals the first
    are kept."""
    kept = weights > least
    equal = np.flatnonzero(weights == least)[: n - int(kept.sum())]
    kept[equal] = True
    weights *= kept
    return weights


def _nucleus(weights: Row, top_p: float) -> Row:
    """Sort only as many as needed: most of the mass lies in few tokens."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    for n in (min(SORTED_FIRST, len(weights)), len(weights)):
        largest = np.sort(np.partition(weights, -n)[-n:])[::-1]
        reached = np.cumsum(largest, dtype=np.float64)
        if reached[-1] >= wanted:
            break
    last = min(int(np.searchsorted(reached, wanted)), len(weights) - 1)
    return _largest(weights, last + 1, largest[last])


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    """The token at `uniform` of the cumulated weights [V]; never one of weight zero."""
    starts = np.arange(0, len(weights), BLOCK)
    blocks = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    point = uniform * blocks[-1]
    block = int(np.searchsorted(blocks, point, side="right"))
    if block < len(blocks):
        before = blocks[block - 1] if block else 0.0
        within = before + np.cumsum(weights[starts[block] : starts[block] + BLOCK], dtype=np.float64)
        token = int(starts[block] + np.searchsorted(within, point, side="right"))
        if token < len(weights) and weights[token] > 0:
            return token
    return int(np.flatnonzero(weights)[-1])

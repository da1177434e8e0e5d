"""The small records that pass between the core and its parts. Importing this module imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_CHOICES = 128
MAX_STOPS = 64
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20

COMPLETION_TOKENS = 16
"""`max_tokens` of a plain text that asks for none; a conversation gets all the room there is."""
LOGPROB_FLOOR = -9999.0
"""What a log probability below it, or minus infinity, is given as: JSON has no infinities."""


class PartwiseError(Exception):
    """Any error whose message is written for the person who can mend it."""


class InvalidRequest(PartwiseError, ValueError):
    """A request that cannot be served as asked; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFull(PartwiseError):
    """The waiting queue is at its limit; the request may be sent again later."""


class PartFault(PartwiseError):
    """A part broke its contract while serving; the message names the part, its distribution and the rule."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled. `temperature` 0 is greedy; counts are in tokens.

    `stop` strings are matched on the produced text and cut from it; `stop_token_ids` end a choice and are kept in
    `token_ids` but not in the text. `logprobs` is the number of alternatives beside the sampled token (0: only that
    one, None: none). `predicted_tokens` is how long the caller expects the output to be: schedulers may order by it,
    and it changes no output. Raises InvalidRequest naming the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    predicted_tokens: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0)
        _integer("min_tokens", self.min_tokens, 0)
        if self.predicted_tokens is not None:
            _integer("predicted_tokens", self.predicted_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})", "min_tokens"
            )
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        self._check_lists()

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop has {len(self.stop)} entries; the most is {MAX_STOPS}", "stop")
        if len(self.stop_token_ids) > MAX_STOPS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} entries; the most is {MAX_STOPS}", "stop_token_ids"
            )
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest("stop must hold non-empty strings", "stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}", "logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; the most is {MAX_LOGIT_BIAS}", "logit_bias"
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5


def _number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number, not {value!r}", name)
    if value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequest(f"{name} must lie in {bracket}{low:g}, {high:g}], not {value!r}", name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {bounds}, not {value}", name)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. `cache_salt` keeps its prefix apart from other salts; a lower `priority`
    number runs first; `client` is whom fairness is counted by."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    client: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log probability beside its best alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """What one step did for one choice of a request. `finish_reason` is set on its last event and only there."""

    id: str
    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one kind of cache, and so one page table.

    A token holds `kv_heads * key_dim` numbers for keys and `kv_heads * value_dim` for values in each of `layers`.
    With `value_in_key` nothing is stored for values: they are the first `value_dim` of the keys (an MLA latent).
    `window`: a token sees itself and the `window - 1` before it; None sees everything. The heads are the layers' KV
    heads from `first_head` on; a layer's other heads lie in other groups.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    value_in_key: bool = False
    first_head: int = 0


@dataclass(frozen=True, slots=True)
class KVField:
    """One stored tensor of a KV format: its shape is [pages, page_size, *shape] (`per` token), [pages, *shape] (page),
    or `shape` as it is (pool): something that pages share, which a page's copy does not copy."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    per: Literal["token", "page", "pool"] = "token"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one layer of a group is stored. `name` is what a kernel declares that it can read."""

    name: str
    fields: tuple[KVField, ...]


@dataclass(frozen=True, slots=True)
class KVStats:
    """An allocator's accounting, in bytes: `used` holds tokens, `reserved` is held but empty.

    `internal_waste`: reserved bytes; `external_waste`: free bytes that no request of the asked size could get.
    """

    total: int
    used: int
    reserved: int
    internal_waste: int
    external_waste: int


@dataclass(frozen=True, slots=True)
class Match:
    """A cached prefix: `pages` hold its first `len(pages) * page_size` tokens; `handle` is the cache's own."""

    pages: tuple[int, ...]
    handle: Any = None


# --- scheduling ---------------------------------------------------------------------------------------------------


class SequenceView(Protocol):
    """What a scheduler may read of a sequence. Counts are in tokens."""

    @property
    def id(self) -> str: ...
    @property
    def arrival(self) -> float: ...
    @property
    def priority(self) -> int: ...
    @property
    def client(self) -> str: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in pages; set by admission to what a prefix cache already holds."""

    @property
    def num_drafts(self) -> int:
        """Drafted tokens that may be verified in this step."""

    @property
    def max_total(self) -> int:
        """The longest this sequence may become."""

    @property
    def predicted_total(self) -> int:
        """How long its caller expects it to become, no less than it is; `max_total` where nothing was said."""


@dataclass(frozen=True, slots=True)
class Queues:
    """`waiting` in arrival order, those preempted included; `running` in the order of admission."""

    waiting: Sequence[SequenceView]
    running: Sequence[SequenceView]


@dataclass(frozen=True, slots=True)
class Budget:
    """The most tokens one step may compute, and the most sequences that may run."""

    tokens: int
    running: int


class Memory(Protocol):
    """The scheduler's only view of memory. Every verb takes effect at once; none is undone when planning ends."""

    def admit(self, seq: SequenceView) -> bool:
        """Bring a waiting sequence in: match its prefix and hold pages for all its tokens. False: no room now."""

    def reserve(self, seq: SequenceView, n_tokens: int) -> bool:
        """Hold pages for the next `n_tokens` after `seq.num_computed` of a running sequence. False: no room now."""

    def preempt(self, seq: SequenceView) -> None:
        """Put a running sequence back to waiting and free its pages; it is computed again later. Those that share
        what it was still to compute go back with it."""

    def cached_tokens(self, seq: SequenceView) -> int:
        """How many tokens of a waiting sequence a prefix cache holds now. Changes nothing."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """`n_tokens` of a running sequence: those not computed yet, in order, then its drafts."""

    id: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Who computes how many tokens in this step."""

    items: tuple[Scheduled, ...]


# --- the step's tensors -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as a kernel sees it, or those of its heads that lie in one KV group. `sinks` [q_heads]: a
    learned logit per head that takes probability and gives nothing."""

    index: int
    group: int
    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    value_in_key: bool = False
    sinks: Tensor | None = None


@dataclass(slots=True)
class GroupBatch:
    """One KV group's part of a batch. A row's table lists its live pages; the first slot of the first one holds the
    token at position `kv_start`. `first_slots[b]` is the slot of that token if row b's pages are neighbours in
    order, else None."""

    page_table: Tensor  # int32 [B, M], padded with 0
    kv_start: Tensor  # int32 [B]
    kv_starts: list[int]
    slots: Tensor  # int64 [T]: page * page_size + offset where each token is written
    first_slots: list[int | None]
    num_pages: list[int]


@dataclass(slots=True)
class Batch:
    """The flat tokens of one step. Row b's tokens are `query_start[b]:query_start[b + 1]`, and end at position
    `kv_len[b] - 1`."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    query_start: Tensor  # int32 [B + 1]
    kv_len: Tensor  # int32 [B]
    query_starts: list[int]
    kv_lens: list[int]
    groups: tuple[GroupBatch, ...]
    logit_rows: Tensor  # int64 [R]: the tokens whose logits are wanted

    @property
    def num_rows(self) -> int:
        return len(self.kv_lens)


class Attend(Protocol):
    """Attention of one layer as a model calls it: once a layer, in order."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        """q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv] (None: values are part of the keys), rotated and normed, not
        always contiguous -> [T, Hq, Dv]"""


# --- drafting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a drafter may read of a sequence: `tokens` (prompt and output, do not change it) and, when it asked for
    `hidden_states`, the target's final hidden states [n, hidden] of the tokens computed since the last call."""

    id: str
    tokens: Sequence[int]
    k: int
    temperature: float
    hidden: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain of at most `k` tokens to try. `probs` [len(tokens), V] are the distributions they were drawn from;
    None says that they were not drawn but chosen."""

    tokens: tuple[int, ...] = ()
    probs: Tensor | None = None

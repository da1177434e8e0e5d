"""Context reduction: which pages of a sequence may be forgotten while it runs.

A page table may lose pages from its middle: the tokens that stay keep the rotary positions in their keys, and move up
as if the first ones had been passed by a window (`kv_start` grows by what was forgotten), so kernels need not know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from core.interfaces.plugin import Options, Part
from core.types import LayerSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextView:
    """One sequence in one KV group without a window, between steps. `kept`: tokens in its pages, of `num_computed`."""

    id: str
    group: int
    kept: int
    num_computed: int
    num_prompt_tokens: int
    page_size: int

    @property
    def n_pages(self) -> int:
        return -(-self.kept // self.page_size)


class ContextReduction(Part[Options], ABC):
    """Chooses whole pages, so what is forgotten is freed. A page that others hold as well stays theirs.

    The core calls `observe` in each layer of the steps that `observes` names, then `forget` after every step, unless
    another sequence still shares what this one computes. What has forgotten something is not offered to a prefix
    cache, nor shared. If it is preempted it is computed whole again, or comes back as it was from a second tier.
    """

    observes: Literal["never", "prompt_end", "always"] = "never"

    def observe(self, id: str, q: Tensor, keys: Tensor, layer: LayerSpec) -> None:
        """The queries [n, Hq, D] of a row's last n tokens and its keys [kept, Hkv, D], those tokens' own included, of
        those heads of a layer that lie in the KV group `layer.group`. Drafts are left out."""
        return None

    @abstractmethod
    def forget(self, view: ContextView) -> Sequence[int]:
        """Places in the page table whose pages to forget, rising; never the last, which is being written."""

    def ended(self, id: str) -> None:
        """A sequence has ended or was preempted; drop what is kept for it."""
        return None


def attention_mass(q: Tensor, keys: Tensor, layer: LayerSpec) -> Tensor:
    """The attention that keys [S, Hkv, D] receive from queries [n, Hq, D] of the last n tokens, summed over queries and
    heads: float32 [S]."""
    n, n_keys = q.shape[0], keys.shape[0]
    queries = q.float().reshape(n, layer.kv_heads, -1, layer.key_dim).permute(1, 2, 0, 3)
    scores = queries @ keys.float().permute(1, 2, 0)[:, None] * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    scores = scores.masked_fill(keys.new_ones(n, n_keys).triu(n_keys - n + 1).bool(), float("-inf"))
    total = scores.logsumexp(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total.logaddexp(layer.sinks.float().reshape(layer.kv_heads, -1, 1, 1))
    return (scores - total).exp().sum(dim=(0, 1, 2))

"""The tokens that were attended to most, and the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from core.interfaces.context_reduction import ContextReduction, ContextView, attention_mass
from core.interfaces.plugin import BuildContext
from core.types import LayerSpec
from plugins.context_reduction import HeavyHitterOptions


class HeavyHitters(ContextReduction):
    """Sums the attention that each token has received, and keeps the pages that received most beside the last ones.

    Method: H2O (Zhang et al., NeurIPS 2023), by the page and over all layers and heads that share a page table; a KV
    group for each head chooses by head.
    """

    options: HeavyHitterOptions
    observes: Literal["never", "prompt_end", "always"] = "always"

    def __init__(self, options: HeavyHitterOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._mass: dict[tuple[str, int], Tensor] = {}

    def observe(self, id: str, q: Tensor, keys: Tensor, layer: LayerSpec) -> None:
        mass = attention_mass(q, keys, layer)
        before = self._mass.get((id, layer.group))
        if before is not None:
            mass[: len(before)] += before
        self._mass[id, layer.group] = mass

    def forget(self, view: ContextView) -> Sequence[int]:
        mass = self._mass.get((view.id, view.group))
        if mass is None:
            return ()
        recent = min(max(0, view.kept - self.options.recent), len(mass)) // view.page_size
        surplus = recent - -(-self.options.heavy // view.page_size)
        if surplus <= 0:
            return ()
        by_page = mass[: recent * view.page_size].view(recent, view.page_size).sum(dim=1)
        dropped = by_page.argsort(stable=True)[:surplus].sort().values
        kept = torch.ones(len(mass), dtype=torch.bool, device=mass.device)
        kept[: recent * view.page_size].view(recent, view.page_size)[dropped] = False
        self._mass[view.id, view.group] = mass[kept]
        places: list[int] = dropped.tolist()
        return places

    def ended(self, id: str) -> None:
        for key in [key for key in self._mass if key[0] == id]:
            del self._mass[key]

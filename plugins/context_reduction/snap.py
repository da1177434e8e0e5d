"""The prompt cut once, by what its end attends to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from core.interfaces.context_reduction import ContextReduction, ContextView, attention_mass
from core.interfaces.plugin import BuildContext
from core.types import LayerSpec
from plugins.context_reduction import SnapOptions


class Snap(ContextReduction):
    """As a prompt is done, keeps the pages that its last tokens attend to most, and those tokens' own; what is
    generated afterwards all stays.

    Method: SnapKV (Li et al., NeurIPS 2024), by the page and over all layers and heads that share a page table.
    """

    options: SnapOptions
    observes: Literal["never", "prompt_end", "always"] = "prompt_end"

    def __init__(self, options: SnapOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self._mass: dict[tuple[str, int], Tensor] = {}

    def observe(self, id: str, q: Tensor, keys: Tensor, layer: LayerSpec) -> None:
        mass = attention_mass(q[-self.options.window :], keys, layer)
        before = self._mass.get((id, layer.group))
        self._mass[id, layer.group] = mass if before is None else before + mass

    def forget(self, view: ContextView) -> Sequence[int]:
        mass = self._mass.pop((view.id, view.group), None)
        ahead = max(0, view.kept - self.options.window) // view.page_size
        surplus = view.n_pages - max(view.n_pages - ahead, self.options.budget // view.page_size)
        if mass is None or surplus <= 0:
            return ()
        width = self.options.pooled
        smooth = F.avg_pool1d(mass[None, None], width, stride=1, padding=width // 2)[0, 0, : len(mass)]
        by_page = smooth[: ahead * view.page_size].view(ahead, view.page_size).sum(dim=1)
        places: list[int] = by_page.argsort(stable=True)[:surplus].sort().values.tolist()
        return places

    def ended(self, id: str) -> None:
        for key in [key for key in self._mass if key[0] == id]:
            del self._mass[key]

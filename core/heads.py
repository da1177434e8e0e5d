"""Layers whose KV heads lie in one KV group or in several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from core.kv import LayerKV, Pool
from core.types import KVGroup, LayerSpec, PartFault


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """The heads of one layer that lie in one KV group: as a kernel sees them, where their keys and values are cached,
    and which of the layer's query and KV heads they are."""

    spec: LayerSpec
    kv: LayerKV
    queries: slice
    heads: slice

    def of(self, q: Tensor, k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """These heads of q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv]."""
        return q[:, self.queries], k[:, self.heads], None if v is None else v[:, self.heads]


def slices(layers: Sequence[LayerSpec], pools: Sequence[Pool]) -> list[list[LayerSlice]]:
    """For each layer its slices, in the order of their heads."""
    found: list[list[LayerSlice]] = [[] for _ in layers]
    for index, pool in enumerate(pools):
        for layer, kv in pool.layers.items():
            found[layer].append(_slice(layers[layer], index, pool.group, kv))
    return [sorted(parts, key=lambda part: part.heads.start) for parts in found]


def _slice(spec: LayerSpec, index: int, group: KVGroup, kv: LayerKV) -> LayerSlice:
    heads = slice(group.first_head, group.first_head + group.kv_heads)
    shared = spec.q_heads // spec.kv_heads
    queries = slice(heads.start * shared, heads.stop * shared)
    if (index, group.kv_heads) != (spec.group, spec.kv_heads):
        spec = replace(
            spec,
            group=index,
            q_heads=queries.stop - queries.start,
            kv_heads=group.kv_heads,
            sinks=None if spec.sinks is None else spec.sinks[queries],
        )
    return LayerSlice(spec, kv, queries, heads)


def whole_caches(layers: Sequence[LayerSpec], parts: Sequence[Sequence[LayerSlice]]) -> Mapping[int, LayerKV] | None:
    """Each layer's cache, for what reads whole layers in the model's own groups; None: they are grouped otherwise."""
    if any(len(own) != 1 or own[0].spec is not spec for spec, own in zip(layers, parts, strict=True)):
        return None
    return {number: own[0].kv for number, own in enumerate(parts)}


def checked_groups(groups: Sequence[KVGroup], given: Sequence[KVGroup], label: str) -> list[KVGroup]:
    """The groups that an allocator made of the structure's. PartFault unless they hold the same heads, each once."""
    groups, names = list(groups), [group.name for group in groups]
    if groups == list(given):
        return groups
    wrong = sorted((_heads(groups) - _heads(given)) + (_heads(given) - _heads(groups)))
    if wrong:
        layer, head = wrong[0][:2]
        raise PartFault(
            f"{label} must put head {head} of layer {layer} in one KV group, kept as the attention structure says"
        )
    if len(set(names)) < len(names):
        raise PartFault(f"{label} gives KV groups one name: {', '.join(names)}")
    windows = [group.window is not None for group in groups]
    if windows != sorted(windows):
        raise PartFault(f"{label} puts a KV group with a window before one without: {', '.join(names)}")
    return groups


def _heads(groups: Sequence[KVGroup]) -> Counter[tuple[int, ...]]:
    """Each head of each layer, with how it is kept."""
    return Counter(
        (layer, head, group.key_dim, group.value_dim, group.window or 0, group.value_in_key)
        for group in groups
        for layer in group.layers
        for head in range(group.first_head, group.first_head + group.kv_heads)
    )

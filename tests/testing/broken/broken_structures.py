"""Attention structures that are wrong in one way each."""

import time
from collections.abc import Sequence
from dataclasses import replace

from core.interfaces import AttentionStructure, ModelConfig, PluginInfo, Weights
from core.types import KVGroup


class Right(AttentionStructure):
    """A group for each kind of layer, those that see everything first; the ones below change one thing of it."""

    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        kinds: dict[tuple[int, int, int, int | None, bool], list[int]] = {}
        for index, shape in enumerate(config.layers):
            kind = (shape.kv_heads, shape.key_dim, shape.value_dim, shape.window, shape.value_in_key)
            kinds.setdefault(kind, []).append(index)
        ordered = sorted(kinds.items(), key=lambda item: item[0][3] is not None)
        return [self.group(n, tuple(layers), *kind) for n, (kind, layers) in enumerate(ordered)]

    def group(
        self, n: int, layers: tuple[int, ...], heads: int, key: int, value: int, window: int | None, latent: bool
    ) -> KVGroup:
        return KVGroup(f"g{n}", layers, heads, key, value, window, latent)


class LosesALayer(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        groups = list(super().kv_groups(config))
        last = groups[-1]
        return [*groups[:-1], replace(last, layers=last.layers[:-1])]


class CachesALayerTwice(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        groups = list(super().kv_groups(config))
        first = groups[0]
        return [*groups, replace(first, name="again", layers=first.layers[:1])]


class KeepsOneHead(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        return [replace(group, kv_heads=1) for group in super().kv_groups(config)]


class ShortensWindows(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        return [
            replace(group, window=group.window - 1 if group.window else None) for group in super().kv_groups(config)
        ]


class NamesAllAlike(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        return [replace(group, name="kv") for group in super().kv_groups(config)]


class AlternatesItsOrder(Right):
    calls = 0

    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        self.calls += 1
        groups = list(super().kv_groups(config))
        return groups if self.calls % 2 else groups[::-1]


class StoresValuesTwice(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        return [replace(group, value_in_key=False) for group in super().kv_groups(config)]


class DropsLayersInConvert(Right):
    def convert(self, config: ModelConfig, weights: Weights) -> tuple[ModelConfig, Weights]:
        return replace(config, layers=config.layers[:-1]), weights  # type: ignore[type-var]


class ChangesTheModel(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        object.__setattr__(config, "hidden_size", config.hidden_size + 1)
        return super().kv_groups(config)


class ThinksForLong(Right):
    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        time.sleep(0.03)
        return super().kv_groups(config)


BROKEN = {
    LosesALayer: {"l2_serves_every_request", "l1_every_layer_is_in_one_group"},
    CachesALayerTwice: {"l1_every_layer_is_in_one_group"},
    KeepsOneHead: {"l1_groups_keep_what_their_layers_need"},
    ShortensWindows: {"l2_output_equals_the_null_parts", "l1_windows_are_not_shortened"},
    NamesAllAlike: {"l1_groups_have_names_of_their_own"},
    AlternatesItsOrder: {"l1_groups_are_the_same_each_time"},
    StoresValuesTwice: {"l1_groups_keep_what_their_layers_need"},
    DropsLayersInConvert: {"l1_a_checkpoint_is_not_changed"},
    ChangesTheModel: {"l1_the_model_is_not_changed"},
    ThinksForLong: {"l4_cost"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="attention.structure",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

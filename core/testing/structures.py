"""Conformance of an attention structure: every layer is cached once, in the shape that it has."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

from core.interfaces import AttentionStructure, BuildContext, LayerShape
from core.interfaces.model import Weights
from core.testing.cost import assert_cost, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import KVGroup


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's description (core.interfaces.ModelConfig)."""

    layers: tuple[LayerShape, ...]
    hidden_size: int = 64
    vocab_size: int = 100


_GQA = LayerShape(q_heads=8, kv_heads=2, key_dim=16, value_dim=16)
_MHA = LayerShape(q_heads=4, kv_heads=4, key_dim=16, value_dim=16)
_WINDOW = LayerShape(q_heads=8, kv_heads=2, key_dim=16, value_dim=16, window=32)
_WIDE_WINDOW = LayerShape(q_heads=8, kv_heads=2, key_dim=16, value_dim=16, window=64)
_LATENT = LayerShape(q_heads=8, kv_heads=1, key_dim=48, value_dim=32, value_in_key=True)

SHAPES: dict[str, Shape] = {
    "one layer": Shape((_GQA,)),
    "all layers alike": Shape((_MHA,) * 4),
    "windows between full layers": Shape((_WINDOW, _WINDOW, _GQA, _WINDOW, _WINDOW, _GQA)),
    "windows of two widths": Shape((_WINDOW, _WIDE_WINDOW, _GQA)),
    "head counts that differ": Shape((_GQA, _MHA, _GQA)),
    "windows only": Shape((_WINDOW, _WINDOW)),
    "a latent": Shape((_LATENT,) * 3),
}


class StructureSuite(SameOutput, Suite):
    """Checks of an `attention.structure` part. Groups are asked for without weights: what `convert` makes of a
    checkpoint is judged by serving tiny models."""

    seam: ClassVar[str] = "attention.structure"
    cost_us: ClassVar[float] = 20_000.0

    def structure(self) -> AttentionStructure:
        structure: AttentionStructure = self.build(BuildContext())
        return structure

    def groups(self, shape: Shape) -> list[KVGroup]:
        return list(self.structure().kv_groups(copy.deepcopy(shape)))

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_every_layer_is_in_one_group(self) -> None:
        for name, shape in SHAPES.items():
            layers = sorted(layer for group in self.groups(shape) for layer in group.layers)
            assert layers == list(range(len(shape.layers))), f"{name}: the groups hold layers {layers}"

    def test_l1_groups_have_names_of_their_own(self) -> None:
        for name, shape in SHAPES.items():
            names = [group.name for group in self.groups(shape)]
            assert all(names) and len(set(names)) == len(names), f"{name}: the groups are named {names}"

    def test_l1_groups_keep_what_their_layers_need(self) -> None:
        for name, shape in SHAPES.items():
            for group in self.groups(shape):
                for layer in group.layers:
                    needed = shape.layers[layer]
                    kept = (group.kv_heads, group.key_dim, group.value_dim, group.value_in_key)
                    wanted = (needed.kv_heads, needed.key_dim, needed.value_dim, needed.value_in_key)
                    assert kept == wanted, (
                        f"{name}: layer {layer} needs {wanted} (heads, key and value width, value in key), "
                        f"{group.name} has {kept}"
                    )

    def test_l1_windows_are_not_shortened(self) -> None:
        for name, shape in SHAPES.items():
            for group in self.groups(shape):
                for layer in group.layers:
                    needed = shape.layers[layer].window
                    assert group.window == needed, (
                        f"{name}: layer {layer} sees {needed or 'all'} tokens, and group {group.name} keeps "
                        f"{group.window or 'all'}"
                    )

    def test_l1_the_model_is_not_changed(self) -> None:
        for name, shape in SHAPES.items():
            given = copy.deepcopy(shape)
            self.structure().kv_groups(given)
            assert given == shape, f"{name}: kv_groups changed the description"

    def test_l1_groups_are_the_same_each_time(self) -> None:
        for name, shape in SHAPES.items():
            structure = self.structure()
            first, again = (list(structure.kv_groups(copy.deepcopy(shape))) for _ in range(2))
            assert first == again == self.groups(shape), f"{name}: the groups differ from one call to the next"

    def test_l1_a_checkpoint_is_not_changed(self) -> None:
        weights = Weights({})
        config, kept = self.structure().convert(copy.deepcopy(SHAPES["all layers alike"]), weights)
        assert len(weights) == 0 and isinstance(kept, Weights), "convert must return a Weights, and leave the one given"
        assert len(config.layers) == len(SHAPES["all layers alike"].layers), "convert changed the number of layers"

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost(self) -> None:
        structure, shape = self.structure(), Shape((_WINDOW, _GQA) * 50)
        cost = microseconds(lambda: structure.kv_groups(shape), repeats=5)
        assert_cost(cost, self.declared("cost_us", self.cost_us), "grouping 100 layers")

"""The checkpoint's own attention heads, unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces.attention import AttentionStructure
from core.interfaces.model import LayerShape, ModelConfig
from core.types import KVGroup


class NativeStructure(AttentionStructure):
    """Groups layers by the shape of what they cache; the group that sees everything comes first."""

    def kv_groups(self, config: ModelConfig) -> Sequence[KVGroup]:
        layers_of: dict[LayerShape, list[int]] = {}
        for index, shape in enumerate(config.layers):
            cached = LayerShape(
                q_heads=0,
                kv_heads=shape.kv_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                window=shape.window,
                value_in_key=shape.value_in_key,
            )
            layers_of.setdefault(cached, []).append(index)
        shapes = sorted(layers_of, key=lambda shape: shape.window is not None)
        names = [_name(shape) for shape in shapes]
        return [
            KVGroup(
                name=name if names.count(name) == 1 else f"{name}_{shape.kv_heads}x{shape.key_dim}+{shape.value_dim}",
                layers=tuple(layers_of[shape]),
                kv_heads=shape.kv_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                window=shape.window,
                value_in_key=shape.value_in_key,
            )
            for shape, name in zip(shapes, names, strict=True)
        ]


def _name(shape: LayerShape) -> str:
    kind = "latent" if shape.value_in_key else "full"
    return kind if shape.window is None else f"window{shape.window}" if kind == "full" else f"{kind}{shape.window}"

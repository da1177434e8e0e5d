"""Weight quantizers that are wrong in one way each."""

import time
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from core.interfaces import PluginInfo, StoredWeight, WeightQuantizer


class Int8Product:
    def __init__(self, table: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        self.table, self.scales, self.bias = table, scales, bias

    @property
    def nbytes(self) -> int:
        return self.table.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def out_features(self) -> int:
        return self.table.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        out = (x @ self.table.float().T) * self.scales
        return out if self.bias is None else out + self.bias


class Right(WeightQuantizer):
    """8 bits with a scale for each row; the ones below change one thing of it."""

    product = Int8Product

    def linear(
        self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Int8Product:
        dense = torch.cat([weight.dense().float() for weight in self.ordered(weights)])
        scales = self.scales(dense)
        table = torch.round(dense / scales[:, None]).clamp(-127, 127)
        return self.product(table.to(torch.int8), scales, bias)

    def ordered(self, weights: Sequence[StoredWeight]) -> Sequence[StoredWeight]:
        return weights

    def scales(self, dense: Tensor) -> Tensor:
        return (dense.abs().amax(1) / 127).clamp_min(1e-12)


class LosesTheScales(Right):
    def linear(
        self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Int8Product:
        made = super().linear(name, weights, bias, dtype)
        return Int8Product(made.table, torch.ones_like(made.scales), bias)


class OneScaleForAll(Right):
    def scales(self, dense: Tensor) -> Tensor:
        return (dense.abs().max() / 127).clamp_min(1e-12).expand(len(dense)).clone()


class FewBits(Right):
    def scales(self, dense: Tensor) -> Tensor:
        return super().scales(dense) * 40


class StacksBackwards(Right):
    def ordered(self, weights: Sequence[StoredWeight]) -> Sequence[StoredWeight]:
        return list(reversed(weights))


class HidesTheScales(Int8Product):
    @property
    def nbytes(self) -> int:
        return self.table.nbytes


class MiscountsBytes(Right):
    product = HidesTheScales


class KeepsACopy(Int8Product):
    def __init__(self, table: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__(table, scales, bias)
        self.dense = table.float() * scales[:, None]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.dense.nbytes


class SavesNothing(Right):
    product = KeepsACopy


class NormalizesTheBatch(Int8Product):
    def __call__(self, x: Tensor) -> Tensor:
        scale = x.abs().max() / 127
        return super().__call__(torch.round(x / scale) * scale)


class OneScaleForTheBatch(Right):
    product = NormalizesTheBatch


class DropsTheLastColumns(Right):
    def linear(
        self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Int8Product:
        made = super().linear(name, weights, bias, dtype)
        made.table[:, made.table.shape[1] // 32 * 32 :] = 0
        return made


class WritesIntoTheBias(Right):
    def linear(
        self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Int8Product:
        made = super().linear(name, weights, None if bias is None else bias.clone(), dtype)
        if bias is not None:
            bias.zero_()
        return made


class SharesItsScales(Right):
    kept = torch.zeros(4096)

    def scales(self, dense: Tensor) -> Tensor:
        shared = self.kept[: len(dense)]
        return shared.copy_(super().scales(dense))


class LooksUpTheNextToken:
    def __init__(self, table: Tensor) -> None:
        self.table = table

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.table[(tokens + 1) % len(self.table)]


class EmbedsTheNextToken(Right):
    def embedding(self, name: str, weight: StoredWeight, dtype: torch.dtype) -> LooksUpTheNextToken:
        return LooksUpTheNextToken(weight.dense().to(dtype))


class KnowsNoAttention(Right):
    def linear(
        self, name: str, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> Int8Product:
        if ".attn." in name:
            raise ValueError(f"{name}: only MLPs, please")
        return super().linear(name, weights, bias, dtype)


class ClaimsToBeLossless(FewBits):
    provides: ClassVar = {"lossless"}


class SleepingProduct(Int8Product):
    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[1] == 256:
            time.sleep(0.01)
        return super().__call__(x)


class ThinksForLong(Right):
    product = SleepingProduct


BROKEN = {
    LosesTheScales: {
        "l2_products_are_within_the_error",
        "l2_every_row_counts",
        "l2_any_shape_or_a_clear_error",
        "l2_stacks_in_order",
    },
    OneScaleForAll: {"l2_every_row_counts", "l2_products_are_within_the_error"},
    FewBits: {
        "l3_any_numbers",
        "l2_products_are_within_the_error",
        "l2_every_row_counts",
        "l2_any_shape_or_a_clear_error",
        "l2_stacks_in_order",
    },
    StacksBackwards: {"l2_stacks_in_order"},
    MiscountsBytes: {"l1_bytes_are_those_held"},
    SavesNothing: {"l1_lossy_is_smaller"},
    OneScaleForTheBatch: {"l2_rows_do_not_depend_on_neighbours"},
    DropsTheLastColumns: {"l2_any_shape_or_a_clear_error"},
    WritesIntoTheBias: {"l1_inputs_are_not_changed"},
    SharesItsScales: {"l1_matrices_are_independent", "l1_bytes_are_those_held"},
    EmbedsTheNextToken: {"l2_embedding"},
    KnowsNoAttention: {"l2_serves_every_request"},
    ClaimsToBeLossless: {
        "l2_products_are_within_the_error",
        "l2_every_row_counts",
        "l2_any_shape_or_a_clear_error",
        "l2_stacks_in_order",
        "l2_output_equals_the_null_parts",
    },
    ThinksForLong: {"l4_cost_and_growth"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="quantizer.weights",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset(getattr(part, "provides", {"lossy", "error:0.03"})),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

"""KV quantizers that are wrong in one way each."""

import time
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from core.interfaces import BuildContext, KVQuantizer, Options, PluginInfo
from core.types import KVField, KVFormat, KVGroup


class Right(KVQuantizer):
    """8 bits with a scale for each token and head; the ones below change one thing of it."""

    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        fields = [
            KVField("k", torch.int8, (group.kv_heads, group.key_dim)),
            KVField("k_scale", torch.float32, (group.kv_heads,)),
        ]
        if not group.value_in_key:
            fields += [
                KVField("v", torch.int8, (group.kv_heads, group.value_dim)),
                KVField("v_scale", torch.float32, (group.kv_heads,)),
            ]
        return KVFormat(type(self).__name__, tuple(fields))

    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        for name, rows in (("k", k), ("v", v)):
            if name in storage:
                scale = self.scale(rows)
                table = torch.round(rows / scale[..., None]).clamp(-127, 127).to(torch.int8)
                storage[name].flatten(0, 1)[slots] = table
                storage[f"{name}_scale"].flatten(0, 1)[slots] = scale

    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        keys = self.decoded(storage, "k", pages, n_tokens)
        return keys, self.decoded(storage, "v", pages, n_tokens) if "v" in storage else keys

    def scale(self, rows: Tensor) -> Tensor:
        return (rows.abs().amax(-1) / 127).clamp_min(1e-12)

    def decoded(self, storage: Mapping[str, Tensor], name: str, pages: Tensor, n_tokens: int) -> Tensor:
        scale = storage[f"{name}_scale"][pages].flatten(0, 1)[:n_tokens]
        return storage[name][pages].flatten(0, 1)[:n_tokens].float() * scale[..., None]


class LosesScales(Right):
    def decoded(self, storage: Mapping[str, Tensor], name: str, pages: Tensor, n_tokens: int) -> Tensor:
        return storage[name][pages].flatten(0, 1)[:n_tokens].float() / 32


class KeepsScalesItself(Right):
    """The scales lie in the object, where neither a copied page nor another process finds them."""

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self.scales: dict[tuple[int, str], Tensor] = {}

    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(storage, k, v, slots)
        for name in ("k_scale", "v_scale"):
            if name in storage:
                kept = self.scales.setdefault((storage["k"].data_ptr(), name), torch.zeros_like(storage[name]))
                kept.flatten(0, 1)[slots] = storage[name].flatten(0, 1)[slots]

    def decoded(self, storage: Mapping[str, Tensor], name: str, pages: Tensor, n_tokens: int) -> Tensor:
        key = (storage["k"].data_ptr(), f"{name}_scale")
        kept = self.scales.get(key, torch.zeros_like(storage[f"{name}_scale"]))
        return super().decoded({**storage, f"{name}_scale": kept}, name, pages, n_tokens)


class OneScaleForAWrite(Right):
    def scale(self, rows: Tensor) -> Tensor:
        return (rows.abs().amax() / 127).clamp_min(1e-12).expand(rows.shape[:-1])


class GrowsAPagesScale(Right):
    """One scale for a page, which grows with what is written and is not taken back when the page is used again."""

    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        for name, rows in (("k", k), ("v", v)):
            if name not in storage:
                continue
            size = storage[name].shape[1]
            table, scales = storage[name].flatten(0, 1), storage[f"{name}_scale"]
            for row, slot in zip(rows, slots.tolist(), strict=True):
                page = slot // size
                needed = torch.maximum(scales[page].amax(0), self.scale(row))
                held = storage[name][page].float() * scales[page][..., None]
                storage[name][page] = torch.round(held / needed[:, None]).to(torch.int8)
                scales[page] = needed
                table[slot] = torch.round(row / needed[:, None]).clamp(-127, 127).to(torch.int8)


class WritesOnePageOn(Right):
    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(storage, k, v, slots)
        last = storage["k"].shape[0] * storage["k"].shape[1] - 1
        super().write(storage, k[-1:], v[-1:], (slots[-1:] + 1).clamp_max(last))


class ReadsInPageOrder(Right):
    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        return super().read(storage, pages.sort().values, n_tokens)


class RoundsTheInput(Right):
    def write(self, storage: Mapping[str, Tensor], k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().write(storage, k, v, slots)
        k.round_()


class SavesNothing(Right):
    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        plain = super().format(group, page_size, dtype)
        return KVFormat(plain.name, (*plain.fields, KVField("spare", torch.float64, (group.kv_heads, group.key_dim))))


class GivesHalfPrecision(Right):
    def decoded(self, storage: Mapping[str, Tensor], name: str, pages: Tensor, n_tokens: int) -> Tensor:
        return super().decoded(storage, name, pages, n_tokens).half()


class HasAnotherName(Right):
    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        return KVFormat("int9", super().format(group, page_size, dtype).fields)


class ClaimsToBeLossless(Right):
    provides: ClassVar = {"lossless"}

    def scale(self, rows: Tensor) -> Tensor:
        return super().scale(rows) * 20


class ThinksForLong(Right):
    def read(self, storage: Mapping[str, Tensor], pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        if len(pages) == 8:
            time.sleep(0.01)
        return super().read(storage, pages, n_tokens)


READS = {
    "l1_nothing_is_kept_beside_the_storage",
    "l2_reads_what_was_written",
    "l2_zeros_and_constants",
    "l2_token_by_token_is_all_at_once",
    "l2_many_sequences_in_one_write",
    "l2_a_page_can_be_used_again",
    "l2_a_copied_page_goes_its_own_way",
}
BROKEN = {
    LosesScales: READS,
    KeepsScalesItself: {"l1_nothing_is_kept_beside_the_storage", "l2_a_copied_page_goes_its_own_way"},
    OneScaleForAWrite: {"l2_many_sequences_in_one_write"},
    GrowsAPagesScale: {
        "l3_any_order",
        "l2_a_page_can_be_used_again",
        "l2_token_by_token_is_all_at_once",
        "l2_a_copied_page_goes_its_own_way",
    },
    WritesOnePageOn: {"l1_other_pages_stay"},
    ReadsInPageOrder: {
        "l1_nothing_is_kept_beside_the_storage",
        "l2_reads_what_was_written",
        "l2_token_by_token_is_all_at_once",
    },
    RoundsTheInput: {"l1_inputs_are_not_changed"},
    SavesNothing: {"l1_bytes_are_those_of_the_pool"},
    GivesHalfPrecision: READS | {"l2_serves_every_request"},
    HasAnotherName: {"l1_format_has_a_name_and_fields"},
    ClaimsToBeLossless: READS | {"l2_output_equals_the_null_parts"},
    ThinksForLong: {"l4_cost_and_growth"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="quantizer.kv",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset(getattr(part, "provides", {"lossy", "error:0.02"})),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

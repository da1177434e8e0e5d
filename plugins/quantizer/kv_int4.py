"""Keys and values in four bits, in the manner of KIVI."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from core.interfaces.plugin import BuildContext, Options
from core.interfaces.quantizer import KVQuantizer
from core.types import KVField, KVFormat, KVGroup

Storage = Mapping[str, Tensor]

VALUE_GROUP = 32
"""The most neighbouring values that share a scale."""
SMALLEST_PAGE = 4
FLOAT16_SLACK = 1 + 2**-10


class Int4KV(KVQuantizer):
    """Keys share a scale and a minimum over the tokens of a page, by channel; values over up to 32 channels, by token.

    Method: KIVI (Liu et al., ICML 2024), with the page as its group of tokens. The keys of a page that is not full yet
    are kept whole in a tail, so that each is rounded once. A number is off by at most half its scale, a 15th of the
    range it shares, and a 2048th of the minimum; numbers beyond 65,504 are cut. A key takes 4 bits and 32 for each
    page, so large pages pay.

    Pages find their tails by tickets: a tail belongs to the page that holds its ticket. Tails lie in the storage, as
    many as sequences may run and some more; the oldest is given up first, its page then quantized as far as it goes.
    """

    def __init__(self, options: Options, context: BuildContext) -> None:
        super().__init__(options, context)
        self._n_tails = 2 * context.max_running + 8
        self._model_dtype = torch.float32

    @classmethod
    def unfit(cls, options: Options, context: BuildContext) -> Sequence[str]:
        if context.page_size >= SMALLEST_PAGE:
            return ()
        return (f"keys share a scale over a page, so kv_allocator.page_size must be {SMALLEST_PAGE} or more",)

    def format(self, group: KVGroup, page_size: int, dtype: torch.dtype) -> KVFormat:
        heads, width = group.kv_heads, group.key_dim
        if width % 2 or group.value_dim % 2:
            raise ValueError(f"int4 packs two numbers a byte, and a head has {width} keys and {group.value_dim} values")
        self._model_dtype = dtype
        fields = [
            KVField("k", torch.uint8, (heads, width // 2)),
            KVField("k_scale", torch.float16, (heads, width), per="page"),
            KVField("k_min", torch.float16, (heads, width), per="page"),
            KVField("tail_of", torch.int32, (), per="page"),
            KVField("ticket_of", torch.int64, (), per="page"),
            KVField("tail", dtype, (self._n_tails, page_size, heads, width), per="pool"),
            KVField("ticket", torch.int64, (self._n_tails,), per="pool"),
            KVField("issued", torch.int64, (1,), per="pool"),
            KVField("owner", torch.int32, (self._n_tails,), per="pool"),
        ]
        if not group.value_in_key:
            shared = group.value_dim // math.gcd(group.value_dim, VALUE_GROUP)
            fields += [
                KVField("v", torch.uint8, (heads, group.value_dim // 2)),
                KVField("v_scale", torch.float16, (heads, shared)),
                KVField("v_min", torch.float16, (heads, shared)),
            ]
        return KVFormat("int4", tuple(fields))

    def write(self, storage: Storage, k: Tensor, v: Tensor, slots: Tensor) -> None:
        if "v" in storage:
            self._write_values(storage, v, slots)
        page_size = storage["k"].shape[1]
        pages, counts = torch.unique_consecutive(slots // page_size, return_counts=True)
        starts = counts.cumsum(0) - counts
        offsets = slots[starts] % page_size
        whole = counts == page_size
        if bool(whole.any()):
            rows = starts[whole][:, None] + torch.arange(page_size, device=k.device)
            _store_pages(storage, pages[whole], k[rows])
        if bool(whole.all()):
            return
        pages, starts, offsets, ends = pages[~whole], starts[~whole], offsets[~whole], (offsets + counts)[~whole]
        self._open(storage, pages, offsets, k[starts])
        part = ~torch.repeat_interleave(whole, counts)
        places = storage["tail_of"][slots[part] // page_size] * page_size + slots[part] % page_size
        storage["tail"].flatten(0, 1).index_copy_(0, places.long(), k[part].to(storage["tail"].dtype))
        full = pages[ends == page_size]
        if len(full):
            _close(storage, full)

    def read(self, storage: Storage, pages: Tensor, n_tokens: int) -> tuple[Tensor, Tensor]:
        keys = _load_pages(storage, pages)
        is_open = _is_open(storage, pages)
        if bool(is_open.any()):
            keys[is_open] = storage["tail"][storage["tail_of"][pages[is_open]]].float()
        keys = keys.flatten(0, 1)[:n_tokens].to(self._model_dtype)
        return keys, self._read_values(storage, pages, n_tokens) if "v" in storage else keys

    def _write_values(self, storage: Storage, v: Tensor, slots: Tensor) -> None:
        shared = v.float().reshape(*v.shape[:2], storage["v_scale"].shape[-1], -1)
        codes, scale, low = _quantize(shared, dim=-1)
        found = {"v": _pack(codes.flatten(-2)), "v_scale": scale.squeeze(-1), "v_min": low.squeeze(-1)}
        for name, rows in found.items():
            storage[name].flatten(0, 1).index_copy_(0, slots, rows)

    def _read_values(self, storage: Storage, pages: Tensor, n_tokens: int) -> Tensor:
        codes, scale, low = (
            storage[name].index_select(0, pages).flatten(0, 1)[:n_tokens] for name in ("v", "v_scale", "v_min")
        )
        shared = _unpack(codes).reshape(*scale.shape, -1)
        return (low.float()[..., None] + shared * scale.float()[..., None]).flatten(-2).to(self._model_dtype)

    def _open(self, storage: Storage, pages: Tensor, offsets: Tensor, first_keys: Tensor) -> None:
        """See to it that each page has a tail of its own, before any is written to."""
        own = _is_open(storage, pages) & (storage["owner"][storage["tail_of"][pages]] == pages) & (offsets > 0)
        for place in (~own).nonzero().flatten().tolist():
            page = pages[place : place + 1]
            if int(offsets[place]) == 0:
                # Slots that hold no token yet must not widen the range, should the page be given up unfilled.
                before = first_keys[place]
            elif bool(_is_open(storage, page)):
                before = storage["tail"][int(storage["tail_of"][page])].clone()
            else:
                before = _load_pages(storage, page)[0]
            tail = int(storage["ticket"].argmin())
            _give_up(storage, tail)
            ticket = storage["issued"].add_(1)
            storage["tail"][tail] = before.to(storage["tail"].dtype)
            storage["ticket"][tail] = ticket[0]
            storage["owner"][tail] = page[0]
            storage["tail_of"][page] = tail
            storage["ticket_of"][page] = ticket[0]


def _is_open(storage: Storage, pages: Tensor) -> Tensor:
    ticket = storage["ticket_of"][pages]
    return (ticket > 0) & (ticket == storage["ticket"][storage["tail_of"][pages]])


def _close(storage: Storage, pages: Tensor) -> None:
    """Quantize open pages from their tails."""
    tails = storage["tail_of"][pages]
    _store_pages(storage, pages, storage["tail"][tails])
    storage["ticket"][tails] = 0


def _give_up(storage: Storage, tail: int) -> None:
    """Free a tail; the page in the making that still holds its ticket is quantized as it is."""
    page = storage["owner"][tail : tail + 1].long()
    if int(storage["ticket"][tail]) and int(storage["ticket_of"][page]) == int(storage["ticket"][tail]):
        _close(storage, page)


def _store_pages(storage: Storage, pages: Tensor, keys: Tensor) -> None:
    """Quantize keys [n, P, Hkv, D] into whole pages [n]."""
    codes, scale, low = _quantize(keys.float(), dim=1)
    storage["k"][pages] = _pack(codes)
    storage["k_scale"][pages] = scale.squeeze(1)
    storage["k_min"][pages] = low.squeeze(1)
    storage["ticket_of"][pages] = 0


def _load_pages(storage: Storage, pages: Tensor) -> Tensor:
    """Keys [n, P, Hkv, D] of pages [n], as quantized."""
    codes, scale, low = (storage[name].index_select(0, pages) for name in ("k", "k_scale", "k_min"))
    return low.float()[:, None] + _unpack(codes) * scale.float()[:, None]


def _quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 15 of `x`, and the scale and minimum in float16 that all along `dim` share."""
    most = torch.finfo(torch.float16).max
    low = x.amin(dim, keepdim=True).clamp(-most, most).half()
    scale = ((x.amax(dim, keepdim=True) - low.float()) / 15 * FLOAT16_SLACK).clamp(0, most).half()
    codes = ((x - low.float()) / torch.where(scale > 0, scale, 1).float()).round_().clamp_(0, 15)
    return codes.to(torch.uint8), scale, low


def _pack(codes: Tensor) -> Tensor:
    """Codes [..., D] two to a byte [..., D / 2]."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def _unpack(packed: Tensor) -> Tensor:
    """Codes [..., D] as float32, from bytes [..., D / 2]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()

"""The second tier: pages of preempted sequences and of idle prefixes, in host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass
from itertools import chain, takewhile

from core.copies import copies_of
from core.pages import Pages
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Swapped:
    """What lies here of a preempted sequence: its first `num_computed` tokens' pages by group, each from `start` on."""

    num_computed: int
    tables: list[list[int]]
    starts: list[int]


class HostTier:
    """Copies pages out and back in. Idle prefixes give way to preempted sequences, the least recently kept first.
    `copies.wait` comes before the device's pages are read or written again."""

    def __init__(self, device: list[Pages], host: list[Pages]) -> None:
        self.device = device
        self.host = host
        self.page_size = device[0].page_size
        self.swapped: dict[str, Swapped] = {}
        self.idle: OrderedDict[bytes, list[int]] = OrderedDict()
        self.pages_out = [0] * len(device)
        self.pages_in = [0] * len(device)
        self.copies = copies_of(device[0].pool)
        self._self_contained = not any(
            field.per == "pool" for pages in device for field in pages.pool.format.fields
        )

    def copy_out(self, seq: Sequence) -> Swapped | None:
        """A copy of what a sequence has computed; None if there is no room. A format that keeps a part of a page
        elsewhere until it is full is copied in whole pages only."""
        n_tokens = seq.num_computed
        if not self._self_contained:
            n_tokens -= n_tokens % self.page_size
        counts = [-(-(n_tokens - table.start) // self.page_size) for table in seq.tables]
        if min(counts) < 1:
            return None
        taken = self._allocate(counts)
        if taken is None:
            return None
        for index, (table, target) in enumerate(zip(seq.tables, taken, strict=True)):
            self._out(index, table.pages[: len(target)], target)
        return Swapped(n_tokens, taken, [table.start for table in seq.tables])

    def give_up(self, swapped: Swapped | None) -> None:
        """Free a copy that is of no use."""
        if swapped is not None:
            self._free(swapped.tables)

    def copy_in(self, seq: Sequence) -> None:
        """Fill the pages that a sequence holds again, and free those here."""
        swapped = self.swapped.pop(seq.id)
        for index, (table, source) in enumerate(zip(seq.tables, swapped.tables, strict=True)):
            self._in(index, source, table.pages[: len(source)])

    def drop(self, seq: Sequence) -> None:
        """Free what lies here of a sequence, if anything does."""
        self.give_up(self.swapped.pop(seq.id, None))

    def keep(self, digest: bytes, pages: list[int | None]) -> None:
        """Copy a page that leaves the prefix cache, one in each group, if all are there and room can be made."""
        held = [page for page in pages if page is not None]
        if len(held) < len(pages) or digest in self.idle:
            return
        taken = self._allocate([1] * len(pages))
        if taken is None:
            return
        for index, (page, target) in enumerate(zip(held, taken, strict=True)):
            self._out(index, [page], target)
        self.idle[digest] = [target[0] for target in taken]

    def take(self, digests: Iterable[bytes]) -> list[tuple[bytes, list[int]]]:
        """The idle pages that `digests` begin with, taken out so that making room for them does not lose them."""
        found = []
        for digest in digests:
            pages = self.idle.pop(digest, None)
            if pages is None:
                break
            found.append((digest, pages))
        return found

    def count(self, digests: Iterable[bytes]) -> int:
        """How many idle pages `digests` begin with."""
        return sum(1 for _ in takewhile(self.idle.__contains__, digests))

    def put_back(self, found: list[tuple[bytes, list[int]]]) -> None:
        """Undo `take`. What has come to lie here meanwhile stays."""
        for digest, pages in found:
            if digest in self.idle:
                self._free([[page] for page in pages])
            else:
                self.idle[digest] = pages

    def bring_in(self, found: list[tuple[bytes, list[int]]], targets: list[list[int]]) -> None:
        """Copy what `take` gave to device pages `targets`, by group, and free it here."""
        for index, target in enumerate(targets):
            self._in(index, [pages[index] for _, pages in found], target)

    def forget_idle(self) -> None:
        while self.idle:
            self._drop_idle()

    def check(self) -> None:
        """Every page here is a preempted sequence's or an idle prefix's. PartFault."""
        for index, host in enumerate(self.host):
            swapped = (page for each in self.swapped.values() for page in each.tables[index])
            idle = (pages[index] for pages in self.idle.values())
            host.check(chain(swapped, idle), f"{host.pool.group.name} in the host tier")

    def stats(self, index: int) -> dict[str, int]:
        host = self.host[index]
        size = host.allocator.page_bytes
        return {
            "host_pages": host.n_pages,
            "host_held": host.n_held - len(self.idle),
            "host_cached": len(self.idle),
            "host_total_bytes": host.n_pages * size,
            "host_used_bytes": host.n_held * size,
            "host_pages_out": self.pages_out[index],
            "host_pages_in": self.pages_in[index],
        }

    def _out(self, index: int, pages: Sequence_[int], targets: Sequence_[int]) -> None:
        self.copies.copy(self.device[index].pool, pages, self.host[index].pool, targets)
        self.pages_out[index] += len(pages)

    def _in(self, index: int, pages: Sequence_[int], targets: Sequence_[int]) -> None:
        """Copy pages to the device and free them here."""
        self.copies.copy(self.host[index].pool, pages, self.device[index].pool, targets)
        self.host[index].free(pages)
        self.pages_in[index] += len(pages)

    def _allocate(self, counts: list[int]) -> list[list[int]] | None:
        """So many pages in each group, or none in any."""
        taken: list[list[int]] = []
        for host, count in zip(self.host, counts, strict=True):
            pages = self._allocate_group(host, count)
            if pages is None:
                self._free(taken)
                return None
            taken.append(pages)
        return taken

    def _allocate_group(self, host: Pages, count: int) -> list[int] | None:
        if count > host.n_pages:
            return None
        n_tokens = count * self.page_size
        while (pages := host.allocate(n_tokens, n_tokens)) is None:
            if not self.idle:
                return None
            self._drop_idle()
        return pages

    def _drop_idle(self) -> None:
        _, pages = self.idle.popitem(last=False)
        self._free([[page] for page in pages])

    def _free(self, tables: list[list[int]]) -> None:
        for host, pages in zip(self.host, tables, strict=False):
            host.free(pages)

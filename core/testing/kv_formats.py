"""Conformance of a KV quantizer: what is read is what was written, page by page, in the bytes it says."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from core.interfaces import BuildContext, KVQuantizer
from core.kv import Pool, page_bytes, shared_bytes
from core.testing.cost import Cost, assert_cost, assert_growth, microseconds
from core.testing.serving import SameOutput
from core.testing.suite import Suite
from core.types import KVGroup

LOSSLESS_ERROR = 0.0
LOSSY_ERROR = 0.1
GROUP = KVGroup("full", (0, 1), kv_heads=2, key_dim=32, value_dim=16)


class KVQuantizerSuite(SameOutput, Suite):
    """Checks of a `quantizer.kv` part. A lossy one may state `error:<number>`: the error of what is read relative to
    the size of what was written, both as root mean squares by token and head (0.1 if it states none). With `per_page`
    that size is the largest token's of the same page."""

    seam: ClassVar[str] = "quantizer.kv"
    cost_us: ClassVar[float] = 5_000.0

    def quantizer(self) -> KVQuantizer:
        quantizer: KVQuantizer = self.build(BuildContext(page_size=self.page_size))
        return quantizer

    def pool(self, quantizer: KVQuantizer, n_pages: int = 6, group: KVGroup = GROUP) -> Pool:
        return Pool(group, 0, n_pages, self.page_size, quantizer, torch.float32)

    @property
    def bound(self) -> float:
        return LOSSLESS_ERROR if "lossless" in self.card.provides else self.declared("error", LOSSY_ERROR)

    def numbers(self, n: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        k = torch.randn(n, GROUP.kv_heads, GROUP.key_dim, generator=generator) * scale
        v = torch.randn(n, GROUP.kv_heads, GROUP.value_dim, generator=generator) * scale
        return k, v

    def write(self, quantizer: KVQuantizer, pool: Pool, k: Tensor, v: Tensor, slots: Tensor) -> None:
        quantizer.write(pool.layers[0].storage, k.clone(), v.clone(), slots.clone())

    def slots(self, pages: list[int], n: int, first: int = 0) -> Tensor:
        size = self.page_size
        return torch.tensor([pages[i // size] * size + i % size for i in range(first, first + n)], dtype=torch.int64)

    def assert_read(
        self, quantizer: KVQuantizer, pool: Pool, pages: list[int], k: Tensor, v: Tensor, what: str
    ) -> None:
        found = quantizer.read(pool.layers[0].storage, torch.tensor(pages), len(k))
        for name, read, wanted in zip(("keys", "values"), found, (k, v), strict=True):
            assert read.shape == wanted.shape, f"{what}: {name} are {tuple(read.shape)}, not {tuple(wanted.shape)}"
            assert read.dtype == torch.float32, f"{what}: {name} come as {read.dtype}, not in the model's dtype"
            error = (read.double() - wanted.double()).pow(2).mean(-1).sqrt()
            allowed = self.bound * self._size(wanted)
            over = error - allowed
            token = int(over.max(-1).values.argmax())
            assert bool((over <= 1e-9).all()), (
                f"{what}: {name} of token {token} are off by {error[token].max():.2g}; "
                f"{allowed[token].min():.2g} is allowed"
            )

    def _size(self, wanted: Tensor) -> Tensor:
        """What an error is measured against, [n, Hkv]: the token itself, or the largest token of its page."""
        size = wanted.double().pow(2).mean(-1).sqrt()
        if "per_page" not in self.card.provides:
            return size
        return torch.cat([page.amax(0, keepdim=True).expand_as(page) for page in torch.split(size, self.page_size)])

    # --- level 1 ---------------------------------------------------------------------------------------------------

    def test_l1_format_has_a_name_and_fields(self) -> None:
        format = self.quantizer().format(GROUP, self.page_size, torch.float32)
        assert format.name == self.card.name or format.name == "none", (
            f"the format is named {format.name!r}; kernels find it by the part's name, {self.card.name!r}"
        )
        names = [field.name for field in format.fields]
        assert names and len(set(names)) == len(names), f"fields need names of their own: {names}"

    def test_l1_bytes_are_those_of_the_pool(self) -> None:
        quantizer = self.quantizer()
        pool = self.pool(quantizer)
        format = quantizer.format(GROUP, self.page_size, torch.float32)
        pages, shared = page_bytes(GROUP, format, self.page_size) * 6, shared_bytes(GROUP, format)
        said = pages + shared
        assert said == pool.nbytes, f"the fields add up to {said} bytes; the pool holds {pool.nbytes}"
        dense = 6 * self.page_size * 2 * GROUP.kv_heads * (GROUP.key_dim + GROUP.value_dim) * 4
        if "lossless" not in self.card.provides:
            assert pages < dense, f"a lossy format must save memory: {pages} bytes, {dense} in float32"

    def test_l1_inputs_are_not_changed(self) -> None:
        quantizer = self.quantizer()
        k, v = self.numbers(7)
        slots = self.slots([2, 0, 1, 3, 4], 7)
        copies = [t.clone() for t in (k, v, slots)]
        quantizer.write(self.pool(quantizer).layers[0].storage, k, v, slots)
        for name, tensor, before in zip(("k", "v", "slots"), (k, v, slots), copies, strict=True):
            assert torch.equal(tensor, before), f"write changed {name}"

    def test_l1_other_pages_stay(self) -> None:
        quantizer = self.quantizer()
        pool, size = self.pool(quantizer), self.page_size
        k, v = self.numbers(2 * size)
        self.write(quantizer, pool, k, v, self.slots([4, 1], 2 * size))
        before = [t.clone() for t in quantizer.read(pool.layers[0].storage, torch.tensor([4, 1]), 2 * size)]
        loud = self.numbers(3 * size, seed=1, scale=50.0)
        self.write(quantizer, pool, *loud, self.slots([0, 5, 3], 3 * size))
        after = quantizer.read(pool.layers[0].storage, torch.tensor([4, 1]), 2 * size)
        assert all(map(torch.equal, before, after)), "writing to other pages changed what a page holds"

    def test_l1_nothing_is_kept_beside_the_storage(self) -> None:
        writer, reader = self.quantizer(), self.quantizer()
        pool, n = self.pool(writer), self.page_size + 1
        k, v = self.numbers(n)
        self.write(writer, pool, k, v, self.slots([3, 1], n))
        self.assert_read(reader, pool, [3, 1], k, v, "read by another instance (scales must lie in the storage)")

    # --- level 2 ---------------------------------------------------------------------------------------------------

    def test_l2_reads_what_was_written(self) -> None:
        for n in (1, self.page_size, self.page_size + 1, 3 * self.page_size):
            for scale in (1.0, 1e-3, 1e3):
                quantizer = self.quantizer()
                pool = self.pool(quantizer)
                k, v = self.numbers(n, scale=scale)
                self.write(quantizer, pool, k, v, self.slots([5, 0, 3], n))
                self.assert_read(quantizer, pool, [5, 0, 3][: -(-n // self.page_size)], k, v, f"{n} tokens, {scale:g}")

    def test_l2_zeros_and_constants(self) -> None:
        n = self.page_size
        for value in (0.0, 1.0, -3.0):
            quantizer = self.quantizer()
            pool = self.pool(quantizer)
            k, v = (torch.full_like(x, value) for x in self.numbers(n))
            self.write(quantizer, pool, k, v, self.slots([2], n))
            self.assert_read(quantizer, pool, [2], k, v, f"all numbers {value:g}")

    def test_l2_token_by_token_is_all_at_once(self) -> None:
        quantizer = self.quantizer()
        pool, n = self.pool(quantizer), 2 * self.page_size + 1
        k, v = self.numbers(n)
        k = k * torch.linspace(0.1, 3.0, n)[:, None, None]
        first = 0
        for size in (1, 2, 1, *[1] * n):
            size = min(size, n - first)
            if size:
                slots = self.slots([4, 2, 0], size, first)
                self.write(quantizer, pool, k[first : first + size], v[first : first + size], slots)
                first += size
        self.assert_read(quantizer, pool, [4, 2, 0], k, v, "written a few tokens at a time")

    def test_l2_many_sequences_in_one_write(self) -> None:
        quantizer = self.quantizer()
        pool, size = self.pool(quantizer), self.page_size
        one, other = self.numbers(size), self.numbers(size, seed=2, scale=20.0)
        slots = torch.cat((self.slots([3], size), self.slots([0], size)))
        self.write(quantizer, pool, torch.cat((one[0], other[0])), torch.cat((one[1], other[1])), slots)
        self.assert_read(quantizer, pool, [3], *one, "the first of two sequences written together")
        self.assert_read(quantizer, pool, [0], *other, "the second of two sequences written together")

    def test_l2_a_page_can_be_used_again(self) -> None:
        quantizer = self.quantizer()
        pool, size = self.pool(quantizer), self.page_size
        self.write(quantizer, pool, *self.numbers(size, scale=1000.0), self.slots([1], size))
        quiet = self.numbers(size, seed=3, scale=0.01)
        for i in range(size):
            self.write(quantizer, pool, quiet[0][i : i + 1], quiet[1][i : i + 1], self.slots([1], 1, i))
        self.assert_read(quantizer, pool, [1], *quiet, "a page that held larger numbers before")

    def test_l2_a_copied_page_goes_its_own_way(self) -> None:
        quantizer = self.quantizer()
        pool, size = self.pool(quantizer), self.page_size
        half = max(1, size // 2)
        k, v = self.numbers(size)
        self.write(quantizer, pool, k[:half], v[:half], self.slots([1], half))
        pool.copy(1, 4)
        loud = self.numbers(size, seed=4, scale=30.0)
        rest = size - half
        if rest:
            self.write(quantizer, pool, loud[0][half:], loud[1][half:], self.slots([4], rest, half))
            self.write(quantizer, pool, k[half:], v[half:], self.slots([1], rest, half))
        self.assert_read(quantizer, pool, [1], k, v, "the page that was copied from")
        copy = [torch.cat((old[:half], new[half:])) for old, new in zip((k, v), loud, strict=True)]
        self.assert_read(quantizer, pool, [4], copy[0], copy[1], "the copy")

    # --- level 3 ---------------------------------------------------------------------------------------------------

    def test_l3_any_order(self) -> None:
        from hypothesis import given
        from hypothesis import strategies as st

        from core.testing.hypothesis_settings import suite_settings

        size = self.page_size
        write = st.tuples(st.integers(0, 2), st.integers(1, 2 * size), st.sampled_from([0.01, 1.0, 30.0]))

        @suite_settings(examples=40)
        @given(writes=st.lists(write, max_size=8))
        def check(writes: list[tuple[int, int, float]]) -> None:
            quantizer = self.quantizer()
            pool = self.pool(quantizer, n_pages=12)
            tables = [[7, 2, 9, 0], [3, 11, 5, 1], [10, 4, 8, 6]]
            held = [self.numbers(0) for _ in tables]
            for seed, (row, n, scale) in enumerate(writes):
                n = min(n, 4 * size - len(held[row][0]))
                if not n:
                    continue
                more = self.numbers(n, seed, scale)
                self.write(quantizer, pool, *more, self.slots(tables[row], n, len(held[row][0])))
                held[row] = (torch.cat((held[row][0], more[0])), torch.cat((held[row][1], more[1])))
            for table, (k, v) in zip(tables, held, strict=True):
                if len(k):
                    self.assert_read(quantizer, pool, table[: -(-len(k) // size)], k, v, f"after {writes}")

        check()

    # --- level 4 ---------------------------------------------------------------------------------------------------

    def test_l4_cost_and_growth(self) -> None:
        few, many = self._cycle_cost(8), self._cycle_cost(80)
        assert_cost(few, self.declared("cost_us", self.cost_us), "writing one token and reading 8 pages")
        assert_growth(few, many, self.declared("growth", 1), "the same with 10 times the pages")

    def _cycle_cost(self, n_pages: int) -> Cost:
        quantizer = self.quantizer()
        pool, n = self.pool(quantizer, n_pages), n_pages * self.page_size
        pages = list(range(n_pages))
        self.write(quantizer, pool, *self.numbers(n), self.slots(pages, n))
        k, v = self.numbers(1)
        slots, table = self.slots(pages, 1, n - 1), torch.tensor(pages)

        def cycle() -> None:
            self.write(quantizer, pool, k, v, slots)
            quantizer.read(pool.layers[0].storage, table, n)

        return microseconds(cycle, repeats=5)

"""Parts that go wrong in the middle of serving, for the request whose prompt begins with VICTIM, or once in a while."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.interfaces import (
    AllocatorOptions,
    AttentionKernel,
    CountedPages,
    Drafter,
    DrafterOptions,
    Insertion,
    KVView,
    Options,
    PluginInfo,
    PoolContext,
    PrefixCache,
    Scheduler,
    SchedulerOptions,
    remaining,
)
from core.types import Batch, Budget, Draft, DraftView, LayerSpec, Match, Memory, Plan, Queues, Scheduled

VICTIM = 60
VICTIM_LENGTH = 11


class QuietDrafter(Drafter):
    def propose(self, views: Sequence[DraftView]) -> Sequence[Any]:
        return [self.wrong(view) if view.tokens[0] == VICTIM else Draft() for view in views]

    def wrong(self, view: DraftView) -> Any:
        return Draft()


class DraftsNegativeIds(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return Draft((-1,))


class DraftsIdsBeyondTheVocabulary(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return Draft((10**9,))


class DraftsTooMuch(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return Draft((1,) * (view.k + 1))


class DraftsNothingKnown(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return None


class DraftsWords(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return Draft(("the",))  # type: ignore[arg-type]


class DraftsUnshapedProbs(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        return Draft((1, 2), torch.ones(1, 3))


class DraftsAndRaises(QuietDrafter):
    def wrong(self, view: DraftView) -> Any:
        raise KeyError("lost")


class OpenScheduler(Scheduler):
    """Admits all it can and plans one step of each."""

    def plan(self, queues: Queues, budget: Budget, memory: Memory) -> Any:
        left, items = budget.tokens, []
        for seq in list(queues.running):
            n_tokens = min(remaining(seq), left)
            if n_tokens and memory.reserve(seq, n_tokens):
                items.append(Scheduled(seq.id, n_tokens))
                left -= n_tokens
        for seq in list(queues.waiting):
            if left and len(queues.running) < budget.running and memory.admit(seq):
                items.append(Scheduled(seq.id, min(remaining(seq), left)))
                left -= items[-1].n_tokens
        victim = next((seq for seq in queues.running if seq.num_prompt_tokens == VICTIM_LENGTH), None)
        return self.wrong(items, victim, memory) if victim is not None else Plan(tuple(items))

    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan(tuple(items))


class PlansTheUnknown(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan((*items, Scheduled("nobody", 1)))


class PlansTwice(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan((*items, *(item for item in items if item.id == victim.id)))


class PlansTooMuch(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan(tuple(Scheduled(i.id, i.n_tokens + 3 * (i.id == victim.id)) for i in items))


class PlansNonsense(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan(tuple(Scheduled(i.id, -5 if i.id == victim.id else i.n_tokens) for i in items))


class PlansNoPlan(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return "a plan"


class PlansWords(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        return Plan((*items, "the victim"))  # type: ignore[arg-type]


class PlanningRaises(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        raise RuntimeError("no idea")


class PreemptsAStranger(OpenScheduler):
    def wrong(self, items: list[Scheduled], victim: Any, memory: Memory) -> Any:
        memory.preempt(object())  # type: ignore[arg-type]
        return Plan(tuple(items))


class FreeList(CountedPages):
    def __init__(self, options: AllocatorOptions, context: PoolContext) -> None:
        super().__init__(options, context)
        self._free = list(range(self.n_pages))

    def allocate(self, n_tokens: int, *, upper_bound: int) -> Any:
        pages = self._take(self.pages_for(n_tokens))
        return self.wrong(pages) if pages and n_tokens == VICTIM_LENGTH else pages

    def extend(self, pages: Sequence[int], n_tokens: int) -> list[int] | None:
        return self._take(max(0, self.pages_for(n_tokens) - len(pages)))

    def released(self, page: int) -> None:
        self._free.append(page)

    def _take(self, wanted: int) -> list[int] | None:
        return None if wanted > len(self._free) else self.take([self._free.pop() for _ in range(wanted)])

    def wrong(self, pages: list[int]) -> Any:
        return pages


class GivesAPageTwice(FreeList):
    def wrong(self, pages: list[int]) -> Any:
        return [pages[0]] * len(pages)


class GivesForeignPages(FreeList):
    def wrong(self, pages: list[int]) -> Any:
        return [page + 10**6 for page in pages]


class GivesTooFewPages(FreeList):
    def wrong(self, pages: list[int]) -> Any:
        return pages[:1]


class GivesWords(FreeList):
    def wrong(self, pages: list[int]) -> Any:
        return "pages"


class AllocatingRaises(FreeList):
    def wrong(self, pages: list[int]) -> Any:
        raise ZeroDivisionError("no pages")


class EmptyCache(PrefixCache):
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        return self.wrong(tokens) if tokens[0] == VICTIM else Match(())

    def lock(self, match: Match) -> None:
        return None

    def unlock(self, match: Match) -> None:
        return None

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        return self.inserted(pages) if tokens[0] == VICTIM else Insertion((), Match(()))

    def evict(self, n_pages: int) -> list[int]:
        return []

    @property
    def n_pages(self) -> int:
        return 0

    def wrong(self, tokens: Sequence[int]) -> Any:
        return Match(())

    def inserted(self, pages: Sequence[int]) -> Any:
        return Insertion((), Match(()))


class MatchesAnothersPages(EmptyCache):
    def wrong(self, tokens: Sequence[int]) -> Match:
        return Match((0, 1))


class MatchesNothingKnown(EmptyCache):
    def wrong(self, tokens: Sequence[int]) -> Any:
        return None


class InsertsNothingKnown(EmptyCache):
    def inserted(self, pages: Sequence[int]) -> Any:
        return None


class MatchingRaises(EmptyCache):
    def wrong(self, tokens: Sequence[int]) -> Match:
        raise OSError("index gone")


class AdoptsForeignPages(EmptyCache):
    def inserted(self, pages: Sequence[int]) -> Any:
        return Insertion((10**6,), Match(()))


class InsertingRaises(EmptyCache):
    def inserted(self, pages: Sequence[int]) -> Any:
        raise OSError("index gone")


class RowKernel(AttentionKernel):
    formats: Sequence[str] = ("*",)

    def forward(self, q: Tensor, kv: KVView, layer: LayerSpec, batch: Batch, prepared: Any) -> Tensor:
        out = q.new_empty(q.shape[0], layer.q_heads, layer.value_dim)
        for row in range(batch.num_rows):
            begin, end = batch.query_starts[row], batch.query_starts[row + 1]
            keys, values = (x.repeat_interleave(layer.q_heads // layer.kv_heads, 1) for x in kv.rows(batch, row))
            scores = torch.einsum("nhd,shd->hns", q[begin:end], keys) * layer.scale
            hidden = torch.ones(end - begin, len(keys)).tril(len(keys) - (end - begin)) == 0
            out[begin:end] = torch.einsum("hns,shd->nhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
            if VICTIM in batch.tokens[begin:end].tolist():
                self.wrong(out[begin:end])
        return out

    def wrong(self, out: Tensor) -> None:
        return None


class KernelRaises(RowKernel):
    def wrong(self, out: Tensor) -> None:
        raise RuntimeError("launch failed")


class KernelGivesNaN(RowKernel):
    def wrong(self, out: Tensor) -> None:
        out.fill_(torch.nan)


class KernelGivesInfinity(RowKernel):
    def wrong(self, out: Tensor) -> None:
        out.fill_(torch.inf)


def _card(part: type, seam: str, options: type[Options], *provides: str) -> PluginInfo:
    return PluginInfo(
        name=part.__name__,
        seam=seam,
        part=f"{__name__}:{part.__name__}",
        options=options,
        provides=frozenset(provides),
        summary="Goes wrong while serving",
    )


FAULTS = {
    "drafter": (DrafterOptions, QuietDrafter),
    "scheduler": (SchedulerOptions, OpenScheduler),
    "kv_allocator": (AllocatorOptions, FreeList),
    "prefix_cache": (Options, EmptyCache),
    "attention.kernel": (Options, RowKernel),
}
for _seam, (_options, _base) in FAULTS.items():
    for _part in (_base, *_base.__subclasses__()):
        globals()[f"CARD_{_part.__name__}"] = _card(_part, _seam, _options, "kv:any", "window")

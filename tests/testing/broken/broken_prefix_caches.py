"""Prefix caches that are wrong in one way each."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from core.interfaces import CacheContext, Insertion, Options, PluginInfo, PrefixCache
from core.types import Match

Key = tuple[str, tuple[int, ...]]


class Right(PrefixCache):
    """A dict from a salt and all tokens up to a page's end to that page; the ones below change one thing of it."""

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        self.pages: dict[Key, int] = {}
        self.locks: Counter[Key] = Counter()

    def key(self, tokens: Sequence[int], n_pages: int, salt: str) -> Key:
        return salt, tuple(tokens[: n_pages * self.page_size])

    def find(self, tokens: Sequence[int], salt: str) -> Match:
        found: list[int] = []
        while (len(found) + 1) * self.page_size <= len(tokens):
            page = self.pages.get(self.key(tokens, len(found) + 1, salt))
            if page is None:
                break
            found.append(page)
        return Match(tuple(found), [self.key(tokens, n + 1, salt) for n in range(len(found))])

    def match(self, tokens: Sequence[int], salt: str) -> Match:
        found = self.find(tokens, salt)
        self.stats.lookups += 1
        self.stats.lookup_tokens += len(tokens)
        self.stats.hit_tokens += len(found.pages) * self.page_size
        return found

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        return len(self.find(tokens, salt).pages) * self.page_size

    def lock(self, match: Match) -> None:
        self.locks.update(match.handle)

    def unlock(self, match: Match) -> None:
        if any(not self.locks[key] for key in match.handle):
            raise ValueError("not locked")
        self.locks.subtract(match.handle)

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        adopted = []
        for n, page in enumerate(pages):
            key = self.key(tokens, n + 1, salt)
            if key not in self.pages:
                self.pages[key] = page
                adopted.append(page)
        self.stats.inserted_pages += len(adopted)
        return Insertion(tuple(adopted), self.find(tokens, salt))

    def evict(self, n_pages: int) -> list[int]:
        unlocked = [key for key in self.pages if not self.locks[key]]
        unlocked.sort(key=lambda key: -len(key[1]))
        gone = [self.pages.pop(key) for key in unlocked[:n_pages]]
        self.stats.evicted_pages += len(gone)
        return gone

    @property
    def n_pages(self) -> int:
        return len(self.pages)


class ForgetsTheSalt(Right):
    def key(self, tokens: Sequence[int], n_pages: int, salt: str) -> Key:
        return super().key(tokens, n_pages, "")


class HashesThePageAlone(Right):
    def key(self, tokens: Sequence[int], n_pages: int, salt: str) -> Key:
        return salt, tuple(tokens[(n_pages - 1) * self.page_size : n_pages * self.page_size])


class JoinsTokensAsText(Right):
    def key(self, tokens: Sequence[int], n_pages: int, salt: str) -> Key:
        return salt + "".join(str(token) for token in tokens[: n_pages * self.page_size]), ()


class EvictsLockedPages(Right):
    def lock(self, match: Match) -> None:
        super().lock(Match(match.pages[:-1], match.handle[:-1]))

    def unlock(self, match: Match) -> None:
        super().unlock(Match(match.pages[:-1], match.handle[:-1]))


class CountsNoLocks(Right):
    def lock(self, match: Match) -> None:
        self.locks.update(key for key in match.handle if not self.locks[key])

    def unlock(self, match: Match) -> None:
        for key in match.handle:
            self.locks[key] = 0


class UnlocksAtWill(Right):
    def unlock(self, match: Match) -> None:
        self.locks.subtract(key for key in match.handle if self.locks[key])


class AdoptsDuplicates(Right):
    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        insertion = super().insert(tokens, pages, salt)
        return Insertion(tuple(pages), insertion.match)


class CachesTheTail(Right):
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        padded = [*tokens, *[0] * (-len(tokens) % self.page_size)]
        found = self.find(padded, salt)
        for key, page in self.pages.items():
            if len(tokens) % self.page_size and key[0] == salt and key[1][: len(tokens)] == tuple(tokens):
                found = Match((*found.pages, page), [*found.handle, key])
                break
        self.stats.lookups += 1
        self.stats.hit_tokens += len(found.pages) * self.page_size
        return found


class KeepsTheCallersPages(Right):
    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        insertion = super().insert(tokens, pages, salt)
        self.given = [*getattr(self, "given", []), (list(pages), pages)]
        return insertion

    def find(self, tokens: Sequence[int], salt: str) -> Match:
        match = super().find(tokens, salt)
        now = {page: lent[n] for pages, lent in getattr(self, "given", []) for n, page in enumerate(pages)}
        return Match(tuple(now.get(page, page) for page in match.pages), match.handle)


class EvictsTooLittle(Right):
    def evict(self, n_pages: int) -> list[int]:
        return super().evict(min(n_pages, 1))


class MiscountsHits(Right):
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        found = super().match(tokens, salt)
        self.stats.hit_tokens += len(tokens) % self.page_size + (len(tokens) - len(found.pages) * self.page_size)
        return found


class SearchesEveryPairOfPages(Right):
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        list(range(len(self.pages) ** 2 // 100))
        return super().match(tokens, salt)


class SharesOneDict(Right):
    last: ClassVar[Callable[[], Right | None]] = lambda: None

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        before = type(self).last()
        if before is not None:
            self.pages = before.pages
        type(self).last = weakref.ref(self)


class MatchesAnything(Right):
    def match(self, tokens: Sequence[int], salt: str) -> Match:
        found = super().match(tokens, salt)
        return found if self.pages or len(tokens) < self.page_size else Match((0,), [])

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        return len(self.find(tokens, salt).pages) * self.page_size


class EvictsWhatItHasNot(Right):
    def evict(self, n_pages: int) -> list[int]:
        return super().evict(n_pages) if self.pages else [0] * n_pages


BROKEN = {
    ForgetsTheSalt: {"l3_any_order", "l2_serves_every_request", "l2_salts_never_meet", "l2_peek_is_what_match_finds"},
    HashesThePageAlone: {"l2_same_tokens_after_another_start_do_not_match"},
    JoinsTokensAsText: {"l2_tokens_are_told_apart"},
    EvictsLockedPages: {"l3_any_order", "l1_locked_pages_stay", "l1_locks_count", "l1_inserting_keeps_locks"},
    CountsNoLocks: {"l1_locks_count"},
    UnlocksAtWill: {"l1_locks_count"},
    AdoptsDuplicates: {
        "l2_output_equals_the_null_parts",
        "l1_nothing_is_adopted_twice",
        "l1_pages_are_counted",
        "l1_inserting_keeps_locks",
    },
    CachesTheTail: {"l2_finds_the_longest_prefix"},
    KeepsTheCallersPages: {"l1_inputs_are_not_changed"},
    EvictsTooLittle: {
        "l1_pages_are_counted",
        "l1_locked_pages_stay",
        "l1_inserting_keeps_locks",
        "l1_statistics_are_true",
    },
    MiscountsHits: {"l1_statistics_are_true"},
    SearchesEveryPairOfPages: {"l4_cost_and_growth"},
    SharesOneDict: {"l1_caches_are_independent"},
    MatchesAnything: {"l1_empty_matches_nothing", "l1_caches_are_independent"},
    EvictsWhatItHasNot: {"l1_evicting_nothing_gives_nothing"},
}
CARDS = [
    PluginInfo(
        name=part.__name__,
        seam="prefix_cache",
        part=f"{__name__}:{part.__name__}",
        provides=frozenset({"lossless"}),
        summary="Broken on purpose",
    )
    for part in (Right, *BROKEN)
]
globals().update({f"CARD_{card.name}": card for card in CARDS})

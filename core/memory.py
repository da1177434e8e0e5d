"""The glue between scheduler, prefix cache and allocators: what a sequence holds, and how room is made for it.

A page is in one of three states: free, held by sequences, or cached (only the prefix cache holds it). References are
counted here beside the allocators, so that a faulty part is found at the call that went wrong.

    a sequence's table in a full group          in a window group
    [cached prefix | own pages ........ ]       [passed and freed | last window | own pages]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_

from core.books import check_conservation, group_stats
from core.cached import CachedPages
from core.clock import Clock
from core.interfaces.context_reduction import ContextView
from core.interfaces.prefix_cache import PrefixCache, PrefixStats
from core.kv import window_pages
from core.pages import Pages
from core.prefixes import Leads, Sharing, page_digests
from core.sequence import PageTable, Sequence
from core.tier import HostTier
from core.types import InvalidRequest, Match, PartFault


class Memory:
    """Admits, reserves and frees. Implements core.types.Memory for schedulers, through the engine."""

    def __init__(
        self,
        groups: list[Pages],
        cache: PrefixCache,
        *,
        cache_label: str,
        sharing: Sharing,
        step_tokens: int,
        decode_tokens: int,
        clock: Clock,
        on_evicted: Callable[[int], None],
        tier: HostTier | None = None,
    ) -> None:
        self.groups = groups
        self.cache = cache
        self.page_size = groups[0].page_size
        self.forks: dict[str, Sequence] = {}
        self.leads = Leads(self.page_size, sharing)
        self.tier = tier
        self._keeps_idle = tier is not None and sharing == "prefix" and all(pages.window is None for pages in groups)
        self.lookups = PrefixStats()  # of sequences that were admitted: one that waits for room is looked up every step
        self.cached = CachedPages(
            groups,
            cache,
            label=cache_label,
            clock=clock,
            on_evicted=on_evicted,
            leaves=tier.keep if tier is not None and self._keeps_idle else None,
        )
        self._step_tokens = step_tokens
        self._decode_tokens = decode_tokens

    # --- the verbs ------------------------------------------------------------------------------------------------

    def check_fits(self, n_tokens: int) -> None:
        """InvalidRequest with both numbers if a sequence of `n_tokens` could never be held."""
        for pages in self.groups:
            need = -(-self._bound(pages, n_tokens) // self.page_size)
            if need > pages.n_pages:
                raise InvalidRequest(
                    f"this request may need {n_tokens} tokens of KV memory, {need} pages of {self.page_size}; "
                    f"the pool has {pages.n_pages} pages, {pages.n_pages * self.page_size} tokens; "
                    "ask for fewer tokens, or give memory.kv_bytes more",
                    "max_tokens",
                )

    def admit(self, seq: Sequence) -> bool:
        """Match the prefix and hold pages for all tokens, or as many as a window group may hold. False: no room."""
        if self.tier is not None and seq.id in self.tier.swapped:
            return self._swap_in(seq, self.tier)
        forked = seq.id in self.forks
        if not forked:
            self._take_prefix(seq)
        if self._admit_groups(seq):
            return True
        alone = self.groups[0].n_held <= len(self.cached.pages.keys() | seq.tables[0].pages)
        if forked and not alone:
            return False
        prefix = seq.num_computed
        self.release(seq)
        if not prefix or not alone:
            return False
        # nobody will make room: an unbroken run may only fit where what the sequence shares lies
        if self._admit_groups(seq):
            return True
        self.release(seq)
        return False

    def reserve(self, seq: Sequence, n_tokens: int) -> bool:
        """Hold private pages for the next `n_tokens`. False: no room; what was held stays."""
        return all(
            self._own_last_page(seq, index) and self._reach(seq, index, seq.num_computed + n_tokens)
            for index in range(len(self.groups))
        )

    def holds(self, seq: Sequence, n_tokens: int) -> bool:
        """Whether pages for its first `n_tokens` are in its tables."""
        return all(len(table) * self.page_size + table.start >= n_tokens for table in seq.tables)

    def release(self, seq: Sequence) -> None:
        """Free all that a sequence holds; it starts over. Those in `leads.followers` must have been released before."""
        self.leads.done(seq)
        if self.tier is not None:
            self.tier.drop(seq)
        self.cached.unlock(seq)
        self.forks.pop(seq.id, None)
        seq.num_computed, seq.reduced = 0, False
        self._free_tables(seq)

    def swap_out(self, seq: Sequence) -> int:
        """Move a running sequence to the host tier. How many of its tokens are safe there; 0: it still holds all."""
        if self.tier is None or self.leads.pending(seq):
            return 0
        swapped = self.tier.copy_out(seq)
        if swapped is None or any(
            pages.window is not None and start > self._first_needed(pages, swapped.num_computed)
            for pages, start in zip(self.groups, swapped.starts, strict=True)
        ):
            self.tier.give_up(swapped)
            return 0
        self.release(seq)
        self.tier.swapped[seq.id] = swapped
        return swapped.num_computed

    def settle(self) -> None:
        """What was copied between two tiers is in place for what is read and written next."""
        if self.tier is not None:
            self.tier.copies.wait()

    def remember(self, seq: Sequence) -> None:
        """Offer a sequence's whole computed pages to the prefix cache."""
        if self.leads.pending(seq):
            return
        if seq.num_computed >= seq.num_prompt_tokens:
            self.leads.leave(seq)
        table = seq.tables[0]
        n_full = min(seq.num_computed // self.page_size, len(table))
        if table.start or seq.reduced or not n_full:
            return
        self.cached.insert(seq, n_full)

    def views(self, seq: Sequence) -> list[ContextView]:
        """What a context reduction may judge of a sequence: each group without a window."""
        if self.leads.followers(seq):
            return []
        return [
            ContextView(
                id=seq.id,
                group=index,
                kept=seq.num_computed - table.start,
                num_computed=seq.num_computed,
                num_prompt_tokens=seq.num_prompt_tokens,
                page_size=self.page_size,
            )
            for index, (pages, table) in enumerate(zip(self.groups, seq.tables, strict=True))
            if pages.window is None
        ]

    def forget(self, seq: Sequence, view: ContextView, places: Sequence_[int]) -> None:
        """Free pages from the middle of a table. PartFault: places that are not there, not rising, or the last."""
        if any(not 0 <= place < view.n_pages - 1 for place in places) or list(places) != sorted(set(places)):
            raise PartFault(f"it forgets {list(places)[:8]} of {view.n_pages} pages; they must rise, before the last")
        pages, table = self.groups[view.group], seq.tables[view.group]
        gone = set(places)
        forgotten = [table.pages[place] for place in places]
        table.pages = [page for place, page in enumerate(table.pages) if place not in gone]
        table.start += len(forgotten) * self.page_size
        pages.free(forgotten)
        if not seq.reduced:
            seq.reduced = True
            self.leads.leave(seq)
            self.cached.unlock(seq)

    def cached_tokens(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence that admission would find computed, at most: a window may need more pages than
        are left of it."""
        if seq.id in self.forks:
            return seq.num_computed
        if self.tier is not None and seq.id in self.tier.swapped:
            return self.tier.swapped[seq.id].num_computed
        if not self._may_match(seq):
            return 0
        most = self._most_pages(seq)
        n_pages = min(self.cached.peek(seq), most)
        if self._keeps_idle and self.tier is not None and self.tier.idle:
            n_pages += self.tier.count(page_digests(seq, most, self.page_size)[n_pages:])
        return n_pages * self.page_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a waiting choice share all that `parent` computed of their common prompt."""
        n_tokens = min(parent.num_computed, child.num_prompt_tokens - 1)
        if n_tokens >= 1 and self._reaches(parent, n_tokens):
            self._share(parent, child, n_tokens)
            self.forks[child.id] = child

    def flush(self) -> None:
        """Empty the prefix cache of all that no running sequence has locked."""
        self.cached.evict(self.cache.n_pages)
        if self.tier is not None:
            self.tier.forget_idle()

    # --- accounting -----------------------------------------------------------------------------------------------

    def stats(self, sequences: Iterable[Sequence]) -> dict[str, dict[str, int]]:
        """Pages and bytes by group. `used` counts written tokens once, however many share their page."""
        sequences = list(sequences)
        return {
            pages.pool.group.name: {
                **group_stats(index, pages, self.cached, sequences),
                **(self.tier.stats(index) if self.tier is not None else {}),
            }
            for index, pages in enumerate(self.groups)
        }

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Rule of conservation: every reference is a sequence's or the cache's, and the rest is free. PartFault."""
        check_conservation(self.groups, self.cached, sequences)
        if self.tier is not None:
            self.tier.check()

    # --- admission ------------------------------------------------------------------------------------------------

    def _take_prefix(self, seq: Sequence) -> None:
        match = self._match(seq)
        n_pages = self._usable(match, self._most_pages(seq))
        if n_pages:
            self.cached.lock(seq, match)
        if self._follow(seq, n_pages):
            return
        seq.num_computed = n_pages * self.page_size
        for index, (pages, table) in enumerate(zip(self.groups, seq.tables, strict=True)):
            table.start = self._first_needed(pages, seq.num_computed)
            used = match.pages[table.start // self.page_size : n_pages]
            twins = [twin for twin in (self.cached.twin(page, index) for page in used) if twin is not None]
            pages.share(twins)
            table.pages = twins
        if self._keeps_idle and self.tier is not None and self._may_match(seq):
            self._bring_in(seq, self.tier, n_pages)

    def _bring_in(self, seq: Sequence, tier: HostTier, n_pages: int) -> None:
        """Go on from the prefix that was matched with pages that left the cache for the host tier."""
        if not tier.idle:
            return
        digests = page_digests(seq, self._most_pages(seq), self.page_size)
        found = tier.take(digests[n_pages:])
        targets = [self._fresh(seq, pages, len(found)) for pages in self.groups] if found else []
        wanted = [target for target in targets if target is not None]
        if len(wanted) < len(targets):
            tier.put_back(found)
            for pages, target in zip(self.groups, targets, strict=True):
                pages.free(target or ())
            return
        for table, target in zip(seq.tables, wanted, strict=False):
            table.append(target)
        if found:
            tier.bring_in(found, wanted)
        seq.num_computed += len(found) * self.page_size

    def _fresh(self, seq: Sequence, pages: Pages, n: int) -> list[int] | None:
        n_tokens = n * self.page_size
        return self._with_room(seq, pages, n_tokens, lambda: pages.allocate(n_tokens, n_tokens))

    def _swap_in(self, seq: Sequence, tier: HostTier) -> bool:
        """Pages for all tokens of a preempted sequence again, and in them what lies in the host tier."""
        swapped = tier.swapped[seq.id]
        seq.num_computed = swapped.num_computed
        for table, start in zip(seq.tables, swapped.starts, strict=True):
            table.start = start
        if all(self._admit_group(seq, index) for index in range(len(self.groups))):
            tier.copy_in(seq)
            seq.reduced = any(
                table.start > 0 for pages, table in zip(self.groups, seq.tables, strict=True) if pages.window is None
            )
            if not seq.reduced:
                self.leads.enter(seq)
            return True
        seq.num_computed = 0
        self._free_tables(seq)
        return False

    def _free_tables(self, seq: Sequence) -> None:
        for pages, table in zip(self.groups, seq.tables, strict=True):
            held, table.pages, table.start = table.pages, (), 0
            pages.free(held)

    def _follow(self, seq: Sequence, n_cached: int) -> bool:
        """Share what a running sequence computes of this one's prefix, if that is more than is cached."""
        if not self._may_match(seq):
            return False
        leader, n_pages = self.leads.find(seq, self._most_pages(seq))
        while leader is not None and n_pages > n_cached:
            if self._reaches(leader, n_pages * self.page_size):
                self._share(leader, seq, n_pages * self.page_size)
                self.leads.follow(seq, leader)
                return True
            n_pages -= 1
        return False

    def _reaches(self, seq: Sequence, n_tokens: int) -> bool:
        """Whether a sequence holds all pages that reading on after its first `n_tokens` needs."""
        return self.holds(seq, n_tokens) and all(
            table.start <= self._first_needed(pages, n_tokens)
            for pages, table in zip(self.groups, seq.tables, strict=True)
        )

    def _share(self, source: Sequence, seq: Sequence, n_tokens: int) -> None:
        """Let `seq` begin with the pages of `source` that hold their first `n_tokens`."""
        last = -(-n_tokens // self.page_size)
        for pages, held, table in zip(self.groups, source.tables, seq.tables, strict=True):
            table.start = self._first_needed(pages, n_tokens)
            shift = held.start // self.page_size
            shared = held.pages[table.start // self.page_size - shift : last - shift]
            pages.share(shared)
            table.pages = shared
        seq.num_computed = n_tokens

    def _match(self, seq: Sequence) -> Match:
        if not self._may_match(seq):
            return Match(())
        return self.cached.match(seq)

    def _may_match(self, seq: Sequence) -> bool:
        """Logprobs of the prompt need every token's logits, so nothing of it is taken from the cache."""
        return seq.request.params.prompt_logprobs is None and self._most_pages(seq) > 0

    def _most_pages(self, seq: Sequence) -> int:
        """At least one token is always computed: its logits are needed."""
        return (seq.num_tokens - 1) // self.page_size

    def _usable(self, match: Match, most: int) -> int:
        """The longest prefix of a match, in pages, whose tokens every group can still read."""
        n_pages = min(len(match.pages), most)
        while n_pages and not all(self._covered(match, n_pages, index) for index in range(1, len(self.groups))):
            n_pages -= 1
        return n_pages

    def _covered(self, match: Match, n_pages: int, index: int) -> bool:
        first = self._first_needed(self.groups[index], n_pages * self.page_size) // self.page_size
        return all(self.cached.twin(page, index) is not None for page in match.pages[first:n_pages])

    def _admit_groups(self, seq: Sequence) -> bool:
        if not all(self._admit_group(seq, index) for index in range(len(self.groups))):
            return False
        forked = self.forks.pop(seq.id, None)
        if not forked and self._may_match(seq):
            self.lookups.lookups += 1
            self.lookups.lookup_tokens += seq.num_tokens
            self.lookups.hit_tokens += seq.num_computed
        if seq.cached_tokens is None:
            seq.cached_tokens = 0 if forked else seq.num_computed
        self.leads.enter(seq)
        return True

    def _admit_group(self, seq: Sequence, index: int) -> bool:
        pages, table = self.groups[index], seq.tables[index]
        target = seq.num_tokens
        if pages.window is not None:
            target = min(target, seq.num_computed + self._step_tokens)
        have = len(table) * self.page_size
        need = target - table.start - have
        if need <= 0:
            return True
        bound = max(need, self._bound(pages, seq.max_total) - have)
        more = self._with_room(seq, pages, need, lambda: pages.allocate(need, bound))
        if more is None:
            return False
        table.append(more)
        return True

    def _bound(self, pages: Pages, n_tokens: int) -> int:
        if pages.window is None:
            return n_tokens
        return min(n_tokens, window_pages(pages.window, self._step_tokens, self.page_size) * self.page_size)

    # --- growth ---------------------------------------------------------------------------------------------------

    def _own_last_page(self, seq: Sequence, index: int) -> bool:
        """Copy the page that the next token goes to if another holds it as well, unless to read what we write."""
        if self.leads.followers(seq):
            return True
        pages, table = self.groups[index], seq.tables[index]
        position = (seq.num_computed - table.start) // self.page_size
        if position >= len(table) or pages.references[table.pages[position]] == 1:
            return True
        copy = self._with_room(seq, pages, self.page_size, lambda: pages.allocate(self.page_size, self.page_size))
        if copy is None:
            return False
        shared = table.pages[position]
        self.settle()
        pages.pool.copy(shared, copy[0])
        table.replace(position, copy[0])
        pages.free([shared, *copy[1:]])
        return True

    def _reach(self, seq: Sequence, index: int, n_tokens: int) -> bool:
        pages, table = self.groups[index], seq.tables[index]
        if pages.window is not None:
            self._slide(pages, table, seq, n_tokens)
        need = n_tokens - table.start
        if need <= len(table) * self.page_size:
            return True
        missing = need - len(table) * self.page_size

        def grow() -> list[int] | None:
            more = pages.extend(table.pages, need)
            return pages.allocate(missing, missing) if more is None and pages.window is not None else more

        more = self._with_room(seq, pages, missing, grow)
        if more is None:
            return False
        table.append(more)
        return True

    def _slide(self, pages: Pages, table: PageTable, seq: Sequence, n_tokens: int) -> None:
        """Let go of pages behind the window, and use those that are this sequence's alone again at the front. It keeps
        what a window and the largest step to come can touch."""
        start = self._first_needed(pages, seq.num_computed)
        passed = min((start - table.start) // self.page_size, len(table))
        step = max(n_tokens - seq.num_computed, self._decode_tokens, min(seq.remaining, self._step_tokens))
        most = window_pages(pages.window or 0, step, self.page_size)
        if not passed and len(table) <= most:
            return
        behind = table.pages[:passed]
        own = [page for page in behind if pages.references[page] == 1]
        kept = [*table.pages[passed:], *own]
        table.pages, table.start = kept[:most], start
        pages.free([page for page in behind if pages.references[page] > 1] + kept[most:])

    def _first_needed(self, pages: Pages, num_computed: int) -> int:
        if pages.window is None:
            return 0
        return max(0, num_computed - pages.window + 1) // self.page_size * self.page_size

    # --- making room ----------------------------------------------------------------------------------------------

    def _with_room(
        self, seq: Sequence, pages: Pages, n_tokens: int, allocate: Callable[[], list[int] | None]
    ) -> list[int] | None:
        """Allocate for `seq`, giving up cached pages, then what other waiting forks share, until there is room."""
        while True:
            more = allocate()
            if more is not None:
                return more
            missing = max(1, -(-n_tokens // self.page_size) - pages.allocator.n_free)
            if not self._give_up(seq, pages, missing):
                return None

    def _give_up(self, seq: Sequence, pages: Pages, n_pages: int) -> bool:
        return bool(self.cached.strip_window(pages, n_pages) or self.cached.evict(n_pages) or self._drop_fork(seq))

    def _drop_fork(self, but: Sequence) -> bool:
        other = next((fork for fork in self.forks.values() if fork is not but), None)
        if other is not None:
            self.release(other)
        return other is not None

"""Whole pages of tokens by digest, and those that running sequences are about to compute."""

from __future__ import annotations

from typing import Literal

from core.interfaces.page_chain import page_digest, salt_digest
from core.sequence import Sequence

Sharing = Literal["prefix", "whole", "never"]


def page_digests(seq: Sequence, n_pages: int, page_size: int) -> list[bytes]:
    """For each of a sequence's first `n_pages` pages, the digest of its salt and all tokens up to the page's end."""
    known = seq.digests
    digest = known[-1] if known else salt_digest(seq.request.cache_salt)
    for start in range(len(known) * page_size, n_pages * page_size, page_size):
        digest = page_digest(digest, seq.tokens[start : start + page_size])
        known.append(digest)
    return known[:n_pages]


class Leads:
    """Who computes which page, so that a sequence that begins alike shares the page instead of computing it again.

    A follower holds its leader's pages from admission on and counts their tokens as computed. It may run in the step
    in which the leader computes them, since a step writes all keys and values of a layer before any are read.
    `sharing` says what a prefix cache would have found, had the leader been done: any common prefix, whole prompts
    only, or nothing.
    """

    def __init__(self, page_size: int, sharing: Sharing) -> None:
        self._page_size = page_size
        self._sharing = sharing
        self._owners: dict[bytes, Sequence] = {}
        self._pages: dict[str, list[bytes]] = {}
        self._followers: dict[str, list[Sequence]] = {}

    def enter(self, seq: Sequence) -> None:
        """An admitted sequence will compute the pages that nobody computes yet."""
        if self._sharing == "never":
            return
        own = []
        for digest in page_digests(seq, self._n_whole(seq), self._page_size):
            if self._owners.setdefault(digest, seq) is seq:
                own.append(digest)
        self._pages[seq.id] = own

    def leave(self, seq: Sequence) -> None:
        """Its pages are computed and cached, or will not be."""
        for digest in self._pages.pop(seq.id, ()):
            del self._owners[digest]

    def find(self, seq: Sequence, most: int) -> tuple[Sequence | None, int]:
        """Who computes the beginning of a waiting sequence, and how many pages of it, at most `most`."""
        if not self._owners or most < 1:
            return None, 0
        leader, n_pages, n_whole = None, 0, self._n_whole(seq)
        for digest in page_digests(seq, n_whole, self._page_size):
            owner = self._owners.get(digest)
            if owner is None:
                break
            leader, n_pages = owner, n_pages + 1
        if leader is not None and self._sharing == "whole" and not n_pages == n_whole == self._n_whole(leader):
            return None, 0
        return leader, min(n_pages, most)

    def follow(self, seq: Sequence, leader: Sequence) -> None:
        seq.leader = leader, seq.num_computed
        self._followers.setdefault(leader.id, []).append(seq)

    def unfollow(self, seq: Sequence) -> None:
        if seq.leader is not None:
            leader = seq.leader[0].id
            self._followers[leader].remove(seq)
            if not self._followers[leader]:
                del self._followers[leader]
            seq.leader = None

    def pending(self, seq: Sequence) -> bool:
        """Whether tokens that count as computed are still its leader's to compute."""
        return seq.leader is not None and seq.leader[0].num_computed < seq.leader[1]

    def followers(self, seq: Sequence) -> list[Sequence]:
        """Those that wait for pages of this sequence."""
        return [follower for follower in self._followers.get(seq.id, ()) if self.pending(follower)]

    def done(self, seq: Sequence) -> None:
        """A sequence goes; those that followed it have what they need or are gone already."""
        self.leave(seq)
        self.unfollow(seq)
        for follower in self._followers.pop(seq.id, ()):
            follower.leader = None

    def _n_whole(self, seq: Sequence) -> int:
        return seq.num_tokens // self._page_size

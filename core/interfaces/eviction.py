"""What prefix caches share: entries ordered by an eviction policy, without sorting them anew."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from core.interfaces.prefix_cache import CacheEntry, EvictionPolicy


class Evictable(Protocol):
    """A cache's own node. `stamp` belongs to the queue."""

    entry: CacheEntry
    stamp: int


NodeT = TypeVar("NodeT", bound=Evictable)

GONE = -1

UNRANKED = 1 << 30
"""The priority of an entry of which nobody has said one: behind all others."""


def new_entry(time: int, depth_tokens: int, tokens: int) -> CacheEntry:
    return CacheEntry(created=time, last_used=time, depth_tokens=depth_tokens, tokens=tokens, priority=UNRANKED)


class EvictionQueue(Generic[NodeT]):
    """A heap of the nodes that may go. A node offered again replaces its older place, and one that was withdrawn
    leaves when it reaches the top, so each change costs the logarithm of the size."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[tuple[float, ...], int, NodeT]] = []
        self._stamps = count()
        self._live = 0

    def offer(self, node: NodeT) -> None:
        """`node` may go, by what its entry says now."""
        self._live += node.stamp == GONE
        node.stamp = next(self._stamps)
        heappush(self._heap, (self._policy.key(node.entry), node.stamp, node))
        if len(self._heap) > 2 * self._live + 64:
            self._heap = [place for place in self._heap if place[1] == place[2].stamp]
            heapify(self._heap)

    def withdraw(self, node: NodeT) -> None:
        """`node` must stay."""
        self._live -= node.stamp != GONE
        node.stamp = GONE

    def pop(self) -> NodeT | None:
        """The node that goes first; None if none may go."""
        while self._heap:
            _, stamp, node = heappop(self._heap)
            if node.stamp == stamp:
                self.withdraw(node)
                return node
        return None

"""A tree of token runs, shared as far as prompts agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from core.interfaces.eviction import new_entry
from core.interfaces.page_tree import PageNode, PageTreeCache
from core.interfaces.plugin import CacheContext, Options
from core.interfaces.prefix_cache import CacheEntry, Insertion

Run = tuple[int | str, ...]
"""The tokens of one page; those of the first page have the salt before them."""


class Node(PageNode):
    """An edge of the tree with what hangs below it: `runs` of one page's tokens each, in `pages`."""

    __slots__ = ("children", "runs")

    def __init__(self, runs: list[Run], pages: list[int], parent: Node | None, entry: CacheEntry) -> None:
        super().__init__(pages, parent, entry)
        self.runs = runs
        self.children: dict[Run, Node] = {}

    @property
    def is_leaf(self) -> bool:
        return not self.children


class RadixCache(PageTreeCache[Node]):
    """A radix tree over whole pages, after SGLang's RadixAttention (Zheng et al., 2024).

        root -- salt, "You are a helpful ..." --+-- "What is ..."     an edge is split where prompts part
                                                +-- "Write a ..."     only leaves are evicted, from their end

    A match ends at a node, which is split off first if need be.
    """

    def __init__(self, options: Options, context: CacheContext) -> None:
        super().__init__(options, context)
        self._root = Node([], [], None, CacheEntry(created=0, last_used=0))
        self._n_pages = 0

    def find(self, tokens: Sequence[int], salt: str) -> list[Node]:
        return self._walk(self._runs(tokens, salt))

    def peek(self, tokens: Sequence[int], salt: str) -> int:
        return sum(n_equal for _, n_equal in self._descend(self._runs(tokens, salt))) * self.page_size

    def insert(self, tokens: Sequence[int], pages: Sequence[int], salt: str) -> Insertion:
        runs = self._runs(tokens, salt)[: len(pages)]
        path = self._walk(runs)
        n_cached = sum(len(node.pages) for node in path)
        adopted = list(pages[n_cached : len(runs)])
        if adopted:
            path.append(self._add(runs[n_cached:], adopted, path[-1] if path else self._root, n_cached))
        return self.inserted(path, adopted)

    def evict(self, n_pages: int) -> list[int]:
        gone: list[int] = []
        while len(gone) < n_pages and (leaf := self.queue.pop()) is not None:
            cut = max(0, len(leaf.pages) - (n_pages - len(gone)))
            gone += reversed(leaf.pages[cut:])
            first = leaf.runs[0]
            del leaf.pages[cut:], leaf.runs[cut:]
            leaf.entry.tokens = cut * self.page_size
            if leaf.pages:
                self.offer(leaf)
            else:
                self._remove(leaf, first)
        self._n_pages -= len(gone)
        self.stats.evicted_pages += len(gone)
        return gone

    @property
    def n_pages(self) -> int:
        return self._n_pages

    def _runs(self, tokens: Sequence[int], salt: str) -> list[Run]:
        size = self.page_size
        runs: list[Run] = [tuple(tokens[end - size : end]) for end in range(size, len(tokens) + 1, size)]
        if runs:
            runs[0] = (salt, *runs[0])
        return runs

    def _descend(self, runs: list[Run]) -> Iterator[tuple[Node, int]]:
        """The nodes along `runs`, each with how many of its runs agree; the last one's may be fewer than it has."""
        node, at = self._root, 0
        while at < len(runs) and (child := node.children.get(runs[at])) is not None:
            n_equal = _common(child.runs, runs, at)
            yield child, n_equal
            if n_equal < len(child.runs):
                return
            node, at = child, at + n_equal

    def _walk(self, runs: list[Run]) -> list[Node]:
        """The nodes that hold the longest cached prefix of `runs`, the last one split so as to end with it."""
        steps = list(self._descend(runs))
        path = [node for node, _ in steps]
        if steps and steps[-1][1] < len(path[-1].runs):
            path[-1] = self._split(*steps[-1])
        return path

    def _split(self, node: Node, n_runs: int) -> Node:
        """A new node above `node` that takes its first `n_runs`. `node` keeps its end, its children and its locks, so
        handles to it stay true."""
        assert node.parent is not None
        size, entry = self.page_size, node.entry
        upper = Node(node.runs[:n_runs], node.pages[:n_runs], node.parent, replace(entry, tokens=n_runs * size))
        node.parent.children[upper.runs[0]] = upper
        del node.runs[:n_runs], node.pages[:n_runs]
        upper.children[node.runs[0]] = node
        node.parent = upper
        entry.depth_tokens += n_runs * size
        entry.tokens -= n_runs * size
        self.offer(node)
        return upper

    def _add(self, runs: list[Run], pages: list[int], parent: Node, depth: int) -> Node:
        size = self.page_size
        entry = new_entry(self.time, depth * size, len(pages) * size)
        node = parent.children[runs[0]] = Node(runs, list(pages), parent, entry)
        self.queue.withdraw(parent)
        self._n_pages += len(pages)
        return node

    def _remove(self, leaf: Node, first: Run) -> None:
        assert leaf.parent is not None
        del leaf.parent.children[first]
        self.offer(leaf.parent)


def _common(edge: list[Run], runs: list[Run], at: int) -> int:
    """How many runs of `edge` go on like `runs` from `at`; at least the first does."""
    most = min(len(edge), len(runs) - at)
    n_equal = 1
    while n_equal < most and edge[n_equal] == runs[at + n_equal]:
        n_equal += 1
    return n_equal

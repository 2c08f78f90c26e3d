"""Prefixes that requests share: which KV pages hold them, and where the recurrent state was kept.

Bookkeeping on the host only; `gdnjax.state.device` copies. A page's key is a hash of its tokens and of
the key before it, so that equal keys mean equal prefixes. A KV page alone resumes nothing in a hybrid
model: a request resumes from the deepest *snapshot* (recurrent slots and rings) on its path, and shares the
pages up to there.

Snapshots live in places of a store of fixed size. Without a free place, or without a free KV page, the
snapshot that was used longest ago goes, with the pages that only it needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from gdnjax.state.pages import Pages

Key = bytes


@dataclasses.dataclass
class Node:
    """One page of a prefix. `place`: its snapshot's place in the store, or None."""

    parent: Key
    page: int
    children: int = 0
    place: int | None = None


@dataclasses.dataclass(frozen=True)
class Match:
    """What is known of a prompt.

    * `tokens`: how many tokens the deepest snapshot contains; 0: there is none.
    * `place`: where it is in the store. `pages`: the KV pages of those tokens. `key`: the snapshot's.
    * `known`: tokens whose pages are known, snapshot or not: where another request's path ends or turns off.
    """

    tokens: int
    place: int
    pages: tuple[int, ...]
    key: Key
    known: int


NO_MATCH = Match(0, 0, (), b"", 0)


class PrefixCache:
    """Args:
    pages: whose pages it shares; it takes over `pages.reclaim`.
    places: snapshots that the store holds; 0 switches the cache off.
    interval: a snapshot about every so many tokens, see `boundaries`.
    """

    def __init__(self, pages: Pages, places: int, interval: int):
        self._pages, self._interval = pages, pages.for_tokens(interval) * pages.size
        self._free = list(range(places - 1, -1, -1))
        self.places = places
        self._nodes: dict[Key, Node] = {}
        self._recent: OrderedDict[Key, None] = OrderedDict()  # nodes with a snapshot, oldest use first
        pages.reclaim = self._reclaim

    def __len__(self) -> int:
        """Snapshots kept."""
        return len(self._recent)

    def match(self, prompt: Sequence[int]) -> Match:
        """What a prompt can resume from. At least its last token is left to run: its logits are wanted."""
        best, path = NO_MATCH, []
        for depth, key in enumerate(self._keys(prompt[: max(0, len(prompt) - 1)]), 1):
            node = self._nodes.get(key)
            if node is None:
                break
            path.append(node.page)
            tokens = depth * self._pages.size
            if node.place is not None:
                best = Match(tokens, node.place, tuple(path), key, tokens)
        return dataclasses.replace(best, known=len(path) * self._pages.size)

    def use(self, match: Match) -> None:
        """A request resumes from a match: its snapshot is the last one to go."""
        if match.tokens:
            self._recent.move_to_end(match.key)

    def boundaries(self, prompt: Sequence[int], start: int) -> list[int]:
        """Where to cut the prefill of a prompt from position `start`, to keep a snapshot at each cut.

        Every `interval` tokens, where another request's path turns off (a prefix that two requests share
        will be asked for again), and at the last whole page.
        """
        if not self.places:
            return []
        last = max(0, len(prompt) - 1) // self._pages.size * self._pages.size
        cuts = {last, self.match(prompt).known, *range(self._interval, last, self._interval)}
        return sorted(cut for cut in cuts if start < cut <= last)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> tuple[Key, int] | None:
        """Makes room for a snapshot of a state that contains exactly `tokens`, whole pages.

        Args:
            tokens: a multiple of the page size, at least one page.
            pages: the KV pages that hold them, which the caller's request holds.

        Returns:
            Its key and the place to store it at, or None: the cache is off, or has it already.

        Raises:
            ValueError: a page is known to hold other tokens.
        """
        if not self.places:
            return None
        keys = self._keys(tokens)
        if self._nodes.get(keys[-1], Node(b"", 0)).place is not None:
            self._recent.move_to_end(keys[-1])
            return None
        wrong = [p for key, p in zip(keys, pages, strict=True) if key not in self._nodes and p in self._pages.kept]
        if wrong:
            raise ValueError(
                f"KV page {wrong[0]} is kept for other tokens; it takes the tokens that the state has read"
            )
        # Before the path is there: with the snapshot that goes, pages of the same path may go.
        if not self._free:
            self._evict()
        parent = b""
        for key, page in zip(keys, pages, strict=True):
            # A page that another request has computed already stays; this one keeps its own.
            if key not in self._nodes:
                self._pages.keep(page)
                self._nodes[key] = Node(parent, page)
                if parent:
                    self._nodes[parent].children += 1
            parent = key
        place = self._free.pop()
        self._nodes[keys[-1]].place = place
        self._recent[keys[-1]] = None
        return keys[-1], place

    def remove(self, key: Key) -> None:
        """Gives up a snapshot, and the pages that only it needed."""
        del self._recent[key]
        node = self._nodes[key]
        assert node.place is not None
        self._free.append(node.place)
        node.place = None
        while key and (node := self._nodes[key]).place is None and node.children == 0:
            del self._nodes[key]
            self._pages.forget(node.page)
            key = node.parent
            if key:
                self._nodes[key].children -= 1

    def clear(self) -> None:
        """Gives up everything."""
        while self._recent:
            self._evict()

    def _evict(self) -> None:
        self.remove(next(iter(self._recent)))

    def _reclaim(self, count: int) -> None:
        wanted = self._pages.free + count
        while self._pages.free < wanted and self._recent:
            self._evict()

    def _keys(self, tokens: Sequence[int]) -> list[Key]:
        keys, key, size = [], b"", self._pages.size
        array = np.asarray(tokens, np.int32)
        for end in range(size, len(tokens) + 1, size):
            key = hashlib.blake2b(key + array[end - size : end].tobytes(), digest_size=16).digest()
            keys.append(key)
        return keys

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        places = [node.place for node in self._nodes.values() if node.place is not None]
        assert sorted([*places, *self._free]) == list(range(self.places)), "places of the snapshot store"
        assert {k for k, n in self._nodes.items() if n.place is not None} == set(self._recent), "snapshots in use"
        for key, node in self._nodes.items():
            children = sum(other.parent == key for other in self._nodes.values())
            assert node.children == children, "children of a page"
            assert children or node.place is not None, "a page that leads to no snapshot is kept"
            assert not node.parent or node.parent in self._nodes, "a page whose predecessor is gone"
        assert sorted(n.page for n in self._nodes.values()) == sorted(self._pages.kept), "pages kept"

"""Which KV page belongs to whom: plain bookkeeping on the host, nothing of the device.

A page has as many references as it has holders: requests, and the prefix cache. A page with more than one
is never written: whoever would write it gets a copy first (`Growth.copies`).

Admission is by what fits. A request opens with a reservation, and the pages of all reservations that are
not taken yet are promised: nobody else gets them. With a reservation for the longest a request may grow to
(the pool's default) no step can run out of pages. A smaller one lets more requests in; a step may then
find no page (`OutOfPages`), and somebody has to be preempted.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence


class NoRoom(RuntimeError):
    """Nothing is wrong, and nothing has changed: it fits once a request has ended."""


class OutOfPages(NoRoom):
    """No KV page is left that is not promised to another request. `short` is how many are missing."""

    def __init__(self, message: str, short: int):
        super().__init__(message)
        self.short = short


@dataclasses.dataclass
class Holding:
    """A request's pages in order, how many it may take without asking, and the shared page whose copy it
    has been promised (0: none)."""

    pages: list[int]
    reserved: int
    copy_of: int = 0

    @property
    def promised(self) -> int:
        return max(0, self.reserved - len(self.pages)) + (self.copy_of > 0)


@dataclasses.dataclass(frozen=True)
class Growth:
    """What a step needs before it runs. Nothing has changed yet: see `Pages.apply`.

    * `entries`: (request, place in its row, page) to write into the page table.
    * `copies`: (source, target) pages to copy, before the entries are written.
    """

    entries: tuple[tuple[int, int, int], ...]
    copies: tuple[tuple[int, int], ...]


class Pages:
    """`count` pages of `size` tokens each, numbered 1, 1 + `every`, ... Page 0 is reserved and never handed out.

    `reclaim(n)`, set by the prefix cache, gives up cached pages until n more are free.
    """

    def __init__(self, count: int, size: int, every: int = 1):
        self.count, self.size = count, size
        self._numbers = range(1, 1 + count * every, every)
        self.reclaim: Callable[[int], None] = lambda _: None
        self._free = list(reversed(self._numbers))
        self._references = [0] * (count * every + 1)
        self._cached: set[int] = set()
        self._idle = 0
        self._held: dict[int, Holding] = {}

    # What there is

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Pages that only the prefix cache holds; it gives them up when they are needed."""
        return self._idle

    @property
    def promised(self) -> int:
        """Pages kept back for requests that are open."""
        return sum(holding.promised for holding in self._held.values())

    @property
    def available(self) -> int:
        """Pages that a new reservation can have."""
        return self.free + self.idle - self.promised

    @property
    def requests(self) -> tuple[int, ...]:
        """Requests that are open."""
        return tuple(self._held)

    def held(self, request: int) -> tuple[int, ...]:
        """A request's pages in order."""
        return tuple(self._held[request].pages)

    def for_tokens(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.size)

    # Requests

    def open(self, request: int, reserved: int, shared: Sequence[int] = ()) -> None:
        """Opens a request that starts with `shared` pages and may take up to `reserved` in all.

        Raises:
            OutOfPages: the reservation does not fit.
        """
        assert request not in self._held
        idle = sum(self._is_idle(page) for page in shared)
        self._require(max(0, reserved - len(shared)) + idle)
        for page in shared:
            self._hold(page)
        self._held[request] = Holding(list(shared), reserved)

    def fork(self, source: int, target: int, tokens: int, reserved: int) -> list[int]:
        """Opens `target` with the pages of the first `tokens` of `source`, shared; returns them.

        A page that is not full will be written by both, so a copy of it is promised.

        Raises:
            OutOfPages: the reservation, or the copy, does not fit.
        """
        assert target not in self._held
        shared = self._held[source].pages[: self.for_tokens(tokens)]
        partial = shared[-1] if tokens % self.size else 0
        self._require(max(0, reserved - len(shared)) + (partial > 0))
        for page in shared:
            self._hold(page)
        self._held[target] = Holding(list(shared), reserved, partial)
        return shared

    def close(self, request: int) -> None:
        """Gives back all of a request's pages and what was promised to it."""
        for page in self._held.pop(request).pages:
            self._drop(page)

    def reopen(self, request: int) -> None:
        """Gives back a request's pages and keeps its reservation, or what is left of it."""
        reserved = self._held[request].reserved
        self.close(request)
        self._held[request] = Holding([], min(reserved, self.available))

    # Steps

    def prepare(self, writes: Mapping[int, tuple[int, int]], ahead: int = 0) -> Growth:
        """What must happen so that each request can write the positions [first, end).

        Changes nothing but the prefix cache, which may have to give up pages.

        Args:
            writes: by request.
            ahead: a request that takes pages takes up to so many more of those it has been promised, if they are free:
                growing is a call to the device, and so there are fewer.

        Raises:
            OutOfPages: more pages are needed than promised to these requests and available.
        """
        places: list[tuple[int, int, int]] = []  # request, place, page to copy or 0
        references = Counter[int]()
        more: list[tuple[int, int, int]] = []
        unpromised = 0
        promises = Counter(h.copy_of for h in self._held.values() if h.copy_of)
        for request, (first, end) in writes.items():
            holding = self._held[request]
            have, need = len(holding.pages), self.for_tokens(end)
            if end - first == 1 and need <= have and self._references[holding.pages[need - 1]] == 1:
                continue  # nearly every decode row: it goes on in a page of its own
            for place in range(first // self.size, have if end > first else 0):
                page = holding.pages[place]
                if self._references[page] - references[page] > 1:
                    places.append((request, place, page))
                    references[page] += 1
                    if promises[page] > 0:
                        promises[page] -= 1
                    else:
                        unpromised += 1
            places += [(request, place, 0) for place in range(have, need)]
            unpromised += max(0, need - max(have, holding.reserved))
            if need > have:
                more += [(request, place, 0) for place in range(need, min(need + ahead, holding.reserved))]
        if unpromised:
            self._require(unpromised)
        places += more[: max(0, self.free - len(places))]
        if len(places) > self.free:
            self.reclaim(len(places) - self.free)
        taken = self._free[len(self._free) - len(places) :][::-1]
        return Growth(
            tuple((request, place, page) for (request, place, _), page in zip(places, taken, strict=True)),
            tuple((old, page) for (_, _, old), page in zip(places, taken, strict=True) if old),
        )

    def apply(self, growth: Growth) -> None:
        """Takes the pages of a growth that `prepare` has just returned."""
        for request, place, page in growth.entries:
            taken = self._free.pop()
            assert taken == page, f"page {page} of a growth that is out of date; {taken} is next"
            self._references[page] = 1
            holding = self._held[request]
            if place == len(holding.pages):
                holding.pages.append(page)
                continue
            old, holding.pages[place] = holding.pages[place], page
            if holding.copy_of == old:
                holding.copy_of = 0
            else:
                # The copy that somebody else was promised: the old page is theirs alone then.
                other = next((h for h in self._held.values() if h.copy_of == old), None)
                if other is not None:
                    other.copy_of = 0
            self._drop(old)

    # The prefix cache

    @property
    def kept(self) -> frozenset[int]:
        """Pages that the prefix cache holds."""
        return frozenset(self._cached)

    def keep(self, page: int) -> None:
        """The prefix cache holds a page that a request holds too."""
        assert page not in self._cached and self._references[page] > 0
        self._hold(page)
        self._cached.add(page)

    def forget(self, page: int) -> None:
        """The prefix cache gives a page up."""
        self._idle -= self._is_idle(page)
        self._cached.remove(page)
        self._drop(page)

    def _is_idle(self, page: int) -> bool:
        return self._references[page] == 1 and page in self._cached

    def _hold(self, page: int) -> None:
        self._idle -= self._is_idle(page)
        self._references[page] += 1

    def _drop(self, page: int) -> None:
        self._references[page] -= 1
        self._idle += self._is_idle(page)
        if self._references[page] == 0:
            self._free.append(page)
        elif self._references[page] == 1:
            # Who is left alone with a page needs no copy of it.
            for holding in self._held.values():
                if holding.copy_of == page:
                    holding.copy_of = 0

    def _require(self, pages: int) -> None:
        if pages > self.available:
            raise OutOfPages(
                f"{pages} KV pages of {self.size} tokens wanted, {max(0, self.available)} of {self.count} are free "
                f"and not promised; wait for a request to end, or raise kv_tokens",
                pages - max(0, self.available),
            )

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        found = Counter(page for holding in self._held.values() for page in holding.pages)
        found.update(self._cached)
        for page in self._numbers:
            assert found[page] == self._references[page], f"page {page}: {self._references[page]} references"
        assert found.keys() <= {*self._numbers}, "a page was handed out that is nobody's"
        assert sorted(self._free) == [p for p in self._numbers if not found[p]], "free list"
        assert self._idle == sum(map(self._is_idle, self._cached)), "idle pages"
        assert self.available >= 0, f"{-self.available} more pages promised than there are"
        for request, holding in self._held.items():
            assert len(set(holding.pages)) == len(holding.pages), f"request {request} holds a page twice"
            assert not holding.copy_of or holding.copy_of in holding.pages, f"request {request}: promised copy"

"""KV pages on the host: reservations, sharing, copies, and what the prefix cache gives back."""

from __future__ import annotations

import pytest

from gdnjax.state.pages import Growth, OutOfPages, Pages


def grow(pages: Pages, writes: dict[int, tuple[int, int]]) -> Growth:
    growth = pages.prepare(writes)
    pages.apply(growth)
    pages.check()
    return growth


def test_reservations_are_kept_back() -> None:
    pages = Pages(10, 4)
    pages.open(0, 6)
    assert (pages.free, pages.promised, pages.available) == (10, 6, 4)
    with pytest.raises(OutOfPages, match="5 KV pages of 4 tokens wanted, 4 of 10 are free and not promised") as caught:
        pages.open(1, 5)
    assert caught.value.short == 1 and pages.requests == (0,)
    pages.open(1, 4)
    # what was promised comes, though nothing is available
    assert grow(pages, {0: (0, 9), 1: (0, 16)}).entries == (
        (0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 4), (1, 1, 5), (1, 2, 6), (1, 3, 7),
    )  # fmt: skip
    assert (pages.free, pages.promised, pages.available) == (3, 3, 0)
    with pytest.raises(OutOfPages):
        pages.prepare({1: (16, 17)})
    assert grow(pages, {0: (9, 12)}).entries == ()  # the page is there
    pages.close(0)
    assert pages.available == 6
    grow(pages, {1: (16, 17)})
    # a request that begins anew keeps its reservation
    pages.reopen(1)
    assert (pages.held(1), pages.free, pages.promised) == ((), 10, 4)


def test_a_reservation_that_is_smaller_lets_more_in_and_can_run_out() -> None:
    pages = Pages(4, 4)
    for request in range(3):
        pages.open(request, 1)
    grow(pages, {0: (0, 4), 1: (0, 4), 2: (0, 4)})
    grow(pages, {0: (4, 5)})
    before = pages.free, pages.held(1)
    with pytest.raises(OutOfPages) as caught:
        pages.prepare({1: (4, 5), 2: (4, 9)})
    assert caught.value.short == 3
    assert (pages.free, pages.held(1)) == before


def test_every_fork_is_promised_one_copy_whoever_writes_first() -> None:
    for writers in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [0, 2, 1]):
        pages = Pages(7, 4)
        pages.open(0, 3)
        grow(pages, {0: (0, 6)})
        for child in (1, 2):
            assert pages.fork(0, child, 6, 3) == [1, 2]
        assert (pages.free, pages.promised, pages.available) == (5, 5, 0)
        copies = [len(grow(pages, {writer: (6, 7)}).copies) for writer in writers]
        # the last one keeps the page
        assert copies == [1, 1, 0] and pages.free == 3
        assert [pages.held(r)[0] for r in (0, 1, 2)] == [1, 1, 1]
        grow(pages, dict.fromkeys((0, 1, 2), (7, 12)))
        assert pages.available == 0 == pages.free
    # all at once
    pages = Pages(7, 4)
    pages.open(0, 3)
    grow(pages, {0: (0, 6)})
    pages.fork(0, 1, 6, 3)
    pages.fork(0, 2, 6, 3)
    assert len(grow(pages, dict.fromkeys((0, 1, 2), (6, 7))).copies) == 2
    # and nobody needs a copy of a page that is full, or that the others have left
    for other in (1, 2):
        pages.close(other)
    pages.fork(0, 1, 4, 2)
    assert pages.promised == 1 + 1
    pages.close(1)
    pages.fork(0, 1, 6, 2)
    assert pages.promised == 1 + 1
    pages.close(0)
    assert pages.promised == 0
    assert not grow(pages, {1: (6, 7)}).copies


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    pages = Pages(3, 4)
    pages.open(0, 2)
    grow(pages, {0: (0, 6)})
    with pytest.raises(OutOfPages):
        pages.fork(0, 1, 6, 3)  # a new page and a copy
    assert pages.requests == (0,) and pages.available == 1
    pages.fork(0, 1, 6, 2)
    pages.check()


def test_cached_pages_are_idle_when_nobody_else_holds_them_and_given_up() -> None:
    pages = Pages(4, 4)
    given_up: list[int] = []

    def reclaim(count: int) -> None:
        given_up.append(count)
        wanted = pages.free + count
        while pages.free < wanted:
            pages.forget(min(pages.kept))

    pages.reclaim = reclaim
    pages.open(0, 3)
    grow(pages, {0: (0, 12)})
    for page in (1, 2):
        pages.keep(page)
    assert (pages.idle, pages.available) == (0, 1)
    pages.close(0)
    assert (pages.free, pages.idle, pages.available) == (2, 2, 4)
    pages.open(1, 2, shared=[1])
    assert (pages.idle, pages.promised, pages.available) == (1, 1, 2)
    with pytest.raises(OutOfPages):
        pages.open(2, 3)
    assert not given_up
    pages.open(2, 2)
    grow(pages, {1: (4, 5), 2: (0, 5)})
    # the shared page went from the cache, not from its reader
    assert given_up == [1] and pages.held(1)[0] == 1
    assert not pages.kept and (pages.free, pages.available) == (0, 0)


def test_sharing_an_idle_page_takes_it() -> None:
    pages = Pages(3, 4)
    pages.open(0, 2)
    grow(pages, {0: (0, 8)})
    pages.keep(1)
    pages.close(0)
    assert (pages.free, pages.idle) == (2, 1)
    with pytest.raises(OutOfPages):
        pages.open(1, 4, shared=[1])
    pages.open(1, 2, shared=[1])
    with pytest.raises(OutOfPages):
        pages.open(2, 2)
    pages.open(2, 1)
    pages.check()


def test_check_finds_what_is_wrong() -> None:
    for spoil in (
        lambda p: p._free.append(2),
        lambda p: p._held[0].pages.append(3),
        lambda p: p._held[0].pages.append(1),
        lambda p: setattr(p, "_idle", 1),
        lambda p: setattr(p._held[0], "reserved", 9),
        lambda p: setattr(p._held[0], "copy_of", 3),
        lambda p: p._cached.add(4),
    ):
        pages = Pages(4, 4)
        pages.open(0, 2)
        grow(pages, {0: (0, 8)})
        spoil(pages)
        with pytest.raises(AssertionError):
            pages.check()


def test_pages_ahead_are_promised_ones_that_are_free() -> None:
    pages = Pages(8, 4)
    given_up: list[int] = []
    pages.reclaim = given_up.append
    pages.open(0, 6)
    pages.open(1, 0)
    growth = pages.prepare({0: (0, 4), 1: (0, 4)}, ahead=3)
    # One each, then three of the first one's five: the second one was promised none.
    assert [(request, place) for request, place, _ in growth.entries] == [(0, 0), (1, 0), (0, 1), (0, 2), (0, 3)]
    pages.apply(growth)
    assert not pages.prepare({0: (15, 16)}, ahead=3).entries  # nothing begins
    # Three are free, of which one is needed and one is all that is promised besides.
    growth = pages.prepare({0: (16, 17)}, ahead=3)
    assert [place for _, place, _ in growth.entries] == [4, 5]
    pages.apply(growth)
    pages.open(2, 1)
    assert len(pages.prepare({2: (0, 4)}, ahead=3).entries) == 1 and not given_up
    pages.check()

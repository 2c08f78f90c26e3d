"""Shared prefixes: what is found, what is given up, and that a resumed request equals a cold one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.prefix_cache import PrefixCache
from tests.helpers import LAYOUTS, STATES, assert_close, assert_same_bits
from tests.state.pools import MICRO, Driver, bookkeeping, micro, tokens


def cache(pages: int = 12, places: int = 3, interval: int = 4) -> tuple[Pages, PrefixCache]:
    owner = Pages(pages, 4)
    return owner, PrefixCache(owner, places, interval)


def held(pages: Pages, request: int, count: int) -> tuple[int, ...]:
    """Opens a request with so many pages."""
    pages.open(request, count)
    pages.apply(pages.prepare({request: (0, 4 * count)}))
    return pages.held(request)


def keep(prefixes: PrefixCache, ids: list[int], pages: tuple[int, ...]) -> int | None:
    entry = prefixes.insert(ids, pages[: len(ids) // 4])
    prefixes.check()
    return None if entry is None else entry[1]


A, B = list(range(16)), [*range(8), *range(20, 28)]  # two pages in common


def test_the_deepest_snapshot_is_found() -> None:
    pages, prefixes = cache()
    a = held(pages, 0, 4)
    assert prefixes.match(A).tokens == 0
    first, second = keep(prefixes, A[:4], a), keep(prefixes, A[:12], a)
    for prompt, tokens_, place, known in (
        ([*A, 1], 12, second, 12),
        (A, 12, second, 12),
        (A[:13], 12, second, 12),
        (A[:12], 4, first, 8),  # one token must be left to run
        ([*B, 1], 4, first, 8),
        (A[:4], 0, 0, 0),
        ([9, *A], 0, 0, 0),
        ([], 0, 0, 0),
    ):
        found = prefixes.match(prompt)
        assert (found.tokens, found.place, found.known) == (tokens_, place, known), prompt
        assert found.pages == a[: tokens_ // 4]
    assert keep(prefixes, A[:12], a) is None  # it is there


def test_equal_pages_behind_different_ones_are_different() -> None:
    pages, prefixes = cache()
    keep(prefixes, A[:8], held(pages, 0, 2))
    assert prefixes.match([*A[4:8], *A[4:8], 1]).known == 0
    assert prefixes.match([*A[:4], *A[:4], 1]).known == 4


def test_the_snapshot_used_longest_ago_goes_with_its_pages() -> None:
    pages, prefixes = cache(places=2)
    a, b = held(pages, 0, 4), held(pages, 1, 4)
    keep(prefixes, A[:8], a)
    keep(prefixes, B, b)
    assert sorted(pages.kept) == sorted({*a[:2], *b[2:]})  # the first pages of both are kept once
    prefixes.match([*B, 1])  # asked for, not used
    prefixes.use(prefixes.match([*A[:8], 1]))
    keep(prefixes, A, a)
    assert len(prefixes) == 2 and prefixes.match([*B, 1]).tokens == 8
    assert sorted(pages.kept) == sorted(a)
    prefixes.use(prefixes.match([*A, 1]))
    keep(prefixes, B, b)  # now the shorter one goes, and its pages stay for the longer
    assert (prefixes.match([*A, 1]).tokens, prefixes.match([*B, 1]).tokens) == (16, 16)
    assert prefixes.match([*A[:8], 9]).tokens == 0
    prefixes.clear()
    prefixes.check()
    assert not pages.kept and len(prefixes) == 0


def test_room_for_a_snapshot_may_cost_pages_of_its_own_path() -> None:
    pages, prefixes = cache(places=1)
    a = held(pages, 0, 4)
    keep(prefixes, A, a)
    assert keep(prefixes, A[:8], a) == 0
    assert pages.kept == set(a[:2]) and prefixes.match([*A, 1]).tokens == 8


def test_a_request_that_needs_pages_gets_those_of_the_cache() -> None:
    pages, prefixes = cache(pages=6)
    a = held(pages, 0, 4)
    keep(prefixes, A[:4], a)
    keep(prefixes, A, a)
    pages.close(0)
    assert (pages.free, pages.idle) == (2, 4)
    held(pages, 1, 3)
    prefixes.check()
    # The older snapshot went first, and freed nothing; then the longer one.
    assert len(prefixes) == 0 and pages.free == 3


def test_where_a_prefill_is_cut() -> None:
    pages, prefixes = cache(interval=7)  # rounded up to two pages
    assert prefixes.boundaries(list(range(30)), 0) == [8, 16, 24, 28]
    assert prefixes.boundaries(list(range(28)), 8) == [16, 24]
    assert prefixes.boundaries(list(range(4)), 0) == []
    a = held(pages, 0, 3)
    keep(prefixes, [*A[:12]], a)
    # where another request's path turns off
    assert prefixes.boundaries([*A[:4], *range(50, 65)], 0) == [4, 8, 16]
    assert cache(places=0)[1].boundaries(list(range(30)), 0) == []
    assert cache(places=0)[1].insert(A[:4], (1,)) is None


def test_tokens_that_a_page_does_not_hold_are_refused() -> None:
    pages, prefixes = cache()
    a = held(pages, 0, 2)
    keep(prefixes, A[:8], a)
    with pytest.raises(ValueError, match="KV page 1 is kept for other tokens"):
        prefixes.insert(B[8:], a)
    prefixes.check()
    assert prefixes.match([*B[8:], 1]).known == 0


# On the device


def prefill(d: Driver, request: int, prompt: list[int], cuts: list[int]) -> np.ndarray:
    """Reads what is left of a prompt, cut at `cuts` and kept there; the last logits."""
    logits: Any = None
    at = d.pool.position(request)
    for end in [*cuts, len(prompt)]:
        while at < end:
            piece = prompt[at : min(end, at + d.config.prefill_tokens)]
            logits = d.walk({request: piece})[request]
            at += len(piece)
        if end in cuts:
            d.pool.remember(request, prompt[:end])
    return logits


def run(d: Driver, prompt: list[int], count: int = 6, limit: int = 40) -> tuple[int, int, list[np.ndarray]]:
    """A request's number, where it resumed, and the logits behind its prompt and of greedy steps."""
    request = d.pool.acquire(min(limit, d.config.max_length), prompt=prompt)
    start = d.pool.position(request)
    logits = [prefill(d, request, prompt, d.pool.prefixes.boundaries(prompt, start))]
    for _ in range(count):
        logits.append(d.step({request: int(logits[-1].argmax())})[request])
    return request, start, logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_request_is_the_cold_one_bit_for_bit(layout: str) -> None:
    shared, tails = tokens(21), (tokens(8, 1), tokens(5, 2))
    warm = Driver(micro(layout))
    first, start, _ = run(warm, [*shared, *tails[0]])
    assert start == 0
    warm.feed(first, [1, 2, 3])
    for release_first in (False, True):
        if release_first:
            warm.pool.release(first)
        prompt = [*shared, *tails[1]]
        request, start, found = run(warm, prompt)
        assert start == (20 if not release_first else 24)
        warm.pool.check(device=True)
        cold = Driver(micro(layout))
        alone = cold.pool.acquire(40)
        wanted = [prefill(cold, alone, prompt, [4, 8, 12, 16, 20, 24])]
        for _ in range(6):
            wanted.append(cold.step({alone: int(wanted[-1].argmax())})[alone])
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(a, b)
        state, expected = warm.current(request), cold.current(alone)
        for name, values in expected.items():
            assert_same_bits(state[name], values, name)
        # cut elsewhere: the same within rounding
        whole = Driver(micro(layout))
        other = whole.pool.acquire(40)
        near = prefill(whole, other, prompt, [])
        assert_close(near, found[0], STATES * np.abs(near).max(), "logits")
        warm.pool.release(request)


def test_a_resumed_request_shares_pages_and_writes_its_own() -> None:
    d = Driver(micro())
    first, _, _ = run(d, tokens(13))
    second, start, _ = run(d, tokens(13))
    assert start == 12
    assert d.pool.pages.held(first)[:3] == d.pool.pages.held(second)[:3]
    assert not set(d.pool.pages.held(first)[3:]) & set(d.pool.pages.held(second)[3:])
    before = d.current(first)
    d.feed(second, [5, 6])
    for name, values in d.current(first).items():
        assert_same_bits(values, before[name], name)


def test_a_prefix_that_was_reclaimed_is_read_again() -> None:
    d = Driver(micro(), pages=6, snapshots=2)
    prompt = tokens(13)
    first, _, wanted = run(d, prompt, count=3, limit=24)
    d.pool.release(first)
    assert d.pool.pages.idle == 3
    other = d.start(tokens(12, 5), limit=24)  # all six pages are promised to it
    d.feed(other, tokens(12, 6))
    assert d.pool.pages.idle == 0 and len(d.pool.prefixes) == 0
    d.pool.release(other)
    _, start, found = run(d, prompt, count=3, limit=24)
    assert start == 0
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
    d.pool.check(device=True)


def test_a_snapshot_taken_while_a_step_is_pending_is_of_the_committed_state() -> None:
    d = Driver(micro())
    request = d.start(tokens(8))
    d.step({request: 3}, commit=False)
    assert d.pool.remember(request, tokens(8))
    assert not d.pool.remember(request, tokens(8))
    d.pool.commit()
    resumed = d.pool.acquire(40, prompt=[*tokens(8), 9])
    cold = Driver(micro())
    alone = cold.start(tokens(8))
    assert_same_bits(d.feed(resumed, [9])[0], cold.feed(alone, [9])[0])
    before = bookkeeping(d.pool)
    with pytest.raises(ValueError, match="has read 9 tokens, given 8"):
        d.pool.remember(request, tokens(8))
    assert bookkeeping(d.pool) == before


def test_a_shared_prefix_of_300_tokens() -> None:
    changes = dict(max_length=384, page_size=64, prefill_tokens=128, prefix_interval=64)
    config = micro().replace(max_requests=2, prefix_cache_bytes=8 * snapshot_bytes(MICRO), **changes)
    shared = tokens(300, 9)
    warm, cold, whole = Driver(config), Driver(config), Driver(config)
    run(warm, [*shared, *tokens(20, 1)], count=1, limit=384)
    prompt = [*shared, *tokens(30, 2)]
    request, start, found = run(warm, prompt, count=16, limit=384)
    assert start == 256  # four whole pages

    def lone(d: Driver, cuts: list[int]) -> list[np.ndarray]:
        r = d.pool.acquire(384)
        logits = [prefill(d, r, prompt, cuts)]
        # fed with the tokens of the resumed one: a near-tie must not part them
        return logits + d.feed(r, [int(x.argmax()) for x in found[:-1]])

    for a, b in zip(found, lone(cold, [64, 128, 192, 256, 320]), strict=True):
        assert_same_bits(a, b)
    for name, values in cold.current(0).items():
        assert_same_bits(warm.current(request)[name], values, name)
    for a, b in zip(found, lone(whole, []), strict=True):
        assert_close(a, b, 1e-3, "logits")
        gap = float(b.max() - b[a.argmax()])
        if gap > 0:
            print(f"another token, gap {gap:.2g}")
        assert gap < 1e-3
    for name, values in whole.current(0).items():
        assert_close(warm.current(request)[name], values, STATES, name)

"""Who runs next: pure decisions over handles, without the pool and without the device."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gdnjax.engine.handle import Handle


def rank(handle: Handle) -> tuple[int, int]:
    """Order of service: higher priority first, then the order of arrival, which a preemption does not change."""
    return -handle.priority, handle.number


class Queue:
    """Waiting requests by `rank`. Only the head is admitted: smaller requests do not overtake a large one that
    waits for room, so that it is served."""

    def __init__(self) -> None:
        self._waiting: list[Handle] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Handle]:
        return iter(tuple(self._waiting))

    def push(self, handle: Handle) -> None:
        bisect.insort(self._waiting, handle, key=rank)

    def head(self) -> Handle | None:
        return self._waiting[0] if self._waiting else None

    def remove(self, handle: Handle) -> None:
        self._waiting.remove(handle)


def row_buckets(max_requests: int, most: int = 64) -> list[int]:
    """Rows that a decode step may have: powers of two up to what all requests need, at most `most`."""
    buckets = [1]
    while buckets[-1] < min(max_requests, most):
        buckets.append(2 * buckets[-1])
    return buckets


def token_buckets(prefill_tokens: int) -> list[int]:
    """Rows that a prefill window may have: powers of four times 16, and `prefill_tokens`."""
    buckets = [16]
    while 4 * buckets[-1] < prefill_tokens:
        buckets.append(4 * buckets[-1])
    return sorted({*(b for b in buckets if b < prefill_tokens), prefill_tokens})


def smallest(buckets: Sequence[int], count: int) -> int:
    """The smallest bucket that holds `count`."""
    return buckets[bisect.bisect_left(buckets, count)]


def windows(waiting: Sequence[tuple[int, int, int, Sequence[int]]], budget: int, pieces: int) -> dict[int, int]:
    """Tokens of each request that the next prefill window takes.

    Args:
        waiting: (request, position, end, cuts) in order of service: it has read `position` of `end` tokens,
            and a window of its must end at each of `cuts`.
        budget: most tokens of the window.
        pieces: most requests of the window.

    Returns:
        Tokens by request, in order of service.
    """
    chosen: dict[int, int] = {}
    for request, position, end, cuts in waiting[:pieces]:
        until = next((cut for cut in cuts if cut > position), end)
        count = min(until - position, budget)
        if count < 1:
            break
        chosen[request] = count
        budget -= count
    return chosen


def victim(running: Mapping[int, Handle]) -> Handle:
    """Who gives its place to the others: the last in order of service."""
    return max(running.values(), key=rank)


def expired(handles: Iterable[Handle], now: float) -> list[Handle]:
    """Handles whose deadline has passed."""
    return [h for h in handles if h.deadline is not None and now >= h.deadline]

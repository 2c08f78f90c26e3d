"""Decisions of the scheduler, on handles alone."""

from __future__ import annotations

from typing import Any

from gdnjax.engine import scheduler
from gdnjax.engine.handle import Handle
from gdnjax.generation import SamplingParams


def handle(number: int, priority: int = 0, deadline: float | None = None) -> Handle:
    nothing: Any = None
    return Handle((1,), 5, SamplingParams(), "greedy", nothing, deadline, priority, number)


def test_the_queue_keeps_priority_and_arrival() -> None:
    queue = scheduler.Queue()
    a, b, c, d = handle(0), handle(1, 2), handle(2), handle(3, 2)
    for one in (c, d, a, b):
        queue.push(one)
    assert list(queue) == [b, d, a, c] and len(queue) == 4
    queue.remove(d)
    assert queue.head() is b
    for one in list(queue):
        queue.remove(one)
    assert queue.head() is None
    # a preempted request is where it was
    queue.push(c)
    queue.push(a)
    assert queue.head() is a


def test_buckets() -> None:
    assert scheduler.row_buckets(1) == [1]
    assert scheduler.row_buckets(3) == [1, 2, 4]
    assert scheduler.row_buckets(1000) == [1, 2, 4, 8, 16, 32, 64]
    assert scheduler.token_buckets(1024) == [16, 64, 256, 1024]
    assert scheduler.token_buckets(2000) == [16, 64, 256, 1024, 2000]
    assert scheduler.token_buckets(16) == [16] and scheduler.token_buckets(9) == [9]
    assert [scheduler.smallest([1, 2, 4], n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]


def test_windows_fill_the_budget_in_order_and_end_at_cuts() -> None:
    waiting = [(3, 0, 30, [16, 28]), (1, 4, 10, []), (2, 0, 40, [])]
    assert scheduler.windows(waiting, 100, 16) == {3: 16, 1: 6, 2: 40}
    assert scheduler.windows(waiting, 20, 16) == {3: 16, 1: 4}
    assert scheduler.windows(waiting, 16, 16) == {3: 16}
    assert scheduler.windows(waiting, 100, 2) == {3: 16, 1: 6}
    assert scheduler.windows([(3, 16, 30, [16, 28])], 100, 16) == {3: 12}
    assert scheduler.windows([(3, 28, 30, [16, 28])], 100, 16) == {3: 2}


def test_the_last_in_order_of_service_is_the_victim() -> None:
    a, b, c = handle(0), handle(1, -1), handle(2)
    assert scheduler.victim({5: a, 6: b, 7: c}) is b
    assert scheduler.victim({5: a, 7: c}) is c


def test_deadlines() -> None:
    a, b, c = handle(0), handle(1, deadline=3.0), handle(2, deadline=4.0)
    assert scheduler.expired([a, b, c], 3.0) == [b]
    assert scheduler.expired([a, b, c], 2.9) == []

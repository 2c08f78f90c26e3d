"""Where any thread leaves requests and cancellations, for the next step to take in: nobody waits for a step."""

from __future__ import annotations

import collections
import threading

from gdnjax.engine.handle import Handle
from gdnjax.engine.scheduler import Queue


class QueueFull(RuntimeError):
    """As many requests wait as may: try again later."""


class Door:
    """What has come and no step has seen yet, before the queue of those that wait.

    Args:
        queue: belongs to the thread that steps, which calls `take_in`.
        max_waiting: requests that may wait, here and in the queue.
        counters: `submitted` counts here.
    """

    def __init__(self, queue: Queue, max_waiting: int, counters: collections.Counter[str]):
        self._queue, self._max_waiting, self._counters = queue, max_waiting, counters
        self._lock = threading.Lock()
        self._arrived: list[Handle] = []
        self._cancelled: list[Handle] = []
        self._number = 0

    @property
    def waiting(self) -> int:
        """Requests that no step has admitted, or that were preempted."""
        return len(self._queue) + len(self._arrived)

    @property
    def full(self) -> bool:
        """Whether `enter` would raise `QueueFull`."""
        return self.waiting >= self._max_waiting

    def enter(self, handle: Handle) -> None:
        """Numbers a request and leaves it.

        Raises:
            QueueFull: too many wait.
        """
        with self._lock:
            if self.full:
                raise QueueFull(f"{self.waiting} requests wait, as many as max_waiting takes; try again later")
            handle.number = self._number
            self._number += 1
            self._arrived.append(handle)
            self._counters["submitted"] += 1

    def cancel(self, handle: Handle) -> None:
        """Leaves word that a request is to end."""
        with self._lock:
            self._cancelled.append(handle)

    def take_in(self) -> list[Handle]:
        """Moves what has arrived into the queue, and returns what was cancelled, ended or not."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            cancelled, self._cancelled = self._cancelled, []
            for handle in arrived:
                self._queue.push(handle)
        return cancelled

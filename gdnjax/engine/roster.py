"""Who waits, and who runs under which number of the pool."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from gdnjax.engine import scheduler
from gdnjax.engine.handle import Handle
from gdnjax.state.pages import NoRoom
from gdnjax.state.pool import StatePool


class Roster:
    """Every request that has not ended is in `queue` or, by its number in the pool, in `running`.

    Args:
        overcommit: admit by the length of prompts, as `Engine` says.
        counters: prefixes and preemptions count here.
    """

    def __init__(self, overcommit: bool, counters: collections.Counter[str]):
        self._overcommit, self._counters = overcommit, counters
        self.queue = scheduler.Queue()
        self.running: dict[int, Handle] = {}

    def admit(self, pool: StatePool) -> Iterator[Handle]:
        """Gives those who wait longest their places, as long as there are any, and yields each."""
        while (handle := self.queue.head()) is not None:
            ids = [*handle.prompt, *handle.tokens]
            reserve = min(len(ids) + 1, handle.limit) if self._overcommit else None
            try:
                request = pool.acquire(handle.limit, None if handle.scoring else ids, reserve)
            except NoRoom:
                return
            self.queue.remove(handle)
            start = pool.position(request)
            handle.request, handle.to_read, handle.sent = request, ids, len(handle.tokens)
            handle.reading = True
            handle.cuts = pool.prefixes.boundaries(ids, start)
            if not handle.preemptions:
                handle.cached = start
                self._counters["prefix_hits"] += start > 0
                self._counters["prefix_tokens"] += start
            handle.prompt_logprobs.clear()
            self.running[request] = handle
            yield handle

    def remove(self, handle: Handle, pool: StatePool) -> None:
        """A request has ended, wherever it is."""
        request, handle.request = handle.request, None
        if request is None:
            self.queue.remove(handle)
        else:
            del self.running[request]
            pool.release(request)

    def preempt(self, pool: StatePool) -> None:
        """Sends the last in order of service back to wait."""
        handle = scheduler.victim(self.running)
        assert handle.request is not None
        pool.release(handle.request)
        del self.running[handle.request]
        self._back(handle)
        self._counters["preemptions"] += 1

    def retreat(self) -> list[Handle]:
        """Sends everybody back to wait: the pool is lost. Returns who ran."""
        ran = list(self.running.values())
        for handle in ran:
            self._back(handle)
        self.running.clear()
        return ran

    def _back(self, handle: Handle) -> None:
        handle.request = None
        handle.preemptions += 1
        self.queue.push(handle)

"""The thread that steps the engine, and the way of its pieces to the event loop.

The engine's callbacks run in the thread that steps. They only append to an outbox, which goes to the event loop as a
whole after each step: one wake-up a step, however many requests it served. There pieces of a request that nobody has
read yet are joined, so that a slow reader costs no more than the answer it will get.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence

from gdnjax.engine import Engine, Handle, Piece
from gdnjax.engine.constraint import Constraint
from gdnjax.generation import NonFiniteLogitsError, SamplingParams
from gdnjax.server.metrics import Metrics

log = logging.getLogger("gdnjax.server")
PROBE_SECONDS = 2.0
"""How often an engine that fails is tried when nobody asks it for anything."""
FAILURE_SECONDS = 0.05
"""Between two tries where somebody waits."""
JOIN_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Choice:
    """One continuation that a request asks for: arguments of `Engine.submit`."""

    prompt: str | Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams
    stop_ids: Sequence[int]
    stop: Sequence[str]
    constraint: Constraint | None = None


class Ticket:
    """The choices of one HTTP request, seen from the event loop. Close it when nobody listens any more."""

    def __init__(self, worker: Worker):
        self._worker = worker
        self.handles: list[Handle] = []
        self._news: dict[int, list[Piece | None]] = {}
        self._wake = asyncio.Event()

    def hear(self, index: int, piece: Piece | None) -> None:
        """Takes in a piece of a choice, None at its end."""
        self._news.setdefault(index, []).append(piece)
        self._wake.set()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece | None]]:
        """(index of the choice, piece) as they come, what came in between as one; None at the end of each."""
        running = len(self.handles)
        while running:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, {}
            for index, pieces in news.items():
                came = [piece for piece in pieces if piece is not None]
                if came:
                    yield index, _joined(came)
                if None in pieces:
                    running -= 1
                    yield index, None

    def close(self) -> None:
        """Cancels what still runs."""
        self._worker.close(self)


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(logprob for piece in pieces for logprob in piece.logprobs),
        "".join(piece.text for piece in pieces),
    )


class Worker:
    """Owns the thread. `start` and `close` belong to the event loop, `submit` to any thread.

    Attributes:
        failure: what a step raised; None once tokens have come again.
    """

    def __init__(self, engine: Engine, metrics: Metrics):
        self.engine, self.metrics = engine, metrics
        self.failure: str | None = None
        self._tickets: set[Ticket] = set()
        self._outbox: collections.deque[tuple[Ticket, int, Piece | None]] = collections.deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; pieces go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its step."""
        self._stopping = True
        self._wake.set()
        self._thread.join(JOIN_SECONDS)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def idle(self) -> bool:
        """Whether no request is open, read to its end or not."""
        return not self._tickets

    def ticket(self) -> Ticket:
        """A new ticket, open until it is closed."""
        ticket = Ticket(self)
        self._tickets.add(ticket)
        return ticket

    def submit(self, ticket: Ticket, choices: Sequence[Choice], timeout: float) -> None:
        """Gives all choices to the engine. If one is refused, those before it run until the ticket is closed.

        Raises:
            ValueError: one cannot run.
            QueueFull: too many wait.
        """
        try:
            for index, choice in enumerate(choices):
                self._submit(ticket, index, choice, timeout)
        finally:
            self._wake.set()

    def _submit(self, ticket: Ticket, index: int, choice: Choice, timeout: float) -> None:
        clock = self.metrics.clock()

        def hear(piece: Piece | None) -> None:
            if piece is not None and piece.tokens:
                clock.tick()
            self._outbox.append((ticket, index, piece))

        handle = self.engine.submit(
            choice.prompt,
            choice.max_new_tokens,
            choice.sampling,
            stop_ids=choice.stop_ids,
            stop=choice.stop,
            timeout=timeout,
            constraint=choice.constraint,
            on_piece=hear,
        )
        ticket.handles.append(handle)

    def close(self, ticket: Ticket) -> None:
        self._tickets.discard(ticket)
        self._cancel(ticket)

    def cancel_all(self) -> None:
        """Cancels every request; their tickets hear of it."""
        for ticket in self._tickets:
            self._cancel(ticket)

    def _cancel(self, ticket: Ticket) -> None:
        live = [handle for handle in ticket.handles if not handle.done]
        for handle in live:
            self.engine.cancel(handle)
        if live:
            self._wake.set()

    # The thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(PROBE_SECONDS if self.failure else None)
            self._wake.clear()
            if self.failure and not self._busy():
                self.engine.submit([0], 2)  # a prefill and a decode step, to find out whether they work again
            while self._step() and not self._stopping:
                pass

    def _busy(self) -> bool:
        return bool(self.engine.waiting or self.engine.running)

    def _step(self) -> bool:
        tokens = self.engine.counters["generated_tokens"]
        try:
            more = self.engine.step()
            if self.engine.counters["generated_tokens"] > tokens:
                self.failure = None
        except NonFiniteLogitsError as error:  # that request has ended, the others have not
            log.error("%s", error)
            more = True
        except Exception as error:
            log.exception("a step failed")
            self.failure = f"{type(error).__name__}: {error}"
            self.metrics.step_errors.inc()
            more = self._busy()  # the engine ends whom it has tried often enough
            time.sleep(FAILURE_SECONDS)
        self._flush()
        return more

    def _flush(self) -> None:
        batch = []
        while self._outbox:
            batch.append(self._outbox.popleft())
        if batch:
            try:
                self._loop.call_soon_threadsafe(_deliver, batch)
            except RuntimeError:  # the loop has ended, and nobody listens
                self._stopping = True


def _deliver(batch: list[tuple[Ticket, int, Piece | None]]) -> None:
    for ticket, index, piece in batch:
        ticket.hear(index, piece)

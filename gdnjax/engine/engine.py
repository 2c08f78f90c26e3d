"""The engine: requests come and go at any moment, and every step serves all that can run.

One step reads a window of prompts (if any is waiting to be read), decodes one token of every request that
has read its prompt, and only then looks at the tokens of the step before: what the host decides never waits
for the device. A request that has ended is therefore stepped once more, for nothing.

    engine = Engine(gdnjax.load("tiny"))
    engine.warm_up()
    handle = engine.submit("Once upon a time", max_new_tokens=40)
    for piece in engine.stream(handle):
        print(piece.text, end="")
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gdnjax.engine import programs, scheduler
from gdnjax.engine.handle import FinishReason, Handle, Piece
from gdnjax.engine.programs import MODES, mode_of, new_slate, settings
from gdnjax.generation.collect import Collector
from gdnjax.generation.generate import NonFiniteLogitsError, Request, check_requests
from gdnjax.generation.loop import NOT_FINITE, NOTHING, Emission
from gdnjax.generation.sampling import SamplingParams
from gdnjax.model.step import BACKEND
from gdnjax.platform import debug_mode
from gdnjax.sizes import derive_limits
from gdnjax.state.batch import Batch
from gdnjax.state.pages import NoRoom, OutOfPages
from gdnjax.state.pool import StatePool

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel

PIECES = 16
"""Most requests whose prompts one window reads."""


class QueueFull(RuntimeError):
    """As many requests wait as may: try again later."""


@dataclasses.dataclass(frozen=True)
class _Flight:
    """Tokens on their way: row i of `emission` is for `handles[i]` (None: a row of somebody else)."""

    emission: Emission
    handles: tuple[Handle | None, ...]


class Engine:
    """Continuous batching over a loaded model.

    `submit`, `cancel` and `step` may be called from different threads.

    Args:
        lm: the model.
        max_requests, kv_tokens: limits; None derives them from the device's memory (`derive_limits`).
        chunk_tokens: most prompt tokens that one step reads while others decode, so that they do not wait
            long; None is `prefill_tokens`, as when nobody decodes.
        max_waiting: requests that may wait; more are refused with `QueueFull`.
        overcommit: admit requests by their prompts instead of the longest that they may grow to. More run
            at once; when KV pages run out, the last in order of service is preempted: it waits, and reads
            again what it had.
        clock: seconds, for deadlines.

    Raises:
        ValueError: limits that the memory does not hold.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_requests: int | None = None,
        kv_tokens: int | None = None,
        chunk_tokens: int | None = 256,
        max_waiting: int = 1024,
        overcommit: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.lm = lm
        self.config = config = derive_limits(lm.config, max_requests, kv_tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens = {chunk_tokens}; it takes an integer >= 1, or None")
        self.pool = StatePool(config, BACKEND)
        self.slate = new_slate(config)
        self.row_buckets = scheduler.row_buckets(config.max_requests)
        self.token_buckets = scheduler.token_buckets(config.prefill_tokens)
        self._pieces = min(PIECES, config.max_requests)
        self._chunk = config.prefill_tokens if chunk_tokens is None else min(chunk_tokens, config.prefill_tokens)
        self._max_waiting, self._overcommit, self._clock = max_waiting, overcommit, clock
        self._queue = scheduler.Queue()
        self._running: dict[int, Handle] = {}
        self._flights: list[_Flight] = []
        self._number = 0
        self._lock = threading.RLock()
        self._debug = debug_mode()
        self.counters: collections.Counter[str] = collections.Counter()

    # Requests

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        *,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        priority: int = 0,
        timeout: float | None = None,
    ) -> Handle:
        """Adds a request; it runs as `step` is called.

        Args:
            prompt: a text or token ids.
            max_new_tokens: most new tokens; a request also ends at `max_length`.
            sampling: how to sample; None is greedy.
            stop_ids: ids that end it; None takes the checkpoint's, () never stops early.
            stop: strings that end it; its text is cut before them.
            priority: higher is served first.
            timeout: seconds from now after which it ends with `deadline`, whatever it has by then.

        Raises:
            ValueError: what cannot run; the message says what it takes.
            QueueFull: too many wait.
        """
        tokenizer = self.lm.tokenizer
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ValueError("prompt is text, and this model has no tokenizer; give a list of token ids")
            prompt = tokenizer.encode(prompt)
        ids = self.config.generation.stop_ids if stop_ids is None else tuple(stop_ids)
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if stop and tokenizer is None:
            raise ValueError(f"stop = {list(stop)!r} needs a tokenizer, and this model has none; use stop_ids")
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop = {list(stop)!r}; it takes strings of at least one character")
        sampling = SamplingParams() if sampling is None else sampling
        prompt = [int(i) for i in prompt]
        (most,) = check_requests(self.config, [Request(prompt, max_new_tokens, sampling)], ids)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout = {timeout!r}; it takes a number of seconds > 0, or None")
        with self._lock:
            if self.pool.pages.for_tokens(len(prompt) + most) > self.pool.pages.count:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens and {most} new ones do not fit into kv_tokens = "
                    f"{self.config.kv_tokens}; ask for fewer, or raise kv_tokens"
                )
            if len(self._queue) >= self._max_waiting:
                raise QueueFull(f"{len(self._queue)} requests wait, as many as max_waiting takes; try again later")
            handle = Handle(
                number=self._number,
                prompt=tuple(prompt),
                max_new_tokens=most,
                sampling=sampling,
                priority=priority,
                deadline=None if timeout is None else self._clock() + timeout,
                mode=mode_of(sampling),
                collector=Collector(self._number, len(prompt), tokenizer, ids, stop, None),
                text=None if tokenizer is None else "",
            )
            handle.collector.listen(lambda _, tokens, text: self._piece(handle, tokens, text))
            self._number += 1
            self._queue.push(handle)
            self.counters["submitted"] += 1
        return handle

    def cancel(self, handle: Handle) -> None:
        """Ends a request now; one that has ended stays as it is."""
        with self._lock:
            if not handle.done:
                self._finish(handle, "cancelled")

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """What a request produces, as it comes. Calls `step` itself while there is nothing to hand out."""
        while True:
            with self._lock:
                pieces, handle.pieces = handle.pieces, []
            yield from pieces
            if handle.done and not handle.pieces:
                return
            if not pieces:
                self.step()

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted, or were preempted."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Requests that have been admitted and have not ended."""
        return len(self._running)

    # Steps

    def step(self) -> bool:
        """One step of everything that can run.

        Returns:
            Whether something is left to do.

        Raises:
            NonFiniteLogitsError: in debug mode (`GDNJAX_DEBUG=1`), where a request's logits are NaN or infinite;
                otherwise that request ends with `error`.
        """
        with self._lock:
            for handle in scheduler.expired([*self._queue, *self._running.values()], self._clock()):
                self._finish(handle, "deadline")
            self._admit()
            behind, self._flights = self._flights, []
            self._read(behind)
            self._decode(behind)
            self._receive(behind)
            return bool(self._queue or self._running or self._flights)

    def _admit(self) -> None:
        while (handle := self._queue.head()) is not None:
            ids = [*handle.prompt, *handle.tokens]
            reserve = min(len(ids) + 1, handle.limit) if self._overcommit else None
            try:
                request = self.pool.acquire(handle.limit, prompt=ids, reserve=reserve)
            except NoRoom:
                return
            self._queue.remove(handle)
            start = self.pool.position(request)
            handle.request, handle.to_read, handle.sent = request, ids, len(handle.tokens)
            handle.cuts = self.pool.prefixes.boundaries(ids, start)
            handle.cached = max(handle.cached, start)
            self._running[request] = handle
            number = np.int32(request)
            self.slate = programs.run_admit(self.slate, number, np.int32(handle.sent), *settings(handle.sampling))
            if handle.mode == "penalized":
                in_prompt = np.zeros(self.config.vocab_size, np.bool_)
                in_prompt[list(handle.prompt)] = True
                in_output = np.bincount(handle.tokens, minlength=self.config.vocab_size).astype(np.int32)
                self.slate = programs.run_admit_penalties(self.slate, number, in_prompt, in_output)

    def _read(self, behind: list[_Flight]) -> None:
        """Reads one window of prompts, and samples the first token of those that it completes."""
        position = self.pool.position
        waiting = [
            (r, position(r), len(h.to_read), h.cuts)
            for r, h in sorted(self._running.items(), key=lambda item: scheduler.rank(item[1]))
            if position(r) < len(h.to_read)
        ]
        if not waiting:
            return
        budget = self._chunk if len(waiting) < len(self._running) else self.config.prefill_tokens
        counts = scheduler.windows(waiting, budget, self._pieces)
        plan = self.pool.plan_walk(counts)
        rows = scheduler.smallest(self.token_buckets, sum(counts.values()))
        tokens = np.zeros(rows, np.int32)
        ids = [
            i for r, at in zip(counts, plan.positions, strict=True) for i in self._running[r].to_read[at:][: counts[r]]
        ]
        tokens[: len(ids)] = ids
        last = np.zeros(self._pieces, np.int32)
        last[: len(counts)] = np.cumsum(plan.counts) - 1
        batch = Batch(tokens, plan.rows(rows), last)  # pyright: ignore[reportArgumentType]
        logits = self.pool.run(plan, lambda state: programs.run_prefill(self.lm.params, state, batch))
        self.counters["prefill_tokens"] += len(ids)
        complete: list[int | None] = []
        for request in counts:
            handle = self._running[request]
            if position(request) in handle.cuts:
                self.counters["prefixes_kept"] += self.pool.remember(request, handle.to_read[: position(request)])
            complete.append(request if position(request) == len(handle.to_read) else None)
        self._draw(logits, complete, self._pieces)

    def _decode(self, behind: list[_Flight]) -> None:
        """One token of every request that has read its prompt and may have more."""
        while True:
            ready = [
                r
                for r, h in self._running.items()
                if self.pool.position(r) >= len(h.to_read) and h.sent < h.max_new_tokens
            ]
            if not ready:
                return
            try:
                plans = [
                    self.pool.plan_decode(ready[at : at + self.row_buckets[-1]])
                    for at in range(0, len(ready), self.row_buckets[-1])
                ]
                break
            except OutOfPages:
                self._make_room(behind)
        for plan in plans:
            rows = scheduler.smallest(self.row_buckets, len(plan.requests))
            request, token = plan.rows(rows), self.slate.token
            logits = self.pool.run(
                plan,
                lambda state, token=token, request=request: programs.run_decode(self.lm.params, state, token, request),
                commits=True,
            )
            self._draw(logits, list(plan.requests), rows)
        self.counters["decode_steps"] += 1

    def _draw(self, logits: jax.Array, requests: Sequence[int | None], rows: int) -> None:
        """Samples for the rows that have a request, each by its own sampler."""
        handles = [None if r is None else self._running[r] for r in requests]
        for mode in MODES:
            mine = [h if h is not None and h.mode == mode else None for h in handles]
            if not any(h is not None for h in mine):
                continue
            numbers = np.full(rows, -1, np.int32)
            numbers[: len(mine)] = [
                r if h is not None and r is not None else -1 for h, r in zip(mine, requests, strict=True)
            ]
            self.slate, emission = programs.run_draw(self.slate, logits, numbers, mode=mode)
            emission.token.copy_to_host_async()
            emission.logprob.copy_to_host_async()
            self._flights.append(_Flight(emission, tuple(mine)))
            for handle in mine:
                if handle is not None:
                    handle.sent += 1

    def _make_room(self, behind: list[_Flight]) -> None:
        """Frees KV pages: by what is about to end, else by preempting the last in order of service."""
        flights = [*behind, *self._flights]
        if flights:
            behind.clear()
            self._flights.clear()
            before = len(self._running)
            self._receive(flights)
            if len(self._running) < before:
                return
        handle = scheduler.victim(self._running)
        assert handle.request is not None
        self.pool.release(handle.request)
        del self._running[handle.request]
        handle.request = None
        handle.preemptions += 1
        self.counters["preemptions"] += 1
        self._queue.push(handle)

    def _receive(self, flights: list[_Flight]) -> None:
        """Takes the tokens of flights, in order."""
        broken: list[int] = []
        for flight in flights:
            tokens, logprobs = np.asarray(flight.emission.token), np.asarray(flight.emission.logprob)
            for row, handle in enumerate(flight.handles):
                if handle is None or handle.done:
                    continue
                token = int(tokens[row])
                assert token != NOTHING
                if token == NOT_FINITE:
                    self._finish(handle, "error")
                    broken.append(handle.number)
                    continue
                handle.logprobs.append(float(logprobs[row]))
                handle.tokens.append(token)
                self.counters["generated_tokens"] += 1
                more = handle.collector.push(token, float(logprobs[row]))
                if not more or len(handle.tokens) == handle.max_new_tokens:
                    self._finish(handle, "length" if more else "stop")
        if broken and self._debug:
            raise NonFiniteLogitsError(
                f"requests {broken}: the logits are NaN or infinite; check the weights, or load them with "
                "dtype='float32'"
            )

    def _piece(self, handle: Handle, tokens: list[int], text: str) -> None:
        if handle.text is not None:
            handle.text += text
        logprobs = handle.logprobs[len(handle.logprobs) - len(tokens) :]
        handle.pieces.append(Piece(tuple(tokens), tuple(logprobs), text))

    def _finish(self, handle: Handle, reason: FinishReason) -> None:
        handle.finish_reason = reason
        handle.collector.result(logprobs=False)  # hands out the text that it held back
        self.counters[f"finished_{reason}"] += 1
        if handle.request is None:
            self._queue.remove(handle)
        else:
            self.pool.release(handle.request)
            del self._running[handle.request]
            handle.request = None

    # Warming up

    def warm_up(self, progress: bool = False) -> None:
        """Compiles everything that serving can need, so that no request waits for it.

        Args:
            progress: show a progress bar.

        Raises:
            PoolError: requests are running.
        """
        with self._lock:
            tasks = list(self._programs())
            if progress:
                from rich.progress import track

                tasks = track(tasks, description="compiling", transient=True)
            for task in tasks:
                task()
            jax.block_until_ready((self.pool.state, self.slate))

    def _programs(self) -> Iterator[Callable[[], Any]]:
        yield self.pool.warm_up
        vocab, params = self.config.vocab_size, self.lm.params

        def prefill(rows: int) -> None:
            batch = Batch(np.zeros(rows, np.int32), np.full(rows, -1, np.int32), np.zeros(self._pieces, np.int32))  # pyright: ignore[reportArgumentType]
            self.pool.run((), lambda state: programs.run_prefill(params, state, batch))

        def decode(rows: int) -> None:
            nobody = np.full(rows, -1, np.int32)
            token = self.slate.token
            logits = self.pool.run((), lambda state: programs.run_decode(params, state, token, nobody))
            for mode in MODES:
                self.slate, _ = programs.run_draw(self.slate, logits, nobody, mode=mode)

        def admit() -> None:
            self.slate = programs.run_admit(self.slate, np.int32(0), np.int32(0), *settings(SamplingParams()))
            self.slate = programs.run_admit_penalties(
                self.slate, np.int32(0), np.zeros(vocab, np.bool_), np.zeros(vocab, np.int32)
            )

        yield admit
        for rows in self.token_buckets:
            yield lambda rows=rows: prefill(rows)
        for rows in sorted({*self.row_buckets, self._pieces}):
            yield lambda rows=rows: decode(rows)

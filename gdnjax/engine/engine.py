"""The engine: requests come and go at any moment, and every step serves all that can run.

One step decodes one token of every request that has read its prompt, or verifies drafts, and only then looks at
the tokens of the step before: what the host decides never waits for the device. (Where drafts are verified, it waits
for how many were accepted.) A request that has ended is therefore stepped once more, for nothing. Last, it reads a
window of prompts, if any is waiting to be read.

    engine = Engine(gdnjax.load("tiny"))
    engine.warm_up()
    handle = engine.submit("Once upon a time", max_new_tokens=40)
    for piece in engine.stream(handle):
        print(piece.text, end="")
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import jax

from gdnjax.engine import scheduler
from gdnjax.engine.constraint import Constraint
from gdnjax.engine.door import Door
from gdnjax.engine.handle import FinishReason, Handle, Piece
from gdnjax.engine.launcher import AnyFlight, Launcher
from gdnjax.engine.pace import Pace
from gdnjax.engine.receiver import Receiver
from gdnjax.engine.roster import Roster
from gdnjax.engine.speculator import Speculator
from gdnjax.engine.submission import drafts_of, limit_of, make_handle, speculation_of
from gdnjax.generation.drafting import Source
from gdnjax.generation.generate import NonFiniteLogitsError
from gdnjax.generation.sampling import SamplingParams
from gdnjax.model.backend import BACKEND
from gdnjax.sizes import derive_limits
from gdnjax.state.batch import check_ids
from gdnjax.state.pages import OutOfPages
from gdnjax.state.pool import StatePool
from pallas_kernels.debug import debug_level

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel


MOST_FAILURES = 3
"""A request under which so many steps have failed ends with `error`: it may be what makes them fail."""


class Engine:
    """Continuous batching over a loaded model.

    `submit` and `cancel` may be called from any thread and never wait for a step; one thread at a time steps.

    Args:
        lm: the model.
        max_requests, kv_tokens: limits. None is what the model's config says, or for KV tokens, if it does not,
            what fills the device's memory and the requests can use; `auto` derives both so (`derive_limits`).
        chunk_tokens: most prompt tokens that one step reads while others decode, so that they do not wait
            long; None is `prefill_tokens`, as when nobody decodes.
        max_waiting: requests that may wait; more are refused with `QueueFull`.
        overcommit: admit requests by their prompts instead of the longest that they may grow to. More run
            at once; when KV pages run out, the last in order of service is preempted: it waits, and reads
            again what it had.
        speculate: most drafts of a request that one step verifies, 0 to 7; None is the config's. The tokens are
            those of plain decoding, in fewer steps.
        drafts: where they come from: `mtp`, the model's draft head, or `ngram`, what followed in the text so far. None
            is the head, if the model has one.
        adaptive: let steps verify fewer, down to none, where fewer give more tokens a second. That is measured while
            serving, and there are more shapes to compile.
        clock: seconds, for deadlines.

    Raises:
        ValueError: limits that the memory does not hold, or drafts that nobody makes.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_requests: int | Literal["auto"] | None = None,
        kv_tokens: int | Literal["auto"] | None = None,
        chunk_tokens: int | None = 256,
        max_waiting: int = 1024,
        overcommit: bool = False,
        speculate: int | None = None,
        drafts: Source | None = None,
        adaptive: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.lm = lm
        own, source = speculation_of(lm.config, speculate, drafts)
        self._drafts: Source | None = source
        if adaptive and source is None:
            raise ValueError("adaptive = True with speculate = 0; give most drafts of a step, speculate = 1 to 7")
        self._pace = Pace(own.speculate) if adaptive else None
        requests, tokens = limit_of(max_requests, own.max_requests), limit_of(kv_tokens, own.kv_tokens)
        self.config = config = derive_limits(own, requests, tokens)
        if chunk_tokens is not None and chunk_tokens < 1:
            raise ValueError(f"chunk_tokens = {chunk_tokens}; it takes an integer >= 1, or None")
        self._make_pool()
        self._chunk = config.prefill_tokens if chunk_tokens is None else min(chunk_tokens, config.prefill_tokens)
        self._clock = clock
        self.counters: collections.Counter[str] = collections.Counter()
        self._roster = Roster(overcommit, self.counters)
        self._door = Door(self._roster.queue, max_waiting, self.counters)
        self._receiver = Receiver(self.counters)
        self._lock = threading.RLock()
        self._debug = debug_level() > 0

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
        prompt_logprobs: bool = False,
        speculate: int | None = None,
        constraint: Constraint | None = None,
        on_piece: Callable[[Piece | None], None] | None = None,
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
            prompt_logprobs: also score the prompt's tokens (`Handle.prompt_logprobs`). It is then read in short
                windows, and resumes from no shared prefix.
            speculate: most drafts that a step of its verifies, 0 to the engine's `speculate`, which is what None takes.
            constraint: what its text is held to (`gdnjax.engine.constraint`). It is then decoded without drafts.
            on_piece: called with every piece as it comes, by the thread that steps, and with None at the end.

        Raises:
            ValueError: what cannot run; the message says what it takes.
            QueueFull: too many wait.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout = {timeout!r}; it takes a number of seconds > 0, or None")
        handle = make_handle(self.lm, self.config, prompt, max_new_tokens, sampling, stop_ids, stop, constraint)
        handle.speculate = drafts_of(self.config, speculate, constraint)
        handle.priority, handle.scoring, handle.on_piece = priority, prompt_logprobs, on_piece
        handle.deadline = None if timeout is None else self._clock() + timeout
        self._enter(handle)
        return handle

    def _enter(self, handle: Handle) -> None:
        pages = self.pool.pages
        if pages.for_tokens(handle.limit) > pages.count:
            raise ValueError(
                f"a prompt of {len(handle.prompt)} tokens and {handle.max_new_tokens} new ones do not fit into "
                f"kv_tokens = {self.config.kv_tokens}; ask for fewer, or raise kv_tokens"
            )
        self._door.enter(handle)

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[float]:
        """The log-probability of each token of a continuation behind a prompt and the tokens before it.

        Steps until it is there. Errors as in `submit`; both take at least one token.
        """
        for name, ids in (("prompt", prompt), ("continuation", continuation)):
            if not len(ids):
                raise ValueError(f"the {name} is empty; it takes at least one token")
        check_ids(continuation, self.config.vocab_size)
        *ids, last = *prompt, *continuation
        handle = make_handle(self.lm, self.config, ids, 1, stop_ids=())
        handle.scoring, handle.followed_by = True, int(last)
        self._enter(handle)
        while not handle.done:
            self.step()
        return handle.prompt_logprobs[len(prompt) - 1 :]

    def cancel(self, handle: Handle) -> None:
        """Ends a request now; one that has ended stays as it is."""
        self._door.cancel(handle)
        # Now, unless a step is running: then that takes it in, or the next one.
        if self._lock.acquire(blocking=False):
            try:
                self._take_in()
            finally:
                self._lock.release()

    def _take_in(self) -> None:
        for handle in self._door.take_in():
            if not handle.done:
                self._finish(handle, "cancelled")

    def stream(self, handle: Handle) -> Iterator[Piece]:
        """What a request produces, as it comes. Calls `step` itself while there is nothing to hand out."""
        while True:
            ended, came = handle.done, bool(handle.pieces)
            while handle.pieces:
                yield handle.pieces.popleft()
            if ended:
                return
            if not came:
                self.step()

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted, or were preempted."""
        return self._door.waiting

    @property
    def full(self) -> bool:
        """Whether `submit` would raise `QueueFull`."""
        return self._door.full

    @property
    def running(self) -> int:
        """Requests that have been admitted and have not ended."""
        return len(self._roster.running)

    @property
    def seconds_waiting(self) -> float:
        """Seconds that steps have spent waiting for the device, of all the time they took."""
        return self._receiver.seconds_waiting

    # Steps

    def step(self) -> bool:
        """One step of everything that can run.

        Returns:
            Whether something is left to do.

        Raises:
            NonFiniteLogitsError: with `GDNJAX_DEBUG=1` or 2, where a request's logits are NaN or infinite;
                otherwise that request ends with `error`.
            Exception: whatever the device raises. All requests that ran then wait, and go on with the next step,
                but for those under which `MOST_FAILURES` steps have failed: they end with `error`.
        """
        with self._lock:
            self._take_in()
            if self._lost:
                self._recover()
            try:
                for handle in scheduler.expired([*self._roster.queue, *self._roster.running.values()], self._clock()):
                    self._finish(handle, "deadline")
                behind = self._launcher.take()
                # Tokens are handed out before prompts are read: what that takes the host, nobody waits for.
                self._decode(behind)
                self._receive(behind)
                self._admit()
                self._read()
            except NonFiniteLogitsError:
                raise
            except Exception:
                self._start_over()
                raise
            return bool(self.waiting or self._roster.running or self._launcher.flights)

    def _admit(self) -> None:
        for handle in self._roster.admit(self.pool):
            self._launcher.admit(handle)

    def _read(self) -> None:
        """Reads one window of prompts."""
        position = self.pool.position
        behind = sorted((h for h in self._roster.running.values() if h.reading), key=scheduler.rank)
        if not behind:
            return
        budget, pieces = self._chunk, self._launcher.pieces
        if len(behind) == len(self._roster.running):
            budget = self.config.prefill_tokens
        if behind[0].scoring:
            budget, pieces = min(budget, self._launcher.score_rows), 1
        unscored = [h for h in behind if not h.scoring] if not behind[0].scoring else behind[:1]
        waiting = [(r, position(r), len(h.to_read), h.cuts) for h in unscored if (r := h.request) is not None]
        plan = self.pool.plan_walk(scheduler.windows(waiting, budget, pieces))
        self._launcher.read(plan, self._roster.running)
        self.counters["prefill_tokens"] += sum(plan.counts)
        for request in plan.requests:
            handle, end = self._roster.running[request], position(request)
            handle.reading = end < len(handle.to_read)
            if end in handle.cuts:
                self.counters["prefixes_kept"] += self.pool.remember(request, handle.to_read[:end])

    def _decode(self, behind: list[AnyFlight]) -> None:
        """One step of every request that has read its prompt and may have more."""
        self._launcher.settle(self._receiver.fetch)
        if self._launcher.receives_first(self._roster.running.values()):
            self._receive(behind)
            behind.clear()
        while True:
            ready = [r for r, h in self._roster.running.items() if not h.reading and h.sent < h.max_new_tokens]
            if not ready:
                return
            try:
                plans = self._launcher.plan(ready, self._roster.running)
                break
            except OutOfPages:
                self._make_room(behind)
        for plan in plans:
            self._launcher.decode(plan, self._roster.running)
        self.counters["decode_steps"] += 1

    def _make_room(self, behind: list[AnyFlight]) -> None:
        """Frees KV pages: by what is about to end, else by preempting the last in order of service."""
        flights = [*behind, *self._launcher.take()]
        if flights:
            behind.clear()
            before = len(self._roster.running)
            self._receive(flights)
            if len(self._roster.running) < before:
                return
        self._roster.preempt(self.pool)

    def _start_over(self) -> None:
        """Puts everybody back into the queue; the pool is lost, as its state may be.

        Tokens that were on their way come again, the same ones: a draw depends on the seed and its number.
        """
        # Where nobody ran, it was an admission that failed.
        suspects = self._roster.retreat() or [h for h in (self._roster.queue.head(),) if h is not None]
        self._lost = True
        self._failed(suspects)
        self.pool.close()

    def _recover(self) -> None:
        # Not two pools at a time, for one may fill the memory: the old one is closed.
        try:
            self._make_pool()
        except Exception:
            self._failed(list(self._roster.queue))
            raise

    def _failed(self, handles: Sequence[Handle]) -> None:
        for handle in handles:
            handle.failures += 1
            if handle.failures >= MOST_FAILURES:
                self._finish(handle, "error")

    def _make_pool(self) -> None:
        self.pool = StatePool(self.config, BACKEND, params=self.lm.params)
        params, pool, drafts = self.lm.params, self.pool, self._drafts
        self._launcher = Launcher(params, pool) if drafts is None else Speculator(params, pool, drafts, self._pace)
        self._lost = False

    def _receive(self, flights: Sequence[AnyFlight]) -> None:
        broken = self._receiver.receive(flights, self._finish)
        self._launcher.reuse(flights)
        self._launcher.draw_held()
        if broken and self._debug:
            raise NonFiniteLogitsError(
                f"requests {broken}: the logits are NaN or infinite; check the weights, or load them with "
                "dtype='float32'"
            )

    def _finish(self, handle: Handle, reason: FinishReason) -> None:
        handle.collector.result(logprobs=False)  # hands out the text that it held back
        handle.finish_reason = reason
        self.counters[f"finished_{reason}"] += 1
        self.counters["prompt_tokens"] += len(handle.prompt)
        try:
            self._roster.remove(handle, self.pool)
        finally:  # it has ended, even if the device fails
            if handle.on_piece is not None:
                handle.on_piece(None)

    # Warming up

    def warm_up(self, progress: bool = False) -> None:
        """Compiles everything that serving can need, so that no request waits for it.

        Args:
            progress: show a progress bar on stderr.

        Raises:
            PoolError: requests are running.
        """
        with self._lock:
            tasks = list(self._launcher.warming())
            if progress:
                from rich.console import Console
                from rich.progress import track

                tasks = track(tasks, description="compiling", transient=True, console=Console(stderr=True))
            for task in tasks:
                task()
            jax.block_until_ready((self.pool.state, self._launcher.slate))

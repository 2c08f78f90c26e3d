"""Puts an engine's work on the device and never waits for it: windows, decode steps, sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.engine import programs
from gdnjax.engine.handle import Handle
from gdnjax.engine.programs import MODES, Mode, new_slate, settings
from gdnjax.engine.scheduler import row_buckets, smallest, token_buckets
from gdnjax.engine.speculation import Verdict
from gdnjax.generation.sampling import SamplingParams
from gdnjax.state.batch import Batch
from gdnjax.state.pool import StatePool
from gdnjax.state.pytree import State
from gdnjax.state.requests import Plan
from gdnjax.weights.declaration import Params

PIECES = 16
"""Most requests whose prompts one window reads."""
SCORE_ROWS = 64
"""Rows of a window whose tokens are scored: each has logits over the whole vocabulary."""

SPARE = 2
"""Arrays for tokens on their way that a launcher keeps for each number of rows."""
MOST_ROWS_KEPT = 16
"""Arrays of request numbers that a launcher keeps on the device."""

Fetch = Callable[..., list[list[Any]]]
"""Device arrays -> as lists, once the device has them."""


@dataclasses.dataclass(frozen=True)
class Flight:
    """Tokens on their way, in one array (`gdnjax.engine.programs.pack`): row i is for `handles[i]` (None: a row of
    somebody else)."""

    emission: jax.Array
    handles: Sequence[Handle | None]


@dataclasses.dataclass(frozen=True)
class ScoreFlight:
    """Log-probabilities of given tokens on their way: the first `count` of `logprobs`."""

    logprobs: jax.Array
    handle: Handle
    count: int


@dataclasses.dataclass(frozen=True)
class VerifyFlight:
    """Tokens of a verify step on their way: row i of `verdict` and `drafted` is for `handles[i]`."""

    verdict: Verdict
    drafted: jax.Array
    handles: tuple[Handle, ...]


AnyFlight = Flight | ScoreFlight | VerifyFlight


class Launcher:
    """What of an engine lives on the device, beside the pool.

    `flights` are launched and not yet fetched, in order; whoever fetches them clears the list.
    """

    def __init__(self, params: Params, pool: StatePool):
        self.params, self.pool, config = params, pool, pool.config
        self.slate = new_slate(config)
        self.row_buckets = row_buckets(pool.requests.most)
        self.token_buckets = token_buckets(config.prefill_tokens)
        self.score_rows = min(SCORE_ROWS, config.prefill_tokens)
        self.pieces = min(PIECES, pool.requests.most)
        self.flights: list[AnyFlight] = []
        self._rows: dict[tuple[int, ...], jax.Array] = {}
        # Of the last decode step of so many rows, whose memory the next one takes. All now: what an engine holds stays
        # what it is, whatever comes.
        self._logits = {rows: jnp.zeros((rows, config.vocab_size), jnp.float32) for rows in self._plain_rows()}
        # By rows, what was emitted and fetched, whose memory the next draws take: two, as one is on its way.
        sizes = {*self._plain_rows(), self.pieces}
        self._spent = {rows: [jnp.zeros((2, rows), jnp.int32) for _ in range(SPARE)] for rows in sizes}
        # Logits and owners of constrained rows, whose draw waits for the tokens before.
        self._everything = masks_of_all([*self.row_buckets, self.pieces], config.vocab_size)
        self._held: list[tuple[jax.Array, Sequence[Handle | None]]] = []

    def _plain_rows(self) -> Sequence[int]:
        """Rows of the decode steps that give each request one token."""
        return self.row_buckets

    def take(self) -> list[AnyFlight]:
        """The flights, which are the caller's now."""
        taken, self.flights = self.flights, []
        return taken

    def reuse(self, flights: Iterable[AnyFlight]) -> None:
        """Takes the memory of flights that have been fetched."""
        for flight in flights:
            if isinstance(flight, Flight) and len(spare := self._spent[flight.emission.shape[1]]) < SPARE:
                spare.append(flight.emission)

    def admit(self, handle: Handle) -> None:
        """Writes what a request samples with."""
        assert handle.request is not None
        number, vocab = np.int32(handle.request), self.pool.config.vocab_size
        self.slate = programs.run_admit(self.slate, number, np.int32(handle.sent), *settings(handle.sampling))
        if handle.sampling.penalized:
            in_prompt = np.zeros(vocab, np.bool_)
            in_prompt[list(handle.prompt)] = True
            in_output = np.bincount(handle.tokens, minlength=vocab).astype(np.int32)
            self.slate = programs.run_admit_penalties(self.slate, number, in_prompt, in_output)

    def read(self, plan: Plan, handles: Mapping[int, Handle]) -> None:
        """Reads a window of prompts, and samples the first token of those that it completes."""
        pieces = [handles[r].to_read[at:end] for r, (at, end) in plan.writes.items()]
        ids = [token for piece in pieces for token in piece]
        last = np.zeros(self.pieces, np.int32)
        last[: len(pieces)] = np.cumsum(plan.counts) - 1
        scored = next((handles[r] for r in plan.requests if handles[r].scoring), None)
        rows = smallest(self.token_buckets, len(ids)) if scored is None else self.score_rows
        tokens = np.zeros(rows, np.int32)
        tokens[: len(ids)] = ids
        batch = _batch(tokens, plan.rows(rows), last)
        writes = plan.writes.items()
        behind = {r: handles[r].to_read[end] if end < len(handles[r].to_read) else None for r, (_, end) in writes}
        if scored is None:
            logits = self.pool.run(plan, lambda state: self._prefill(state, batch, behind))
        else:
            ((_, end),) = plan.writes.values()
            targets = np.zeros(rows, np.int32)
            following = [*scored.to_read[end - len(ids) + 1 : end + 1], scored.followed_by or 0]
            targets[: len(ids)] = following[: len(ids)]
            logits, logprobs = self.pool.run(plan, lambda state: self._score(state, batch, targets, behind))
            logprobs.copy_to_host_async()
            self.flights.append(ScoreFlight(logprobs, scored, len(ids)))
        self._draw(logits, self._by_mode([r if token is None else None for r, token in behind.items()], handles))

    def _prefill(self, state: State, batch: Batch, behind: Mapping[int, int | None]) -> tuple[jax.Array, State]:
        """The program that reads a window. behind: by request, in order, the token behind its piece; None where what it
        must read ends."""
        return programs.run_prefill(self.params, state, batch)

    def _score(
        self, state: State, batch: Batch, targets: np.ndarray, behind: Mapping[int, int | None]
    ) -> tuple[tuple[jax.Array, jax.Array], State]:
        """The program that reads one and scores its tokens."""
        return programs.run_score(self.params, state, batch, targets)

    def plan(self, requests: Sequence[int], handles: Mapping[int, Handle]) -> list[Plan]:
        """The next decode steps of requests. Errors as in `StatePool.plan_walk`."""
        most = self.row_buckets[-1]
        return [self.pool.plan_decode(requests[at : at + most]) for at in range(0, len(requests), most)]

    def settle(self, fetch: Fetch) -> None:
        """Waits for what the next plan depends on: nothing, as a decode step gives one token."""

    def decode(self, plan: Plan, handles: Mapping[int, Handle]) -> None:
        """One token of each of the plan's requests."""
        rows = smallest(self.row_buckets, len(plan.requests))
        request = self._on_device([*plan.requests, *[-1] * (rows - len(plan.requests))])
        logits = self.pool.run(plan, lambda state: self._decode(state, request), commits=True)
        owners = self._by_mode(plan.requests, handles)
        if (constrained := owners.pop("constrained", None)) is not None:
            self._held.append((logits, constrained))
            del self._logits[rows]  # not to be taken by a second plan of this step
        self._draw(logits, owners)

    def draw_held(self) -> None:
        """Samples for constrained requests of the last decode step, after the tokens before have been taken in: what a
        request may take depends on them. The device is running that step meanwhile."""
        held, self._held = self._held, []
        for logits, owners in held:
            self._draw(logits, {"constrained": owners})
            self._logits[logits.shape[0]] = logits

    def receives_first(self, handles: Iterable[Handle]) -> bool:
        """Whether tokens must be taken in before a decode step is planned."""
        return False

    def _decode(self, state: State, request: jax.Array) -> tuple[jax.Array, State]:
        rows = request.shape[0]
        spent = self._logits.get(rows)
        if spent is None:  # held
            spent = jnp.zeros((rows, self.pool.config.vocab_size), jnp.float32)
        logits, state = programs.run_decode(self.params, state, spent, self.slate.token, request)
        self._logits[rows] = logits
        return logits, state

    def _by_mode(
        self, requests: Sequence[int | None], handles: Mapping[int, Handle]
    ) -> dict[Mode, list[Handle | None]]:
        """Whom rows give a token, by sampler. It counts as sent."""
        owners: dict[Mode, list[Handle | None]] = {}
        for row, request in enumerate(requests):
            if request is not None:
                handle = handles[request]
                handle.sent += 1
                if handle.mode not in owners:
                    owners[handle.mode] = [None] * len(requests)
                owners[handle.mode][row] = handle
        return owners

    def _draw(self, logits: jax.Array, owners: Mapping[Mode, Sequence[Handle | None]]) -> None:
        """Samples for rows that have an owner, each by its own sampler."""
        for mode, theirs in owners.items():
            numbers = [-1 if handle is None or handle.request is None else handle.request for handle in theirs]
            request = self._on_device(numbers + [-1] * (logits.shape[0] - len(numbers)))
            program, allowed = self._program(mode, theirs, logits.shape[0])
            spent = self._spare(logits.shape[0])
            self.slate, emission = programs.run_draw(self.slate, logits, request, spent, mode=program, allowed=allowed)
            # On its way to the host as soon as it is there: fetched later, it would be waited for.
            emission.copy_to_host_async()
            self.flights.append(Flight(emission, theirs))

    def _spare(self, rows: int) -> jax.Array:
        spare = self._spent[rows]
        return spare.pop() if spare else jnp.zeros((2, rows), jnp.int32)

    def _program(self, mode: Mode, owners: Sequence[Handle | None], rows: int) -> tuple[Mode, jax.Array | None]:
        """The sampler of a mode, and the tokens that each row may take, where it asks."""
        if mode not in ("penalized", "constrained"):
            return mode, None
        if mode == "penalized":
            return mode, self._everything[rows]
        allowed = np.zeros(self._everything[rows].shape, np.uint32)
        for row, handle in enumerate(owners):
            if handle is not None and handle.matcher is not None:
                allowed[row] = handle.matcher.mask
        return "penalized", jax.device_put(allowed)

    def _on_device(self, rows: Sequence[int]) -> jax.Array:
        """Request numbers as an array on the device. Kept, for from step to step they rarely change, and a transfer
        takes the host longer than the rest of a small call."""
        key = tuple(rows)
        if key not in self._rows:
            if len(self._rows) >= MOST_ROWS_KEPT:
                self._rows.clear()
            self._rows[key] = jax.device_put(np.array(rows, np.int32))
        return self._rows[key]

    def warming(self) -> Iterator[Callable[[], Any]]:
        """Calls that together compile everything that serving can need; they change nothing."""
        yield from self._warm_reading()
        for rows in self.row_buckets:
            yield lambda rows=rows: self._warm_decode(rows)

    def _warm_reading(self) -> Iterator[Callable[[], Any]]:
        yield self.pool.warm_up
        yield self._warm_admission
        for rows in self.token_buckets:
            yield lambda rows=rows: self._warm_window(rows)
        yield self._warm_score
        yield lambda: self._warm_draw(self.pieces)

    def _warm_admission(self) -> None:
        vocab, nobody = self.pool.config.vocab_size, np.int32(0)
        self.slate = programs.run_admit(self.slate, nobody, np.int32(0), *settings(SamplingParams()))
        nothing = np.zeros(vocab, np.bool_), np.zeros(vocab, np.int32)
        self.slate = programs.run_admit_penalties(self.slate, nobody, *nothing)

    def _padding(self, rows: int) -> Batch:
        return _batch(np.zeros(rows, np.int32), np.full(rows, -1, np.int32), np.zeros(self.pieces, np.int32))

    def _warm_window(self, rows: int) -> jax.Array:
        batch = self._padding(rows)
        return self.pool.run((), lambda state: self._prefill(state, batch, {}))

    def _warm_score(self) -> None:
        batch, targets = self._padding(self.score_rows), np.zeros(self.score_rows, np.int32)
        self.pool.run((), lambda state: self._score(state, batch, targets, {}))

    def _warm_decode(self, rows: int) -> None:
        nobody = self._on_device([-1] * rows)
        self.pool.run((), lambda state: self._decode(state, nobody))
        self._warm_draw(rows)

    def _warm_draw(self, rows: int) -> None:
        nobody, logits = self._on_device([-1] * rows), jnp.zeros((rows, self.pool.config.vocab_size), jnp.float32)
        for mode in MODES:
            program, allowed = self._program(mode, (), rows)
            spent = self._spare(rows)
            self.slate, spent = programs.run_draw(self.slate, logits, nobody, spent, mode=program, allowed=allowed)
            self._spent[rows].append(spent)


def masks_of_all(rows: Iterable[int], vocab: int) -> dict[int, jax.Array]:
    """By a number of rows, masks that allow all tokens; see `gdnjax.engine.programs.unmask`."""
    words = -(-vocab // 32)
    return {count: jax.device_put(np.full((count, words), 2**32 - 1, np.uint32)) for count in set(rows)}


def _batch(tokens: np.ndarray, request: np.ndarray, logits_rows: np.ndarray) -> Batch:
    # From the host: jit moves them, and no array is compiled for.
    arrays: Any = (tokens, request, logits_rows)
    return Batch(*arrays)

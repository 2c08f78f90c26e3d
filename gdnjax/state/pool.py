"""Requests over one state: admitted, planned, stepped, committed, forked, saved, released.

The pool owns the device's `State` and knows on the host what the device knows: positions, current slots,
pages. A plan never waits for the device. A request is a number from 0 to `max_requests` - 1, which names
its two slots (one in the `in_place` layout), its ring row and its row of the page table; slot 0 is nobody's.

    request = pool.acquire(limit=100)
    walk = pool.plan_walk({request: 12})
    logits = pool.run(walk, lambda state: prefill(params, state, batch))     # current at once
    plan = pool.plan_decode([request])
    logits = pool.run(plan, lambda state: decode_step(params, state, batch))
    pool.commit()                                                            # or pool.discard()
    pool.release(request)

With `config.speculate` a step has up to 1 + speculate rows of each request, of which a commit may take fewer:

    plan = pool.plan_verify({request: 4})
    logits = pool.run(plan, lambda state: verify(params, state, batch))      # verify_step, and the state last
    pool.commit({request: 2})

Every call that fails leaves everything as it was. With `GDNJAX_DEBUG=1` in the environment the bookkeeping
is checked after every call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.diagnosis.watch import Watch
from gdnjax.state import device as on_device
from gdnjax.state.backend import Backend
from gdnjax.state.pages import Growth, Pages
from gdnjax.state.pool_check import check_books, check_device
from gdnjax.state.prefix_cache import NO_MATCH, PrefixCache
from gdnjax.state.pytree import State, commit, init_state
from gdnjax.state.record import replay
from gdnjax.state.requests import Plan, PoolError, Requests
from gdnjax.state.snapshot import Snapshot, check_fits, groups, kv_pieces, take
from gdnjax.state.speculation import commit_verified
from gdnjax.weights.declaration import Params
from pallas_kernels.debug import debug_level

T = TypeVar("T")
P = ParamSpec("P")

PAGES_AHEAD = 3
"""Promised KV pages that a request takes when it begins one: at 64 tokens a page it then grows every 256 tokens."""

run_commit = jax.jit(commit, donate_argnames="state")
run_commit_verified = jax.jit(commit_verified, donate_argnames="state")
run_replay = jax.jit(replay, donate_argnames="state")


def _checked(method: Callable[Concatenate[StatePool, P], T]) -> Callable[Concatenate[StatePool, P], T]:
    @functools.wraps(method)
    def wrapper(self: StatePool, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            out = method(self, *args, **kwargs)
        finally:
            if self.debug:
                self.check()
        self.watch.after_call(method.__name__, self._state)
        return out

    return wrapper


@contextlib.contextmanager
def _undo(action: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        action()
        raise


class StatePool:
    """The live requests of one `State`.

    With `GDNJAX_GUARD=1` the state, and with it `pool.config`, has guards between requests and between pages: see
    `gdnjax.diagnosis.guard`. As many can be live as without.

    Args:
        config: sizes and limits.
        backend: what will step the state; None is this package's own, which takes both layouts.
        device: a device or sharding for all arrays; None is the default device.
        params: weights, for a config whose requests have records: what is recorded is replayed before it is copied.

    Raises:
        ConfigError: the backend cannot work on the config's `state_layout`, or cannot speculate.
        ValueError: no params, and records.
    """

    def __init__(
        self, config: Config, backend: Backend | None = None, device: Any = None, params: Params | None = None
    ):
        if backend is not None:
            backend.bind(config)
        if config.records and params is None:
            raise ValueError(
                f"speculate = {config.speculate}, speculative_state = 'record', and no params; the pool takes the "
                "weights that it replays records with"
            )
        self.watch = Watch(config)
        self.config = config = self.watch.config
        self._params = params
        self.debug = debug_level() > 0
        self.requests = Requests(config, self.watch.every)
        self.pages = Pages(config.kv_pages // self.watch.every, config.page_size, self.watch.every)
        places = on_device.snapshot_places(config)
        self.prefixes = PrefixCache(self.pages, places, config.prefix_interval)
        self._state = self.watch.begin(init_state(config, lengths=(), device=device))
        self._store = on_device.snapshot_store(config, places, device)
        # Most entries of the page table that one plan changes. A walk: pages begun, and a shared page a request. A
        # step: the pages that a request's rows lie in.
        walk = config.prefill_tokens // config.page_size + 2 * config.max_requests + 1
        step = config.max_requests * (1 + -(-config.speculate // config.page_size))
        self._entries = max(walk, step) + PAGES_AHEAD * config.max_requests

    # What there is

    @property
    def state(self) -> State:
        """The device's state. Read it, and step it with `run` only: whoever donates it takes it away.

        Raises:
            PoolError: a step failed after it had been given the state, which is gone.
        """
        if self._state.position.is_deleted():
            raise PoolError(
                "the state was lost in a step that failed after it had taken the state's memory; build a new pool"
            )
        return self._state

    @property
    def live(self) -> tuple[int, ...]:
        """Live requests, in order of admission."""
        return self.requests.live

    @property
    def pending(self) -> tuple[int, ...]:
        """Requests of the decode step that has run and is neither committed nor discarded."""
        return self.requests.pending

    def position(self, request: int) -> int:
        """Tokens that a request's current state contains."""
        return self.requests.get(request).position

    # Admission

    @_checked
    def acquire(self, limit: int, prompt: Sequence[int] | None = None, reserve: int | None = None) -> int:
        """Admits a request.

        Args:
            limit: tokens that it may grow to, prompt and new ones together.
            prompt: its token ids. With prefix caching on, it then starts where the deepest known prefix of
                them ends: see `position`. None always starts empty.
            reserve: tokens whose KV pages are kept back for it; None is `limit`, so that it never runs out.

        Returns:
            Its number.

        Raises:
            ValueError: a limit or a reservation that could never be met.
            PoolFull, OutOfPages: it must wait (both are `NoRoom`).
        """
        reserved = self._reservation(limit, reserve, 0 if prompt is None else len(prompt))
        request = self.requests.next()
        match = NO_MATCH if prompt is None else self.prefixes.match(prompt)
        self.pages.open(request, reserved, match.pages)
        if match.tokens:
            with _undo(lambda: self.pages.close(request)):
                self._state = on_device.run_resume(
                    self.state,
                    self._store,
                    np.int32(match.place),
                    np.int32(request),
                    np.int32(match.tokens),
                    self.table_row(match.pages),
                )
        self.prefixes.use(match)
        return self.requests.admit(request, limit, match.tokens)

    @_checked
    def release(self, request: int) -> None:
        """Ends a request at any moment: its slots are zeroed, its pages and its number are free again.

        A step of its that has run is forgotten, whether or not it was committed.
        """
        self.requests.get(request)
        self._state = on_device.run_clear(self.state, np.int32(request))
        self.pages.close(request)
        self.requests.end(request)

    @_checked
    def reset(self, request: int) -> None:
        """Takes a request back to no tokens (an admission undone, a preemption); it keeps its number.

        Both slots are zeroed and its pages are free again. Its reservation is what of it still fits: pages
        that it shared are not there to be had again.
        """
        self.requests.get(request)
        self._state = on_device.run_clear(self.state, np.int32(request))
        self.pages.reopen(request)
        self.requests.restart(request)

    @_checked
    def fork(self, request: int, limit: int | None = None, reserve: int | None = None) -> int:
        """Admits a copy of a request as it is now, without a step that is not committed.

        KV pages are shared, and copied when one of the two writes them.

        Args:
            request: the one to copy.
            limit, reserve: as in `acquire`; a limit of None is the request's own.

        Raises:
            ValueError: a limit under its position, or as in `acquire`.
            PoolError: in the `in_place` layout, a request with a step that is not committed.
            PoolFull, OutOfPages: as in `acquire`.
        """
        one = self.requests.get_current(request)
        limit = one.limit if limit is None else limit
        reserved = self._reservation(limit, reserve, one.position)
        target = self.requests.next()
        shared = self.pages.fork(request, target, one.position, reserved)
        with _undo(lambda: self.pages.close(target)):
            row = self.table_row(shared)
            self._replay(request)
            self._state = on_device.run_fork(self.state, np.int32(request), np.int32(target), row)
        return self.requests.admit(target, limit, one.position)

    # Snapshots

    @_checked
    def snapshot(self, request: int) -> Snapshot:
        """A request's state as it is now, without a step that is not committed, fetched from the device.

        Raises:
            PoolError: a request without tokens, or as in `fork`.
        """
        one = self.requests.get_current(request)
        if one.position == 0:
            raise PoolError(f"request {request} has no tokens yet; there is nothing to keep")
        self._replay(request)
        return take(self.state, request, one.position, self._pages_of(request))

    @_checked
    def restore(self, snapshot: Snapshot, limit: int, reserve: int | None = None) -> int:
        """Admits a request that goes on where a snapshot was taken, in this pool or another.

        Args:
            snapshot: from `snapshot` or `load_snapshot`.
            limit, reserve: as in `acquire`.

        Raises:
            CheckpointError: a snapshot of another model or dtype.
            ValueError, PoolFull, OutOfPages: as in `acquire`.
        """
        check_fits(snapshot, self.config)
        reserved = self._reservation(limit, reserve, snapshot.position)
        request = self.requests.next()
        self.pages.open(request, max(reserved, self.pages.for_tokens(snapshot.position)))
        with _undo(lambda: self.pages.close(request)):
            growth = self.pages.prepare({request: (0, snapshot.position)})
            pages = [page for _, _, page in growth.entries]
            for group, keys, values in kv_pieces(snapshot, pages, self.config.page_size):
                self._state = on_device.run_write_pages(self.state, group, keys, values)
            self._state = on_device.run_place(
                self.state,
                np.int32(request),
                snapshot.carried_by(self.config),
                np.int32(snapshot.position),
                self.table_row(pages),
            )
        self.pages.apply(growth)
        return self.requests.admit(request, limit, snapshot.position)

    @_checked
    def remember(self, request: int, tokens: Sequence[int]) -> bool:
        """Keeps what a request's state contains as a prefix for others, at a page boundary.

        Args:
            request: one whose position is a multiple of the page size.
            tokens: the ids that its state contains, all of them.

        Returns:
            Whether a snapshot was taken: not if the cache is off or has it already.

        Raises:
            ValueError: another number of tokens than the state contains, or no page boundary.
            PoolError: as in `fork`.
        """
        one = self.requests.get_current(request)
        if len(tokens) != one.position or one.position % self.config.page_size or not one.position:
            raise ValueError(
                f"request {request} has read {one.position} tokens, given {len(tokens)}; it takes all of them, at a "
                f"multiple of page_size = {self.config.page_size}"
            )
        entry = self.prefixes.insert(tokens, self._pages_of(request))
        if entry is None:
            return False
        key, place = entry
        with _undo(lambda: self.prefixes.remove(key)):
            self._replay(request)
            self._store = on_device.run_store(self._store, self.state, np.int32(request), np.int32(place))
        return True

    # Steps

    @_checked
    def plan_walk(self, counts: Mapping[int, int]) -> Plan:
        """Plans a prefill of so many tokens of each request, at most `prefill_tokens` in all.

        Raises:
            ValueError: no tokens, too many, or a request that would outgrow its limit.
            PoolError: a request that is not live or has a step that is not committed.
            OutOfPages: only where a request has no full reservation.
        """
        total = sum(counts.values())
        if total > self.config.prefill_tokens:
            raise ValueError(
                f"a walk over {total} tokens; it takes at most prefill_tokens = {self.config.prefill_tokens}: cut it"
            )
        plan = self.requests.plan(counts, keep_in_place=True)
        self._grow(self.pages.prepare(plan.writes, PAGES_AHEAD))
        return plan

    @_checked
    def plan_decode(self, requests: Sequence[int]) -> Plan:
        """Plans one token of each request. Errors as in `plan_walk`."""
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests = {list(requests)}; a decode step takes each request once")
        return self._plan_step(dict.fromkeys(requests, 1))

    @_checked
    def plan_verify(self, counts: Mapping[int, int]) -> Plan:
        """Plans candidate rows of each request, the token emitted last and drafts: 1 to 1 + `speculate`.

        Its pages reach behind the last draft, so a request that nears its limit takes fewer. Errors as in `plan_walk`.
        """
        most = self.config.verify_rows
        wrong = {request: count for request, count in counts.items() if not 1 <= count <= most}
        if wrong:
            raise ValueError(f"counts = {wrong}; a step of a request takes 1 to {most} rows: 1 + speculate")
        return self._plan_step(counts)

    def _plan_step(self, counts: Mapping[int, int]) -> Plan:
        if self.pending:
            raise PoolError(f"the step of requests {list(self.pending)} is not committed; commit or discard it first")
        plan = self.requests.plan(counts, keep_in_place=False)
        self._grow(self.pages.prepare(plan.writes, PAGES_AHEAD))
        return plan

    @_checked
    def run(
        self,
        plans: Plan | Sequence[Plan],
        step: Callable[[State], tuple[T, State]],
        commits: bool | Literal["some"] = False,
    ) -> T:
        """Runs a step that does what the plans say: a walk, a decode or verify step, or one of each.

        Args:
            plans: plans that nothing has overtaken: no commit, reset or release of their requests since.
            step: takes the state, which it may donate, and returns something and the new state.
            commits: whether the step also commits, on the device, all of its decode rows; or `some`, and
                `commit(accepted, on_device=True)` tells later how many. Until then requests can be released and walk.

        Returns:
            What `step` returned beside the state. Nothing is fetched from the device.

        Raises:
            PoolError: a plan that is out of date, or a second decode step before the first is committed.
        """
        plans = (plans,) if isinstance(plans, Plan) else tuple(plans)
        self.requests.check_plans(plans)
        out, self._state = step(self.state)
        self.requests.ran(plans, moved=commits == "some")
        if commits is True:
            self.requests.commit()
        if plans and self.watch.on:
            kinds = ", ".join("prefill" if plan.keep_in_place else self._step_kind for plan in plans)
            if commits or all(plan.keep_in_place for plan in plans):
                self.watch.after_step(kinds, self._state, self.requests.names)
            else:  # current once committed
                self.watch.after_call(kinds, self._state)
        return out

    @_checked
    def commit(self, accepted: Mapping[int, int] | None = None, on_device: bool = False) -> None:
        """Makes the step that ran current: positions advance and twin slots change places.

        Args:
            accepted: of a verify step, how many rows of each of its requests count (see `commit_verified`); None is
                all of them.
            on_device: whether the step has committed itself, with these counts. Until this call nothing can be planned.

        Raises:
            ValueError: counts for other requests than the step's, or without speculation.
        """
        self.requests.check_accepted(accepted)
        if not on_device and self.config.speculate:
            counts = np.zeros(self.config.max_requests, np.int32)
            for request in self.pending:
                counts[request] = self.requests.get(request).pending if accepted is None else accepted[request]
            self._state = run_commit_verified(self.state, counts)
        elif not on_device:
            self._state = run_commit(self.state)
        ran = self.pending
        self.requests.commit(accepted)
        if ran and self.watch.on and not on_device:
            self.watch.after_step(self._step_kind, self._state, self.requests.names)

    @_checked
    def discard(self) -> None:
        """Drops the step that ran: current slots are untouched, and it can be planned and run again.

        Raises:
            PoolError: in the `in_place` layout, where the step has written over what it read.
        """
        for request in self.pending:
            self.requests.get_current(request)
        self._state = on_device.run_discard(self.state)
        self.requests.discard()

    def warm_up(self) -> None:
        """Compiles every device function that serving needs, and changes nothing.

        Raises:
            PoolError: a request is live.
        """
        if self.live:
            raise PoolError(f"requests {list(self.live)} are live; warm up before the first one")
        nobody, group = np.int32(0), np.zeros(on_device.PAGES_PER_COPY, np.int32)
        if self.prefixes.places:
            self.prefixes.clear()
            self._store = on_device.run_store(self._store, self.state, nobody, np.int32(0))
            self._state = on_device.run_resume(
                self.state, self._store, np.int32(0), nobody, np.int32(0), self.table_row(())
            )
        self._state = on_device.run_copy_pages(self.state, group, group)
        self._write_table(np.full((self._entries, 3), -1, np.int32))
        self._state = on_device.run_clear(self.state, nobody)
        if self.config.records:
            self._state = run_replay(self._params, self.state, np.full(1, -1, np.int32))

    def close(self) -> None:
        """Frees the device's memory. The pool is of no use afterwards."""
        for leaf in jax.tree.leaves((self._state, self._store)):
            leaf.delete()

    # Inside

    def table_row(self, pages: Sequence[int]) -> np.ndarray:
        """A row of the page table with these pages, `[pages_per_request]` int32."""
        row = np.zeros(self.config.pages_per_request, np.int32)
        row[: len(pages)] = pages
        return row

    @property
    def _step_kind(self) -> str:
        return "verify" if self.config.speculate else "decode"

    def _pages_of(self, request: int) -> tuple[int, ...]:
        # A plan may have taken a page more than the state fills.
        return self.pages.held(request)[: self.pages.for_tokens(self.position(request))]

    def _replay(self, request: int) -> None:
        # Before the slot is copied. What a request is does not change, so no failure takes it back.
        one = self.requests.get(request)
        if one.lag:
            self._state = run_replay(self._params, self.state, np.array([request], np.int32))
            one.lag = 0

    def _grow(self, growth: Growth) -> None:
        if not growth.entries:
            return
        sources, targets = ([pair[i] for pair in growth.copies] for i in (0, 1))
        for source, target in zip(groups(sources), groups(targets), strict=True):
            self._state = on_device.run_copy_pages(self.state, source, target)
        entries = np.full((self._entries, 3), -1, np.int32)
        entries[: len(growth.entries)] = growth.entries
        self._write_table(entries)
        self.pages.apply(growth)

    def _write_table(self, entries: np.ndarray) -> None:
        table = on_device.run_write_table(self.state.page_table, entries)
        self._state = dataclasses.replace(self.state, page_table=table)

    def _reservation(self, limit: int, reserve: int | None, tokens: int) -> int:
        # Refuses what could never fit; the pages to reserve for a request that has `tokens` to begin with.
        c, reserve = self.config, limit if reserve is None else reserve
        if not max(1, tokens) <= limit <= c.max_length:
            raise ValueError(
                f"limit = {limit}; it takes {max(1, tokens)} (its tokens so far, at least 1) to max_length = "
                f"{c.max_length}"
            )
        if not 0 <= reserve <= limit:
            raise ValueError(f"reserve = {reserve}; it takes 0 to limit = {limit}")
        if self.pages.for_tokens(limit) > self.pages.count:
            raise ValueError(
                f"limit = {limit} needs {self.pages.for_tokens(limit)} KV pages of {c.page_size} tokens, and the cache "
                f"has {self.pages.count}; ask for fewer tokens, or raise kv_tokens"
            )
        return self.pages.for_tokens(reserve)

    def check(self, device: bool = False) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself, or (`device`) the device.

        With `device` it waits for the device, and fetches the small vectors, slot 0 and ring row 0.
        """
        check_books(self.requests, self.pages, self.prefixes)
        if device:
            check_device(
                self.state, self.requests, [self.table_row(self._held(r)) for r in range(self.config.max_requests)]
            )

    def _held(self, request: int) -> Sequence[int]:
        return self.pages.held(request) if request in self.live else ()

"""Anything that can happen to a pool whose requests speculate, in any order, in all four layouts.

A model of the pool knows of every request which windows it has read, which rows its steps verified and how many of
them counted. At its end all of its logits must be those of the same request alone in an empty pool that updates in
place and keeps a slot for every row, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gdnjax.state import State, verify_batch
from gdnjax.state.pages import NoRoom, OutOfPages
from gdnjax.state.pool import run_commit_verified
from gdnjax.state.requests import PoolError
from gdnjax.state.snapshot import Snapshot
from tests.helpers import assert_same_bits
from tests.state.pools import bookkeeping, tokens
from tests.state.test_pool_speculation import DRAFTS, GROUPS, Verifier, speculating, verify

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Tokens, and how many of them counted in a verify step; 0 is a window of a prompt.
Event = tuple[tuple[int, ...], int]

PAGES, LIMIT = 13, 40
SHARED = (tokens(9, 50), [*tokens(5, 50), *tokens(6, 51)])


@functools.cache
def alone(events: tuple[Event, ...]) -> np.ndarray:
    """The logits of the last event, in a pool that holds nothing else."""
    if len(events) > 1:
        alone(events[:-1])
    d = DRIVERS.pop(events[:-1], None)
    if d is None:
        d = Verifier(speculating(("in_place", "slots")))
        d.pool.acquire(LIMIT)
        for event in events[:-1]:
            play(d, event)
    logits = play(d, events[-1])
    DRIVERS[events] = d
    return logits


DRIVERS: dict[tuple[Event, ...], Verifier] = {}


def play(d: Verifier, event: Event) -> np.ndarray:
    (request,), (ids, accepted) = d.pool.live, event
    return d.verify({request: ids}, {request: accepted})[request] if accepted else d.walk({request: ids})[request]


@dataclasses.dataclass
class Model:
    """One request: what it has yet to read, what it has done, and the logits of it (None: it came with a prefix)."""

    left: list[int]
    limit: int
    events: list[Event] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray | None] = dataclasses.field(default_factory=list)

    @property
    def read(self) -> list[int]:
        return [token for ids, accepted in self.events for token in (ids[:accepted] if accepted else ids)]

    @property
    def room(self) -> int:
        return self.limit - len(self.read) - len(self.left)

    def copy(self, **changes: Any) -> Model:
        return dataclasses.replace(
            self, left=list(self.left), events=list(self.events), logits=list(self.logits), **changes
        )


class SpeculatingMachine(RuleBasedStateMachine):
    design = ("twin", "record")

    @initialize()
    def begin(self) -> None:
        self.d = Verifier(speculating(self.design), pages=PAGES, snapshots=2)
        self.live: dict[int, Model] = {}
        # Of a step that is not committed, or that the device has committed: rows, what will count, and logits.
        self.pending: dict[int, tuple[tuple[int, ...], int, np.ndarray]] = {}
        self.moved = False
        self.saved: list[tuple[Snapshot, Model]] = []

    # Admission

    def admit(self, call: Any, model: Model) -> int | None:
        before = bookkeeping(self.d.pool)
        try:
            request = call()
        except NoRoom:
            assert bookkeeping(self.d.pool) == before
            return None
        assert request not in self.live
        self.live[request] = model
        return request

    @rule(shared=st.integers(0, 1), tail=st.integers(0, 6), extra=st.integers(1, 20), full=st.booleans())
    def acquire(self, shared: int, tail: int, extra: int, full: bool) -> None:
        prompt = [*SHARED[shared], *tokens(tail, tail)]
        model = Model([], len(prompt) + extra)
        reserve = None if full else len(prompt)
        request = self.admit(lambda: self.d.pool.acquire(model.limit, prompt=prompt, reserve=reserve), model)
        if request is not None:
            start = self.d.pool.position(request)
            # Prompts are read a page at a time, so that a prefix is what a lone request reads too.
            model.events = [(tuple(prompt[at : at + 4]), 0) for at in range(0, start, 4)]
            model.logits = [None] * len(model.events)
            model.left = prompt[start:]

    def current(self, request: int, call: Any) -> Any:
        """What needs a request's current state; refused where that is not there."""
        if request in self.pending and (self.moved or self.design[0] == "in_place"):
            before = bookkeeping(self.d.pool)
            with pytest.raises(PoolError):
                call()
            assert bookkeeping(self.d.pool) == before
            return None
        return call()

    @precondition(lambda self: 0 < len(self.live) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        self.current(request, lambda: self.admit(lambda: self.d.pool.fork(request), self.live[request].copy()))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        if self.live[request].events:
            taken = self.current(request, lambda: self.d.pool.snapshot(request))
            self.saved = [*self.saved[-1:], (taken, self.live[request].copy())] if taken else self.saved

    @precondition(lambda self: self.saved and len(self.live) < 3)
    @rule(extra=st.integers(1, 12))
    def restore(self, extra: int) -> None:
        taken, model = self.saved[0]
        limit = min(LIMIT, taken.position + len(model.left) + extra)
        self.admit(lambda: self.d.pool.restore(taken, limit), model.copy(limit=limit))

    # Steps

    @precondition(lambda self: self.waiting())
    @rule(seed=st.integers(0, 999))
    def walk(self, seed: int) -> None:
        self.one_walk(np.random.default_rng(seed))

    def one_walk(self, rng: np.random.Generator) -> None:
        chosen = rng.permutation(self.waiting())[: rng.integers(1, 4)]
        pieces = {int(r): tuple(self.live[r].left[:4]) for r in chosen}
        logits = self.or_preempt(lambda: self.d.walk(pieces))
        for r in pieces if logits else ():
            model = self.live[r]
            model.events.append((pieces[r], 0))
            model.logits.append(logits[r])
            del model.left[: len(pieces[r])]
            # What a step has verified a lone request would read in windows, which gives other bits.
            if len(model.read) % 4 == 0 and not any(accepted for _, accepted in model.events):
                self.d.pool.remember(r, model.read)

    @precondition(lambda self: not self.pending and any(m.left or m.room for m in self.live.values()))
    @rule(seed=st.integers(0, 999), end=st.sampled_from(["pending", "device"]))
    def verify(self, seed: int, end: str) -> None:
        """A step that others may come in between of before it counts."""
        rng = np.random.default_rng(seed)
        for _ in range(6):
            if self.waiting() and not self.ready():
                self.one_walk(rng)
        if self.ready():
            self.one_step(rng, end)

    @precondition(lambda self: self.live)
    @rule(seed=st.integers(0, 999), turns=st.integers(2, 8))
    def serve(self, seed: int, turns: int) -> None:
        """As an engine goes on: steps of some, windows of some."""
        rng = np.random.default_rng(seed)
        if self.pending:
            self.resolve(True)
        for _ in range(turns):
            if self.ready():
                self.one_step(rng, "commit")
            if self.waiting():
                self.one_walk(rng)

    def one_step(self, rng: np.random.Generator, end: str) -> None:
        pool, d = self.d.pool, self.d
        chosen = [int(r) for r in rng.permutation(self.ready())[: rng.integers(1, 4)]]
        most = {r: min(DRAFTS + 1, self.live[r].room) for r in chosen}
        rows = {r: tuple(int(i) for i in rng.integers(0, 32, rng.integers(1, most[r] + 1))) for r in chosen}
        # Out of range too: taken for the nearest that can be.
        counted = {r: int(rng.integers(-1, DRAFTS + 4)) for r in chosen}
        if end == "device":
            vector = np.zeros(d.config.max_requests, np.int32)
            vector[list(counted)] = list(counted.values())

            def step(state: State) -> tuple[Any, State]:
                logits, state = verify(d.params, state, verify_batch(d.config, rows, GROUPS))
                return logits, run_commit_verified(state, vector)

            def on_device() -> dict[int, np.ndarray]:
                found = np.asarray(pool.run(pool.plan_verify({r: len(x) for r, x in rows.items()}), step, "some"))
                return {r: found[i, : len(x)] for i, (r, x) in enumerate(rows.items())}

            logits = self.or_preempt(on_device)
        else:
            logits = self.or_preempt(lambda: d.verify(rows, commit=False))
        if not logits:
            return
        taken = {r: max(1, min(counted[r], len(x))) for r, x in rows.items()}
        self.pending = {r: (x, taken[r], logits[r]) for r, x in rows.items()}
        self.moved, self.counted = end == "device", counted
        if end == "commit":
            self.resolve(True)

    @precondition(lambda self: self.pending)
    @rule(commit=st.booleans())
    def resolve(self, commit: bool) -> None:
        if not commit and not self.moved and self.design[0] == "twin":
            self.d.pool.discard()
            self.pending = {}
            return
        if not commit:
            with pytest.raises(PoolError):
                self.d.pool.discard()
        self.d.pool.commit({r: self.counted[r] for r in self.pending}, on_device=self.moved)
        for r, (ids, accepted, logits) in self.pending.items():
            self.live[r].events.append((ids, accepted))
            self.live[r].logits.append(logits)
        self.pending = {}
        self.d.pool.check(device=True)

    @precondition(lambda self: self.ready() and not self.pending)
    @rule(data=st.data(), count=st.integers(1, 6))
    def read_on(self, data: st.DataObject, count: int) -> None:
        """More of a prompt for a request that has verified rows: what another turn of a chat is."""
        model = self.live[data.draw(st.sampled_from(self.ready()))]
        model.left = tokens(min(count, model.room), count)

    def waiting(self) -> list[int]:
        return [r for r, m in self.live.items() if m.left and r not in self.pending]

    def ready(self) -> list[int]:
        return [r for r, m in self.live.items() if not m.left and m.room and m.events]

    def or_preempt(self, step: Any) -> Any:
        before = bookkeeping(self.d.pool)
        try:
            return step()
        except OutOfPages:
            assert bookkeeping(self.d.pool) == before
            self.reset(max(self.live))
            return None

    # Ends

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        self.compare(request)
        self.d.pool.release(request)
        del self.live[request]
        self.pending.pop(request, None)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.reset(data.draw(st.sampled_from(sorted(self.live))))

    def reset(self, request: int) -> None:
        self.compare(request)
        self.d.pool.reset(request)
        self.pending.pop(request, None)
        model = self.live[request]
        # It reads again what it had, verified tokens too, as one prompt.
        model.left = [*model.read, *model.left]
        model.events, model.logits = [], []

    def compare(self, request: int) -> None:
        model = self.live[request]
        assert self.d.pool.position(request) == len(model.read)
        for number, logits in enumerate(model.logits, 1):
            if logits is not None:
                assert_same_bits(logits, alone(tuple(model.events[:number])), f"request {request}, event {number}")

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        pool = self.d.pool
        assert set(pool.live) == set(self.live)
        if self.pending:
            self.resolve(True)
        pool.check(device=True)
        for request in list(self.live):
            self.compare(request)
            pool.release(request)
        pool.check(device=True)
        assert (pool.requests.free, pool.pages.free + pool.pages.idle) == (3, PAGES)
        assert not any(np.any(x) for x in pool.state.recurrent)


class TwinSlots(SpeculatingMachine):
    design = ("twin", "slots")


class InPlaceRecord(SpeculatingMachine):
    design = ("in_place", "record")


class InPlaceSlots(SpeculatingMachine):
    design = ("in_place", "slots")


def case(machine: type[SpeculatingMachine], examples: int) -> Any:
    found: Any = machine.TestCase
    found.settings = settings(max_examples=examples, stateful_step_count=40, deadline=None)
    return found


TestTwinRecord = case(SpeculatingMachine, 40)
TestTwinSlots = case(TwinSlots, 15)
TestInPlaceRecord = case(InPlaceRecord, 20)
TestInPlaceSlots = case(InPlaceSlots, 8)

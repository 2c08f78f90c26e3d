"""Anything that can happen to a pool, in any order, against a model of it.

The model knows of every request which windows and which single tokens it has read. At its end all of its
logits must be those of the same request alone in an empty pool, bit for bit.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gdnjax.state.pages import NoRoom, OutOfPages
from gdnjax.state.requests import PoolFull
from gdnjax.state.snapshot import Snapshot
from tests.helpers import assert_same_bits
from tests.state.pools import Driver, bookkeeping, micro, tokens

# What a request has read: one window (a tuple), or the token of one decode step.
Event = tuple[int, ...] | int

PAGES = 13
SHARED = (tokens(9, 50), [*tokens(5, 50), *tokens(6, 51)])


@functools.cache
def alone(layout: str, events: tuple[Event, ...]) -> np.ndarray:
    """The logits behind the last event, in a pool that holds nothing else."""
    if len(events) == 1:
        d = Driver(micro(layout))
        d.pool.acquire(40)
    else:
        alone(layout, events[:-1])
        d = DRIVERS.pop((layout, events[:-1]), None) or replay(layout, events[:-1])
    logits = play(d, events[-1])
    DRIVERS[layout, events] = d
    return logits


DRIVERS: dict[tuple[str, tuple[Event, ...]], Driver] = {}


def replay(layout: str, events: tuple[Event, ...]) -> Driver:
    d = Driver(micro(layout))
    d.pool.acquire(40)
    for event in events:
        play(d, event)
    return d


def play(d: Driver, event: Event) -> np.ndarray:
    (request,) = d.pool.live
    return d.step({request: event})[request] if isinstance(event, int) else d.walk({request: event})[request]


@dataclasses.dataclass
class Model:
    """One request: what it shall read, what it has read, and the logits behind each event (None: not seen,
    it came with a prefix)."""

    prompt: list[int]
    limit: int
    events: list[Event] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray | None] = dataclasses.field(default_factory=list)

    @property
    def read(self) -> list[int]:
        return [token for event in self.events for token in ([event] if isinstance(event, int) else event)]

    @property
    def left(self) -> list[int]:
        return self.prompt[len(self.read) :]

    def copy(self, **changes: Any) -> Model:
        return dataclasses.replace(self, events=list(self.events), logits=list(self.logits), **changes)


class PoolMachine(RuleBasedStateMachine):
    layout = "twin"

    @initialize()
    def begin(self) -> None:
        self.d = Driver(micro(self.layout), pages=PAGES, snapshots=2)
        self.live: dict[int, Model] = {}
        self.pending: dict[int, tuple[int, np.ndarray]] = {}
        self.saved: list[tuple[Snapshot, Model]] = []
        self.began = 0

    # Admission

    def admit(self, call: Any, model: Model) -> int | None:
        before = bookkeeping(self.d.pool)
        free = self.d.pool.requests.free
        try:
            request = call()
        except NoRoom as error:
            assert bookkeeping(self.d.pool) == before
            assert isinstance(error, PoolFull) == (free == 0)
            return None
        assert free > 0 and request not in self.live
        self.live[request] = model
        return request

    @rule(shared=st.integers(0, 1), tail=st.integers(0, 6), extra=st.integers(1, 10), full=st.booleans())
    def acquire(self, shared: int, tail: int, extra: int, full: bool) -> None:
        prompt = [*SHARED[shared], *tokens(tail, tail)]
        model = Model(prompt, len(prompt) + extra)
        reserve = None if full else len(prompt)
        request = self.admit(lambda: self.d.pool.acquire(model.limit, prompt=prompt, reserve=reserve), model)
        if request is not None:
            start = self.d.pool.position(request)
            # Prompts are read a page at a time, so that a prefix is what a lone request reads too.
            model.events = [tuple(prompt[at : at + 4]) for at in range(0, start, 4)]
            model.logits = [None] * len(model.events)

    @precondition(lambda self: 0 < len(self.live) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        if self.layout == "twin" or request not in self.pending:
            self.admit(lambda: self.d.pool.fork(request), self.live[request].copy())

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.live)))
        if self.live[request].events and (self.layout == "twin" or request not in self.pending):
            self.saved = [*self.saved[-1:], (self.d.pool.snapshot(request), self.live[request].copy())]

    @precondition(lambda self: self.saved and len(self.live) < 3)
    @rule(extra=st.integers(1, 8))
    def restore(self, extra: int) -> None:
        taken, model = self.saved[0]
        limit = min(40, max(taken.position, len(model.prompt)) + extra)
        self.admit(lambda: self.d.pool.restore(taken, limit), model.copy(limit=limit))

    # Steps

    @precondition(lambda self: any(m.left for r, m in self.live.items() if r not in self.pending))
    @rule(data=st.data(), windows=st.sampled_from([1, 4, 4]))
    def walk(self, data: st.DataObject, windows: int) -> None:
        waiting = [r for r, m in self.live.items() if m.left and r not in self.pending]
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        for _ in range(windows):
            self.window([r for r in chosen if self.live[r].left])

    def window(self, chosen: list[int]) -> None:
        pieces = {r: tuple(self.live[r].left[:4]) for r in chosen}
        logits = self.or_preempt(lambda: self.d.walk(pieces)) if pieces else None
        for r in pieces if logits else ():
            model = self.live[r]
            model.events.append(pieces[r])
            model.logits.append(logits[r])
            if len(model.read) % 4 == 0:
                self.d.pool.remember(r, model.read)

    @precondition(lambda self: not self.pending and any(self.ready()))
    @rule(data=st.data(), commit=st.booleans(), other=st.integers(0, 9), steps=st.integers(1, 4))
    def step(self, data: st.DataObject, commit: bool, other: int, steps: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.ready()), min_size=1, unique=True))
        for number in range(1, steps + 1):
            if now := [r for r in chosen if r in self.ready()]:
                self.one_step(now, commit or number < steps, other)

    def one_step(self, chosen: list[int], commit: bool, other: int) -> None:
        # Mostly the likeliest token; sometimes another, so that forks part.
        ids = {r: other if other < 3 else int(self.last(r).argmax()) for r in chosen}
        logits = self.or_preempt(lambda: self.d.step(ids, commit=commit))
        self.pending = {r: (ids[r], logits[r]) for r in ids} if logits else {}
        if commit:
            self.take()

    @precondition(lambda self: self.pending)
    @rule(commit=st.booleans())
    def resolve(self, commit: bool) -> None:
        if commit or self.layout == "in_place":
            self.d.pool.commit()
            self.take()
        else:
            self.d.pool.discard()
            self.pending = {}

    def ready(self) -> list[int]:
        return [r for r, m in self.live.items() if not m.left and len(m.read) < m.limit and self.last(r) is not None]

    def last(self, request: int) -> Any:
        return self.live[request].logits[-1]

    def take(self) -> None:
        for r, (token, logits) in self.pending.items():
            self.live[r].events.append(token)
            self.live[r].logits.append(logits)
        self.pending = {}

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
        # It reads again what it had, generated tokens too, as one prompt.
        model.prompt = [*model.read, *model.left]
        model.events, model.logits = [], []

    def compare(self, request: int) -> None:
        model = self.live[request]
        assert self.d.pool.position(request) == len(model.read)
        for number, logits in enumerate(model.logits, 1):
            if logits is not None:
                assert_same_bits(logits, alone(self.layout, tuple(model.events[:number])), f"request {request}")

    def teardown(self) -> None:
        if not hasattr(self, "d"):
            return
        pool = self.d.pool
        assert set(pool.live) == set(self.live)
        pool.check(device=True)
        for request in list(self.live):
            self.compare(request)
            pool.release(request)
        pool.check(device=True)
        assert (pool.requests.free, pool.pages.free + pool.pages.idle) == (3, PAGES)
        assert not any(np.any(x) for x in pool.state.recurrent)
        pool.prefixes.clear()
        assert pool.pages.free == PAGES


class InPlaceMachine(PoolMachine):
    layout = "in_place"


TestTwin = PoolMachine.TestCase
TestTwin.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestInPlace = InPlaceMachine.TestCase
TestInPlace.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)

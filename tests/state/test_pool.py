"""The pool of requests: slots, plans, commit and discard, forks, snapshots, refusals, transactions."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import ConfigError
from gdnjax.model import decode_step, prefill
from gdnjax.model.backend import BACKEND
from gdnjax.state import State
from gdnjax.state import device as on_device
from gdnjax.state.backend import Backend
from gdnjax.state.pages import NoRoom, OutOfPages
from gdnjax.state.pool import StatePool, run_commit
from gdnjax.state.requests import PoolError, PoolFull
from tests.helpers import LAYOUTS, assert_same_bits, host_copy
from tests.state.pools import MICRO, Driver, bookkeeping, micro, tokens


def poison(pool: StatePool) -> None:
    """NaN in every slot but 0, in every ring row but 0, in every page."""
    nan = lambda arrays: tuple(jnp.full_like(x, jnp.nan).at[0].set(0) for x in arrays)  # noqa: E731
    pool._state = dataclasses.replace(
        pool.state,
        recurrent=nan(pool.state.recurrent),
        conv=nan(pool.state.conv),
        keys=nan(pool.state.keys),
        values=nan(pool.state.values),
    )


def assert_equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert_same_bits(found[name], values, name)


def slots_of(pool: StatePool, request: int) -> list[np.ndarray]:
    """Both slots of a request in every layer."""
    slots = [pool.requests.read[request], pool.requests.write[request]]
    return [np.array(recurrent)[slots] for recurrent in pool.state.recurrent]


# Slots


@pytest.mark.parametrize("layout", LAYOUTS)
def test_max_requests_counts_requests_and_slot_0_is_nobodys(layout: str) -> None:
    pool = StatePool(micro(layout))
    requests = [pool.acquire(8) for _ in range(3)]
    assert sorted(requests) == [0, 1, 2]
    with pytest.raises(PoolFull, match="all max_requests = 3 requests are live; wait for one to end"):
        pool.acquire(8)
    plan = pool.plan_decode(requests)
    owned = {*plan.read_slots, *plan.write_slots}
    assert 0 not in owned
    assert owned == set(range(1, 7 if layout == "twin" else 4))
    assert all(x.shape[0] == len(owned) + 1 for x in pool.state.recurrent)
    pool.release(requests[1])
    assert pool.acquire(8) == requests[1]


def test_a_step_reads_one_slot_and_writes_the_other_and_commit_swaps_them() -> None:
    d = Driver(micro())
    r = d.start(tokens(5))
    plan = d.pool.plan_decode([r])
    assert plan.positions == (5,) and plan.read_slots != plan.write_slots
    before = [np.array(pool[plan.read_slots[0]]) for pool in d.pool.state.recurrent]
    d.step({r: 3}, commit=False)
    for pool, kept in zip(d.pool.state.recurrent, before, strict=True):
        assert_same_bits(pool[plan.read_slots[0]], kept, "the slot that was read")
        assert not np.array_equal(pool[plan.write_slots[0]], kept)
    written = [np.array(pool[plan.write_slots[0]]) for pool in d.pool.state.recurrent]
    assert (d.pool.position(r), d.pool.pending) == (5, (r,))
    d.pool.commit()

    after = d.pool.plan_decode([r])
    assert after.positions == (6,)
    assert (after.read_slots, after.write_slots) == (plan.write_slots, plan.read_slots)
    # what the next plan reads is what that step wrote, here and on the device
    assert int(d.pool.state.read_slot[r]) == after.read_slots[0]
    for i, kept in enumerate(written):
        assert_same_bits(d.current(r)[f"recurrent {i}"], kept)
    d.pool.check(device=True)


def test_walks_stay_in_place_and_only_decode_steps_write_the_twin() -> None:
    d = Driver(micro())
    r = d.start(tokens(5))
    plan = d.pool.plan_walk({r: 7})
    assert plan.keep_in_place and plan.read_slots == plan.write_slots
    twin = d.pool.requests.write[r]
    before = [np.array(pool) for pool in d.pool.state.recurrent]
    for piece in (tokens(7, 1), tokens(2, 2)):  # a walk and a window of a split one
        d.walk({r: piece})
    for pool, kept in zip(d.pool.state.recurrent, before, strict=True):
        changed = np.flatnonzero((np.asarray(pool) != kept).any(axis=(1, 2, 3)))
        assert changed.tolist() == list(plan.read_slots)
        assert not np.any(pool[twin])
    assert d.pool.requests.write[r] == twin
    d.step({r: 3})
    assert all(np.any(pool[twin]) for pool in d.pool.state.recurrent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_and_other_requests_keep_every_bit(layout: str) -> None:
    d = Driver(micro(layout))
    poison(d.pool)
    r, other = d.start(tokens(5)), d.start(tokens(6, 1))
    before = host_copy(d.pool.state)
    d.step({r: 3})
    own = {*(d.pool.requests.read[r : r + 1]), *(d.pool.requests.write[r : r + 1])}
    for pool, kept in zip(d.pool.state.recurrent, before.recurrent, strict=True):
        others = [slot for slot in range(len(kept)) if slot not in own]
        assert_same_bits(np.asarray(pool)[others], kept[others], "slots")
    for ring, kept in zip(d.pool.state.conv, before.conv, strict=True):
        others = [row for row in range(len(kept)) if row != r + 1]
        assert_same_bits(np.asarray(ring)[others], kept[others], "rings")
    cell = d.pool.pages.held(r)[1] * 4 + 1  # position 5
    for cache, kept in zip(d.pool.state.keys, before.keys, strict=True):
        assert_same_bits(np.delete(np.asarray(cache), cell, 0), np.delete(kept, cell, 0), "keys")
    assert d.pool.position(other) == 6


# Discard, reset, release


@pytest.mark.newest
def test_discard_leaves_the_current_state_bit_for_bit() -> None:
    d = Driver(micro())
    r, s = d.start(tokens(5)), d.start(tokens(7, 1))
    before = {x: d.current(x) for x in (r, s)}
    first = d.step({r: 3, s: 4}, commit=False)
    d.pool.discard()
    assert d.pool.pending == () and d.pool.position(r) == 5
    for x, kept in before.items():
        found = d.current(x)
        # The oldest column of a window is the one that the next position takes.
        for name, values in kept.items():
            cut = (slice(None), slice(1, None)) if name.startswith("window") else ()
            assert_same_bits(found[name][cut], values[cut], name)
    d.step({r: 9, s: 9}, commit=False)  # another one, dropped too
    d.pool.discard()
    again = d.step({r: 3, s: 4})
    straight = Driver(micro())
    assert (straight.start(tokens(5)), straight.start(tokens(7, 1))) == (r, s)
    wanted = straight.step({r: 3, s: 4})
    for x in (r, s):
        assert_same_bits(again[x], first[x])
        assert_same_bits(again[x], wanted[x])
        assert_equal(d.current(x), straight.current(x))


def test_in_place_cannot_discard() -> None:
    d = Driver(micro("in_place"))
    r = d.start(tokens(5))
    d.pool.discard()  # nothing has run
    d.step({r: 3}, commit=False)
    before = bookkeeping(d.pool)
    for call in (d.pool.discard, lambda: d.pool.fork(r), lambda: d.pool.snapshot(r)):
        with pytest.raises(PoolError, match="has updated its state in place; commit it first, or use state_layout"):
            call()
    assert bookkeeping(d.pool) == before
    d.pool.commit()
    d.pool.fork(r)


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("call", ["reset", "release"])
def test_reset_and_release_zero_both_slots(call: str, layout: str) -> None:
    d = Driver(micro(layout))
    r, other = d.start(tokens(5)), d.start(tokens(6, 1))
    d.feed(r, [3, 4])
    d.step({r: 5, other: 5}, commit=False)
    kept = slots_of(d.pool, other)
    assert all(np.all(np.any(x, axis=(1, 2, 3))) for x in slots_of(d.pool, r))
    getattr(d.pool, call)(r)
    assert not any(np.any(x) for x in slots_of(d.pool, r))
    for found, wanted in zip(slots_of(d.pool, other), kept, strict=True):
        assert_same_bits(found, wanted)
    assert d.pool.pending == (other,)
    assert (r in d.pool.live) == (call == "reset")
    d.pool.commit()
    d.pool.check(device=True)
    assert d.pool.position(other) == 7


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_without_state_reads_as_zero(layout: str) -> None:
    clean, dirty = Driver(micro(layout)), Driver(micro(layout))
    poison(dirty.pool)
    r = clean.pool.acquire(20)
    assert dirty.pool.acquire(20) == r
    # begins by a decode step, or by a walk
    assert_same_bits(dirty.step({r: 3})[r], clean.step({r: 3})[r])
    a, b = clean.pool.acquire(20), dirty.pool.acquire(20)
    assert_same_bits(dirty.walk({b: tokens(6)})[b], clean.walk({a: tokens(6)})[a])
    # and so does a fork of one that has no tokens yet, into slots that held something
    dirty.pool.release(b)
    poison(dirty.pool)
    clean.pool.release(a)
    a, b = (d.pool.fork(d.pool.acquire(20)) for d in (clean, dirty))
    assert_same_bits(dirty.step({b: 7})[b], clean.step({a: 7})[a])


# Forks and snapshots


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fork_takes_the_current_slot_the_ring_and_the_position(layout: str) -> None:
    d, alone = Driver(micro(layout)), Driver(micro(layout))
    r, s = d.start(tokens(5)), alone.start(tokens(5))
    # an odd number of steps: the current slot is not the one the request began with
    for token in (3, 9, 1):
        assert_same_bits(d.step({r: token})[r], alone.step({s: token})[s])
    child = d.pool.fork(r)
    assert d.pool.position(child) == 8
    assert_equal(d.current(child), alone.current(s))
    # Both go on, with other tokens, over the page that they share; the child is what the lone one is.
    for mine, theirs in ((4, 20), (5, 21), (6, 22)):
        logits = d.step({child: mine, r: theirs})
        assert_same_bits(logits[child], alone.step({s: mine})[s])
    assert_equal(d.current(child), alone.current(s))
    again = Driver(micro(layout))
    t = again.start(tokens(5))
    again.feed(t, [3, 9, 1, 20, 21, 22])
    assert_equal(d.current(r), again.current(t))
    d.pool.release(r)
    assert_equal(d.current(child), alone.current(s))
    d.pool.check(device=True)


def test_a_fork_shares_pages_and_copies_the_one_that_is_written() -> None:
    d = Driver(micro())
    r = d.start(tokens(6))  # a full page and half of one
    child, third = d.pool.fork(r, limit=8), d.pool.fork(r, limit=8)
    assert d.pool.pages.held(child) == d.pool.pages.held(r)[:2] == d.pool.pages.held(third)
    free = d.pool.pages.free
    d.step({child: 1})
    held = d.pool.pages.held
    assert held(child)[0] == held(r)[0] and held(child)[1] != held(r)[1] == held(third)[1]
    d.step({r: 1, third: 2})
    # three requests, three half pages, one of them the first
    assert len({held(x)[1] for x in (r, child, third)}) == 3
    assert d.pool.pages.free == free - 2


def test_a_step_that_is_not_committed_is_not_forked() -> None:
    for length in (7, 8):  # the pending token in a page that is there, and in a new one
        d, alone = Driver(micro()), Driver(micro())
        r, s = d.start(tokens(length)), alone.start(tokens(length))
        d.step({r: 3}, commit=False)
        child = d.pool.fork(r)
        taken = d.pool.snapshot(r)
        d.pool.commit()
        assert (d.pool.position(r), d.pool.position(child), taken.position) == (length + 1, length, length)
        restored = d.pool.restore(taken, 40, reserve=20)
        wanted = alone.feed(s, [11, 12])
        for x in (child, restored):
            for found, logits in zip(d.feed(x, [11, 12]), wanted, strict=True):
                assert_same_bits(found, logits)
            assert_equal(d.current(x), alone.current(s))
        d.feed(r, [4])
        straight = Driver(micro())
        t = straight.start(tokens(length))
        straight.feed(t, [3, 4])
        assert_equal(d.current(r), straight.current(t))


# Refusals


def test_a_backend_that_updates_in_place_refuses_twin_slots() -> None:
    only = Backend("elsewhere", prefill, decode_step, layouts=("in_place",))
    with pytest.raises(ConfigError, match=r"state_layout = 'twin'; the backend 'elsewhere' takes 'in_place': .*use an"):
        StatePool(micro("twin"), backend=only)
    StatePool(micro("in_place"), backend=only)
    for layout in LAYOUTS:
        StatePool(micro(layout), backend=BACKEND)


def test_calls_that_make_no_sense_are_refused() -> None:
    d = Driver(micro())
    r = d.pool.acquire(8)
    stale = d.pool.plan_walk({r: 3})
    d.walk({r: tokens(3)})
    lost = lambda _: pytest.fail("it ran")  # noqa: E731
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: d.pool.acquire(0), ValueError, r"limit = 0; it takes 1 "),
        (lambda: d.pool.acquire(41), ValueError, r"limit = 41; it takes 1 .* to max_length = 40"),
        (lambda: d.pool.acquire(8, reserve=9), ValueError, r"reserve = 9; it takes 0 to limit = 8"),
        (lambda: d.pool.acquire(8, prompt=tokens(9)), ValueError, r"limit = 8; it takes 9 "),
        (lambda: d.pool.fork(r, limit=2), ValueError, r"limit = 2; it takes 3 "),
        (lambda: d.pool.fork(2), PoolError, r"request 2 is not live; live requests: \[0\]"),
        (lambda: d.pool.release(1), PoolError, r"request 1 is not live"),
        (lambda: d.pool.reset(-1), PoolError, r"request -1 is not live"),
        (lambda: d.pool.plan_decode([]), ValueError, r"at least one token of one request"),
        (lambda: d.pool.plan_decode([r, r]), ValueError, r"takes each request once"),
        (lambda: d.pool.plan_walk({r: 0}), ValueError, r"at least one token of one request"),
        (lambda: d.pool.plan_walk({r: 6}), ValueError, r"has 3 tokens and would get 6 more; its limit is 8"),
        (lambda: d.pool.plan_walk({r: 17}), ValueError, r"17 tokens; it takes at most prefill_tokens = 16"),
        (lambda: d.pool.run(stale, lost), PoolError, r"the plan is out of date for request 0; plan again"),
        (lambda: d.pool.remember(r, tokens(3)), ValueError, r"has read 3 tokens, given 3; .* page_size = 4"),
        (lambda: d.pool.plan_decode([r]).rows(0), ValueError, r"1 tokens in 0 rows"),
    ]
    before = bookkeeping(d.pool)
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
        assert bookkeeping(d.pool) == before, message

    decode = d.pool.plan_decode([r])
    with pytest.raises(PoolError, match="one step takes each request once"):
        d.pool.run([decode, d.pool.plan_walk({r: 1})], lost)
    d.step({r: 3}, commit=False)
    for call in (lambda: d.pool.plan_decode([r]), lambda: d.pool.plan_walk({r: 1})):
        with pytest.raises(PoolError, match=r"not committed; commit or discard it first"):
            call()
    other = d.pool.acquire(8)
    with pytest.raises(PoolError, match="two decode steps at once; commit or discard the first"):
        d.pool.run(decode, lost)
    d.walk({other: tokens(2)})  # a walk of others may run meanwhile
    d.pool.commit()
    # a request that was reset is another one than the plan's
    plan = d.pool.plan_walk({other: 1})
    d.pool.release(other)
    assert d.pool.acquire(8) == other
    d.walk({other: tokens(2)})
    with pytest.raises(PoolError, match="out of date for request 1"):
        d.pool.run(plan, lost)
    small = Driver(micro(), pages=4).pool
    with pytest.raises(ValueError, match=r"limit = 17 needs 5 KV pages of 4 tokens, and the cache has 4"):
        small.acquire(17)


# Transactions


def test_a_failure_halfway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(micro())
    r = d.start(tokens(8))
    d.pool.remember(r, tokens(8))
    child = d.pool.fork(r)
    d.step({r: 1, child: 2})
    third = d.pool.fork(child)  # shares a page that is not full: the next step copies it
    d.pool.release(r)
    taken = d.pool.snapshot(child)

    def fails(*_: Any) -> Any:
        raise MemoryError("no memory")

    calls = {
        "run_clear": [lambda: d.pool.release(child), lambda: d.pool.reset(child)],
        "run_fork": [lambda: d.pool.fork(child)],
        "run_place": [lambda: d.pool.restore(taken, 10)],
        "run_write_pages": [lambda: d.pool.restore(taken, 10)],
        "run_resume": [lambda: d.pool.acquire(20, prompt=tokens(12))],
        "run_copy_pages": [lambda: d.pool.plan_decode([child, third])],
        "run_write_table": [lambda: d.pool.plan_decode([child, third]), lambda: d.pool.plan_walk({third: 8})],
        "run_discard": [d.pool.discard],
    }
    before, arrays = bookkeeping(d.pool), d.current(child)
    for name, failing in calls.items():
        for call in failing:
            with monkeypatch.context() as patch:
                patch.setattr(on_device, name, fails)
                with pytest.raises(MemoryError):
                    call()
            assert bookkeeping(d.pool) == before, name
            assert_equal(d.current(child), arrays)
            d.pool.check(device=True)
    plan = d.pool.plan_decode([child])
    before = bookkeeping(d.pool)
    with pytest.raises(MemoryError):
        d.pool.run(plan, fails)
    assert bookkeeping(d.pool) == before
    # and everything still works
    d.step({child: 3, third: 4})
    d.walk({third: tokens(4)})
    with monkeypatch.context() as patch:
        patch.setattr(on_device, "run_store", fails)
        d.walk({third: tokens(2)})
        before = bookkeeping(d.pool)
        with pytest.raises(MemoryError):
            d.pool.remember(third, [*tokens(8), 2, 4, *tokens(4), *tokens(2)])
        assert bookkeeping(d.pool) == before


def test_a_state_lost_in_a_failed_step_is_named() -> None:
    d = Driver(micro())
    r = d.pool.acquire(8)

    def takes_and_fails(state: State) -> Any:
        run_commit(state)
        raise MemoryError("no memory")

    with pytest.raises(MemoryError):
        d.pool.run(d.pool.plan_decode([r]), takes_and_fails)
    with pytest.raises(PoolError, match=r"the state was lost in a step that failed .*; build a new pool"):
        d.walk({r: [1]})


def test_out_of_pages_in_the_middle_of_a_plan() -> None:
    d = Driver(micro(), pages=6)
    requests = [d.start(tokens(4, i), limit=16, reserve=4) for i in range(3)]
    d.step(dict.fromkeys(requests[:2], 1))
    d.feed(requests[0], [2, 3, 4])
    before = bookkeeping(d.pool)
    # two want a new page, one page is left
    with pytest.raises(OutOfPages, match=r"2 KV pages of 4 tokens wanted, 1 of 6 are free") as caught:
        d.step({requests[1]: 5, requests[0]: 5, requests[2]: 5})
    assert caught.value.short == 1
    assert bookkeeping(d.pool) == before
    d.pool.check(device=True)
    d.pool.reset(requests[1])
    d.step({requests[0]: 5, requests[2]: 5})


# Many requests on few


@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_requests_on_three(layout: str) -> None:
    d = Driver(micro(layout), pages=9)
    waiting = [(tokens(3 + i, i), 2 + i) for i in range(5)]  # prompts, new tokens
    alone: dict[int, list[int]] = {}
    for i, (prompt, count) in enumerate(waiting):
        lone = Driver(micro(layout))
        r = lone.pool.acquire(40)
        last = lone.walk({r: prompt})[r]
        alone[i] = [int(last.argmax())]
        while len(alone[i]) < count:
            last = lone.step({r: alone[i][-1]})[r]
            alone[i].append(int(last.argmax()))
    queue, running, done, most, refused = list(range(5)), {}, {}, 0, 0
    while queue or running:
        while queue:
            prompt, count = waiting[queue[0]]
            try:
                r = d.pool.acquire(len(prompt) + count)
            except NoRoom:
                refused += 1
                break
            running[r] = (queue.pop(0), [int(d.walk({r: prompt})[r].argmax())])
        most = max(most, len(running))
        for r, (i, out) in list(running.items()):
            if len(out) == waiting[i][1]:
                done[i] = out
                d.pool.release(r)
                del running[r]
        if running:
            for r, logits in d.step({r: out[-1] for r, (_, out) in running.items()}).items():
                running[r][1].append(int(logits.argmax()))
    assert done == alone
    assert most == 3 and refused >= 2
    assert (d.pool.requests.free, d.pool.pages.free, d.pool.live) == (3, 9, ())
    assert not any(np.any(x) for x in d.pool.state.recurrent)
    d.pool.check(device=True)


def test_device_memory_is_flat() -> None:
    d = Driver(micro())

    def cycle(i: int) -> None:
        r = d.start(tokens(8, i))
        d.pool.remember(r, tokens(8, i))
        child = d.pool.fork(r)
        d.step({r: 1, child: 2})
        d.step({r: 1}, commit=False)
        d.pool.discard()
        d.pool.release(r)
        again = d.pool.acquire(20, prompt=[*tokens(8, i), 5])
        assert d.pool.position(again) == 8
        for x in (child, again):
            d.pool.release(x)

    def live() -> tuple[int, int]:
        gc.collect()
        arrays = [x for x in jax.live_arrays() if not x.is_deleted()]
        return len(arrays), sum(x.nbytes for x in arrays)

    for i in range(3):
        cycle(i)
    before = live()
    for i in range(20):
        cycle(i)
    assert live() == before
    assert d.pool.requests.free == 3


def test_plans_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    d = Driver(micro())
    r = d.start(tokens(8))
    step, walk = jax.jit(run_nothing), jax.jit(run_nothing)
    monkeypatch.setattr(d.pool, "debug", False)

    def fetched(_: Any) -> Any:
        pytest.fail("a value was fetched from the device")

    monkeypatch.setattr(type(d.pool.state.position), "_value", property(fetched))
    with pytest.raises(pytest.fail.Exception):
        int(d.pool.state.position[0])
    for _ in range(3):
        d.pool.run(d.pool.plan_decode([r]), step)
        d.pool.commit()
    d.pool.run(d.pool.plan_walk({r: 1}), walk)
    d.pool.remember(r, list(range(12)))
    child = d.pool.fork(r)
    d.pool.run(d.pool.plan_decode([child, r]), step)
    d.pool.discard()
    d.pool.reset(child)
    d.pool.release(child)
    assert d.pool.position(d.pool.acquire(20, prompt=[*range(12), 1])) == 12
    assert d.pool.position(r) == 12


def run_nothing(state: State) -> tuple[int, State]:
    return 0, state


def test_debug_mode_checks_after_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(MICRO)
    r = pool.acquire(8)
    pool.requests._free.append(r)
    with pytest.raises(AssertionError, match="numbers of requests"):
        pool.plan_walk({r: 2})
    monkeypatch.setenv("GDNJAX_DEBUG", "0")
    pool = StatePool(MICRO)
    r = pool.acquire(8)
    pool.requests._free.append(r)
    pool.plan_walk({r: 2})
    monkeypatch.setenv("GDNJAX_DEBUG", "yes")
    with pytest.raises(ValueError, match=r"GDNJAX_DEBUG = 'yes'; it takes 0, 1 or 2"):
        StatePool(MICRO)

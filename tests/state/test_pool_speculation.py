"""A pool whose requests speculate: whatever copies, drops or clears one, in all four layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from gdnjax.config import Config, ConfigError
from gdnjax.model import decode_step, prefill, verify_step
from gdnjax.model.backend import BACKEND
from gdnjax.state import State, commit_verified, verify_batch
from gdnjax.state.backend import Backend
from gdnjax.state.pool import PAGES_AHEAD, StatePool
from gdnjax.state.requests import PoolError
from tests.helpers import LAYOUTS, LOGITS, STATES, assert_close
from tests.state.pools import Driver, bookkeeping, micro, micro_params, tokens

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFTS, GROUPS = 3, 3
designs = pytest.mark.parametrize("design", [(x, y) for x in LAYOUTS for y in ("record", "slots")], ids="-".join)


def speculating(design: tuple[str, str], **changes: Any) -> Config:
    return micro(design[0]).replace(speculate=DRAFTS, speculative_state=design[1], **changes)


@jax.jit
def verify(params: Any, state: State, batch: Any) -> tuple[jax.Array, State]:
    logits, _, state = verify_step(params, state, batch)
    return logits, state


class Verifier(Driver):
    def verify(
        self, pieces: Mapping[int, Sequence[int]], accepted: Mapping[int, int] | None = None, commit: bool = True
    ) -> dict[int, np.ndarray]:
        """Candidate rows of each request: their logits."""
        plan = self.pool.plan_verify({r: len(ids) for r, ids in pieces.items()})
        batch = verify_batch(self.config, pieces, GROUPS)
        logits = np.asarray(self.pool.run(plan, lambda state: verify(self.params, state, batch)))
        if commit:
            self.pool.commit(accepted)
        return {r: logits[i, : len(ids)] for i, (r, ids) in enumerate(pieces.items())}


def assert_same(found: Driver, request: int, plain: Driver, other: int) -> None:
    """What two requests' states mean, but for the oldest input, which is not read again."""
    now, wanted = found.current(request), plain.current(other)
    for name, values in wanted.items():
        cut = (slice(None), slice(1, None)) if name.startswith("window") else ()
        assert_close(now[name][cut], values[cut], STATES, name)


@designs
def test_what_is_copied_has_its_rows_replayed(design: tuple[str, str]) -> None:
    d, plain = Verifier(speculating(design)), Driver(micro())
    prompt = tokens(7)
    r, s = d.start(prompt), plain.start(prompt)
    d.verify({r: [1, 2, 3, 4]}, {r: 3})
    plain.feed(s, [1, 2, 3])
    child, twin = d.pool.fork(r), plain.pool.fork(s)
    d.pool.check(device=True)
    assert_same(d, child, plain, twin)
    # Both go on: nobody takes from the other.
    logits = d.verify({child: [7, 8, 9], r: [5, 6]}, {r: 1, child: 2})
    assert_close(logits[r][:1], plain.feed(s, [5]), LOGITS)
    assert_close(logits[child][:2], plain.feed(twin, [7, 8]), LOGITS)

    taken = d.pool.snapshot(r)
    text = [*prompt, 1, 2, 3, 7, 8]
    assert d.pool.remember(child, text)  # at a page's end
    d.pool.check(device=True)
    assert_same(d, r, plain, s)
    assert_same(d, child, plain, twin)
    d.verify({r: [2, 3]})  # what happens afterwards is not in the snapshot
    d.pool.release(r)
    back, there = d.pool.restore(taken, 40), plain.pool.restore(taken, 40)
    heir = d.pool.acquire(40, prompt=[*text, 11])
    assert d.pool.position(heir) == len(text)
    d.pool.check(device=True)
    wanted = plain.feed(s, [9, 10])
    assert_close(d.verify({back: [9, 10]})[back], wanted, LOGITS)
    assert_close(plain.feed(there, [9, 10]), wanted, LOGITS)
    plain.pool.release(there)
    assert_close(d.walk({heir: [11]})[heir], plain.step({twin: 11})[twin], LOGITS)
    assert_same(d, heir, plain, twin)

    # A prefill of a request with rows to replay, and a snapshot that comes from a pool without speculation.
    assert_close(d.walk({back: [4, 5, 6]})[back], plain.walk({s: [4, 5, 6]})[s], LOGITS)
    assert_same(d, back, plain, s)
    d.pool.release(child)
    back = d.pool.restore(plain.pool.snapshot(s), 40)
    d.pool.check(device=True)
    assert_close(d.verify({back: [3, 1, 2]})[back], plain.feed(s, [3, 1, 2]), LOGITS)

    # Cleared with rows to replay, it starts from nothing.
    d.pool.reset(back)
    d.pool.check(device=True)
    d.walk({back: prompt})
    s = plain.start(prompt)
    assert_same(d, back, plain, s)
    for request in d.pool.live:
        d.pool.release(request)
    d.pool.check(device=True)
    assert not any(np.any(x) for x in d.pool.state.recurrent)


@pytest.mark.parametrize("speculative", ["record", "slots"])
def test_a_step_that_is_not_committed(speculative: str) -> None:
    d, plain = Verifier(speculating(("twin", speculative))), Driver(micro())
    r, s = d.start(tokens(6)), plain.start(tokens(6))
    d.verify({r: [1, 2, 3]}, {r: 2})
    plain.feed(s, [1, 2])
    for again in ([9, 9, 9, 9], [8]):
        first = d.verify({r: again}, commit=False)
        d.pool.check(device=True)
        d.pool.discard()
        d.pool.check(device=True)
    assert_close(first[r], plain.feed(plain.pool.fork(s), [8]), LOGITS)
    # Copied while a step is pending, which can then be dropped, or committed.
    for number in range(2):
        d.verify({r: [4, 5, 6]}, commit=False)
        child = d.pool.fork(r)
        assert d.pool.snapshot(r).position == 8
        d.pool.check(device=True)
        assert_same(d, child, plain, s)
        d.pool.release(child)
        if number == 0:
            d.pool.discard()
    d.pool.commit({r: 2})
    d.pool.check(device=True)
    plain.feed(s, [4, 5])
    assert_close(d.verify({r: [7, 1]})[r], plain.feed(s, [7, 1]), LOGITS)
    # Released in the middle of one.
    d.verify({r: [4, 5, 6]}, commit=False)
    d.pool.release(r)
    d.pool.check(device=True)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_step_that_is_pending_while_rows_are_replayed_keeps_its_own(steps: int) -> None:
    # Either half of the record in turn holds the rows of the pending step.
    d, plain = Verifier(speculating(("twin", "record"))), Driver(micro())
    r, s = d.start(tokens(6)), plain.start(tokens(6))
    for _ in range(steps):
        d.verify({r: [1, 2, 3]}, {r: 2})
        plain.feed(s, [1, 2])
    d.verify({r: [4, 5, 6]}, commit=False)
    d.pool.release(d.pool.fork(r))
    d.pool.commit({r: 3})
    d.pool.check(device=True)
    plain.feed(s, [4, 5, 6])
    assert_close(d.verify({r: [7, 1]})[r], plain.feed(s, [7, 1]), LOGITS)


@pytest.mark.parametrize("speculative", ["record", "slots"])
def test_in_place_a_step_cannot_be_dropped(speculative: str) -> None:
    d = Verifier(speculating(("in_place", speculative)))
    r = d.start(tokens(6))
    d.verify({r: [1, 2, 3]}, commit=False)
    before = bookkeeping(d.pool)
    for call in (d.pool.discard, lambda: d.pool.fork(r), lambda: d.pool.snapshot(r)):
        with pytest.raises(PoolError, match="has updated its state in place; commit it first, or use state_layout"):
            call()
    assert bookkeeping(d.pool) == before
    d.pool.commit({r: 2})
    d.pool.fork(r)
    d.pool.check(device=True)


@designs
def test_who_leaves_before_it_is_told_how_many_rows_counted(design: tuple[str, str]) -> None:
    d, plain = Verifier(speculating(design)), Driver(micro())
    requests = [d.start(tokens(5)), d.start(tokens(3)), d.start(tokens(4))]
    s = plain.start(tokens(4))
    pieces = {r: [1, 2, 3] for r in requests}
    plan, batch = d.pool.plan_verify(dict.fromkeys(requests, 3)), verify_batch(d.config, pieces, GROUPS)

    def step(state: State) -> tuple[None, State]:
        _, state = verify(d.params, state, batch)
        return None, commit_verified(state, np.array([3, 2, 2], np.int32))

    d.pool.run(plan, step, commits="some")
    left, again, stays = requests
    for call in (lambda: d.pool.fork(stays), lambda: d.pool.snapshot(stays), d.pool.discard):
        with pytest.raises(PoolError, match="a step that the device has committed; tell how many rows it took"):
            call()
    d.pool.release(left)
    d.pool.reset(again)
    new = d.start(tokens(6))
    assert d.pool.pending == (stays,)
    d.pool.commit({stays: 2}, on_device=True)
    d.pool.check(device=True)
    plain.feed(s, [1, 2])
    assert_close(d.verify({stays: [7, 8]})[stays], plain.feed(s, [7, 8]), LOGITS)
    other = plain.start(tokens(6))
    assert_close(d.verify({new: [9, 10]})[new], plain.feed(other, [9, 10]), LOGITS)
    d.pool.check(device=True)


def test_a_step_that_commits_itself_and_counts_that_cannot_be() -> None:
    d = Verifier(speculating(("twin", "record")))
    r, other = d.start(tokens(5)), d.start(tokens(3))
    plan, batch = d.pool.plan_verify({r: 3}), verify_batch(d.config, {r: [1, 2, 3]}, GROUPS)

    def step(state: State) -> tuple[None, State]:
        _, state = verify(d.params, state, batch)
        return None, commit_verified(state, np.full(3, 2, np.int32))

    d.pool.run(plan, step)
    with pytest.raises(PoolError, match="is not committed; commit or discard it first"):
        d.pool.plan_verify({other: 1})
    for accepted in ({}, {other: 1}, {r: 1, other: 1}):
        with pytest.raises(ValueError, match=rf"it takes a count for each request of the step: \[{r}\]"):
            d.pool.commit(accepted)
    d.pool.commit({r: 2}, on_device=True)
    d.pool.check(device=True)
    assert d.pool.position(r) == 7

    with pytest.raises(ValueError, match=r"counts = \{0: 5\}; a step of a request takes 1 to 4 rows"):
        d.pool.plan_verify({r: 5})
    with pytest.raises(ValueError, match=r"accepted = \{0: 1\} with speculate = 0; a plain step is committed as it is"):
        StatePool(micro()).commit({0: 1})
    with pytest.raises(ValueError, match="speculate = 3, speculative_state = 'record', and no params"):
        StatePool(d.config)
    with pytest.raises(ConfigError, match="speculate = 3; the backend 'elsewhere' takes 0: it cannot verify drafts"):
        StatePool(d.config, Backend("elsewhere", prefill, decode_step), params=micro_params())
    assert StatePool(d.config, BACKEND, params=micro_params()).pending == ()


def test_a_step_may_begin_many_pages() -> None:
    pool = StatePool(speculating(("twin", "slots"), page_size=1, prefill_tokens=1, prefix_cache_bytes=0))
    requests = [pool.acquire(8) for _ in range(3)]
    pool.plan_verify(dict.fromkeys(requests, 4))
    pool.check(device=True)
    # Four that the rows lie in, and what is taken ahead.
    assert [len(pool.pages.held(r)) for r in requests] == [4 + PAGES_AHEAD] * 3
    pool.release(requests[0])
    short = pool.acquire(3)
    with pytest.raises(ValueError, match="would get 4 more; its limit is 3"):
        pool.plan_verify({short: 4})

"""Records in the state: nothing without speculation, replays that give what decoding gives, and who clears them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config, ConfigError
from gdnjax.state import State, commit, commit_verified, init_state, recurrent_state, state_shapes
from gdnjax.state.device import clear, fork
from gdnjax.state.record import replay
from gdnjax.state.speculation import start_speculation, stop_speculation
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_verify import gated_delta_verify
from tests.generation.small import SMALL
from tests.helpers import LAYOUTS, assert_same_bits, host_copy

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROWS = 3
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def serving(layout: str) -> Config:
    return SMALL.replace(
        state_layout=layout,
        num_hidden_layers=3,
        layer_types=("linear_attention", "full_attention", "linear_attention"),
        max_requests=3,
    )


@functools.cache
def params() -> Any:
    """A_log and dt_bias of two layers: all that a replay reads."""
    rng = np.random.default_rng(0)

    def layer() -> Any:
        gates = rng.uniform(-3, 1, 4).astype(np.float32), rng.normal(size=4).astype(np.float32)
        # Not of jax: what is kept may be made first inside a trace.
        return {"linear_attn": dict(zip(("A_log", "dt_bias"), gates, strict=True))}

    return {"model": {"layers": [layer(), None, layer()]}}


def weights(layer: int) -> tuple[np.ndarray, np.ndarray]:
    p = params()["model"]["layers"][2 * layer]["linear_attn"]
    return p["A_log"], p["dt_bias"]


def candidates(seed: int) -> tuple[jax.Array, ...]:
    """qkv, a and b of three candidate rows of each request."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(3 * ROWS, n)), jnp.float32) for n in (128, 4, 4))


REQUEST = jnp.arange(3, dtype=jnp.int32)


@jax.jit
def verify(state: State, rows: tuple[jax.Array, ...], count: jax.Array) -> State:
    """A verify step of the rule alone, not committed."""
    assert state.record is not None
    recurrent, layers = list(state.recurrent), list(state.record.layers)
    for i in range(2):
        _, recurrent[i], layers[i] = gated_delta_verify(
            *(*rows, *weights(i), recurrent[i], layers[i], state.record.recorded, REQUEST),
            *(state.read_slot, state.write_slot, state.position > 0, count),
        )
    record = dataclasses.replace(state.record, layers=tuple(layers))
    return dataclasses.replace(state, recurrent=tuple(recurrent), record=record, pending=count)


@jax.jit
def decode(state: State, rows: tuple[jax.Array, ...], t: jax.Array, live: jax.Array) -> State:
    """Row t of each live request, committed."""
    x = [y.reshape(3, ROWS, -1)[:, t] for y in rows]
    recurrent, slots = list(state.recurrent), [jnp.where(live, s, 0) for s in (state.read_slot, state.write_slot)]
    for i in range(2):
        _, recurrent[i] = gated_delta_decode(*x, *weights(i), recurrent[i], *slots, state.position > 0)
    return commit(dataclasses.replace(state, recurrent=tuple(recurrent), pending=live.astype(jnp.int32)))


def speculated(layout: str) -> tuple[State, State]:
    """Two verify steps of three requests, and the accepted rows decoded one by one."""
    plain = init_state(serving(layout))
    # Unused slots may hold anything.
    plain = dataclasses.replace(plain, recurrent=tuple(p.at[1:].set(jnp.nan) for p in plain.recurrent))
    state = start_speculation(plain, ROWS - 1)
    for seed, count, accepted in ((1, [3, 2, 1], [2, 2, 1]), (2, [1, 3, 3], [1, 3, 9])):
        rows = candidates(seed)
        state = commit_verified(verify(state, rows, jnp.asarray(count)), jnp.asarray(accepted))
        for t in range(ROWS):
            plain = decode(plain, rows, t, t < jnp.minimum(jnp.asarray(accepted), jnp.asarray(count)))
    return state, plain


def assert_same_states(state: State, plain: State, requests: Any = range(3)) -> None:
    for request in requests:
        for layer in range(2):
            found, expected = (recurrent_state(s, layer, request) for s in (state, plain))
            assert_same_bits(found, expected, f"request {request}, layer {layer}")


@layouts
def test_without_speculation_nothing_is_there(layout: str) -> None:
    state = init_state(serving(layout))
    assert state.record is None
    assert replay(params(), state) is state
    # per GDN layer a pool and a ring, keys and values of one attention layer, five tables
    assert len(jax.tree.leaves(state)) == 2 * 2 + 2 + 5
    with pytest.raises(ValueError, match=r"speculate = 0: the state takes plain steps, which .*commit makes current"):
        commit_verified(state, state.position)
    with pytest.raises(ConfigError, match="speculate = 8; it takes an integer from 0"):
        start_speculation(state, 8)
    speculating = start_speculation(state, 2)
    assert jax.tree.structure(speculating) == jax.tree.structure(init_state(serving(layout).replace(speculate=2)))
    with pytest.raises(ValueError, match="speculate = 2: not every row of a verify step need count"):
        commit(speculating)
    with pytest.raises(ValueError, match="speculates already, speculate = 2; stop_speculation first"):
        start_speculation(speculating, 3)


@layouts
def test_a_replay_gives_what_decoding_gives(layout: str) -> None:
    state, plain = speculated(layout)
    assert state.record is not None
    assert state.position.tolist() == plain.position.tolist() == [3, 5, 4]
    assert state.record.recorded.replayed.tolist() == [1, 3, 3]
    behind = recurrent_state(state, 0, 1)
    with pytest.raises(AssertionError):
        assert_same_bits(behind, recurrent_state(plain, 0, 1))

    # One request alone: the others' checkpoints and records stay.
    some = replay(params(), state, jnp.asarray([-1, 1]))
    assert some.record is not None
    assert some.record.recorded.replayed.tolist() == [1, 0, 3]
    assert_same_states(some, plain, [1])
    for layer in range(2):
        for request in (0, 2):
            slot = int(state.read_slot[request])
            assert_same_bits(some.recurrent[layer][slot], state.recurrent[layer][slot])

    # All of them; a second time changes nothing.
    once = jax.jit(replay)(params(), some)
    assert_same_states(once, plain)
    for one, other in zip(*map(jax.tree.leaves, (replay(params(), once), once)), strict=True):
        assert_same_bits(one, other)

    # And on from there, decoded or verified.
    rows, first, all_three = candidates(3), jnp.ones(3, jnp.int32), jnp.ones(3, bool)
    verified = commit_verified(verify(once, rows, first), first)
    assert_same_states(replay(params(), verified), decode(plain, rows, 0, all_three))
    stopped = stop_speculation(params(), verified)
    assert jax.tree.structure(stopped) == jax.tree.structure(plain)
    assert_same_states(stopped, decode(plain, rows, 0, all_three))


@layouts
def test_a_step_is_dropped_by_not_committing_it(layout: str) -> None:
    state, _ = speculated(layout)
    if layout == "in_place":
        state = replay(params(), state)  # a checkpoint that has moved on in its place can't go back
    pending = verify(state, candidates(4), jnp.asarray([2, 2, 2]))
    dropped = verify(dataclasses.replace(pending, pending=0 * pending.pending), candidates(5), jnp.asarray([1, 3, 2]))
    expected = verify(state, candidates(5), jnp.asarray([1, 3, 2]))
    accepted = jnp.asarray([1, 2, 2])
    found, wanted = (replay(params(), commit_verified(s, accepted)) for s in (dropped, expected))
    assert_same_states(found, wanted)


def test_clearing_and_forking_clear_the_record() -> None:
    state, _ = speculated("twin")
    for changed in (
        clear(state, jnp.asarray(1)),
        fork(state, jnp.asarray(0), jnp.asarray(1), state.page_table[1]),
    ):
        assert changed.record is not None
        assert changed.record.recorded.live.tolist() == [1, 0, 3]
        assert changed.record.recorded.replayed.tolist() == [1, 0, 3]


@pytest.mark.parametrize("position", [0, 2, 5, 11])
def test_rings_grow_and_shrink_around_their_windows(position: int) -> None:
    config = serving("in_place")
    state = init_state(config)
    filled = tuple(jax.random.normal(jax.random.key(i), ring.shape) for i, ring in enumerate(state.conv))
    state = dataclasses.replace(state, conv=filled, position=jnp.full(3, position))
    before = host_copy([ring_window(ring, REQUEST + 1, state.position, 4) for ring in state.conv])
    wide = start_speculation(state, ROWS - 1)
    assert {ring.shape[1] for ring in wide.conv} == {3 + ROWS}
    narrow = stop_speculation(params(), wide)
    for rings in (wide.conv, narrow.conv):
        for ring, expected in zip(rings, before, strict=True):
            assert_same_bits(ring_window(ring, REQUEST + 1, state.position, 4), expected)


@layouts
def test_slots_for_drafts_come_and_go_around_live_states(layout: str) -> None:
    state = init_state(serving(layout))
    filled = tuple(jax.random.normal(jax.random.key(i), pool.shape) for i, pool in enumerate(state.recurrent))
    # In `twin` the middle one has taken an odd number of steps.
    state = dataclasses.replace(
        state, recurrent=filled, pending=jnp.asarray([0, 1, 0]), position=jnp.asarray([4, 2, 0])
    )
    state = commit(state)
    wide = start_speculation(state, ROWS - 1, "slots")
    narrow = stop_speculation(params(), wide)
    for changed in (wide, narrow):
        declared = state_shapes(changed.config)
        assert jax.tree.structure(changed) == jax.tree.structure(declared)
        assert [x.shape for x in jax.tree.leaves(changed)] == [x.shape for x in jax.tree.leaves(declared)]
        assert_same_states(changed, state)
    assert wide.config.slots == 1 + 3 * ROWS * (2 if layout == "twin" else 1)
    assert narrow.config == state.config

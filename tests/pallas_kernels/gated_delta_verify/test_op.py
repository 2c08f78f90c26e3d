"""One call: what it stores and what it leaves alone, replays alone, counts out of range, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.amd.compiled import whole_array_writes
from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode import DEFAULT_TILE, gated_delta_decode
from pallas_kernels.gated_delta_decode import kernel as decode_kernel
from pallas_kernels.gated_delta_verify import (
    Record,
    Recorded,
    after_step,
    gated_delta_pages,
    gated_delta_replay,
    gated_delta_verify,
    kernel,
    record_shapes,
    shapes,
)
from pallas_kernels.gated_delta_verify.record import MOST_ROWS
from pallas_kernels.segments import Segments
from tests.helpers import assert_same_bits
from tests.pallas_kernels.gated_delta_verify.simulation import IMPLEMENTATIONS, KERNEL, ON_GPU

SHAPE = shapes.Shape("", 1, 2, 16, 16)
REQUESTS, ROWS = 5, 3
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

verify = jax.jit(gated_delta_verify, static_argnames=("implementation", "tile"))
replay = jax.jit(gated_delta_replay, static_argnames=("implementation", "tile"))
decode = jax.jit(gated_delta_decode, static_argnames=("implementation", "tile"))
pages = jax.jit(gated_delta_pages, static_argnames=("implementation", "tile"))


def vector(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


@functools.cache
def weights() -> tuple[np.ndarray, np.ndarray]:
    """A_log and dt_bias."""
    rng = np.random.default_rng(0)
    return rng.uniform(-4, 1, 2).astype(np.float32), rng.normal(size=2).astype(np.float32)


def candidates(seed: int, count: int) -> tuple[np.ndarray, ...]:
    """qkv, a and b of `count` rows."""
    rng = np.random.default_rng(seed)
    sizes = (SHAPE.layout.width, SHAPE.value_heads, SHAPE.value_heads)
    return tuple(rng.normal(size=(count, size)).astype(jnp.bfloat16) for size in sizes)


def world(dtype: Any = jnp.float32) -> tuple[np.ndarray, Record, Recorded]:
    """A pool of 11 slots, slot 0 zero, and records of five requests: random, with NaN in what nothing may read."""
    rng = np.random.default_rng(1)
    pool = rng.normal(size=(11, 2, 16, 16)).astype(dtype)
    pool[0] = 0
    declared = record_shapes(SHAPE.layout, REQUESTS, ROWS, jnp.bfloat16)
    record = jax.tree.map(lambda s: rng.normal(size=s.shape).astype(s.dtype), declared)
    live, parity = vector(3, 2, 0, 3, 1), vector(0, 1, 0, 1, 1)
    for array in (record.keys, record.values, record.gates):
        for request in range(REQUESTS):
            array[request, 1 - parity[request]] = np.nan
            array[request, parity[request], live[request] :] = np.nan
    return pool, record, Recorded(live, parity, vector(2, 1, 0, 3, 1))


# Groups: request 3, padding, request 0 (no state yet), request 4 with no rows of its own.
REQUEST, READ, COUNT = vector(3, -1, 0, 4), vector(4, 0, 1, 5), vector(2, 0, 3, 0)
HAS_STATE = np.array([True, True, False, True])


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_what_a_step_owns_changes(dtype: Any, implementation: Implementation) -> None:
    pool, record, recorded = world(dtype)
    write = np.where(READ > 0, READ + 5, 0).astype(np.int32)
    pool[[1, 2, 3]] = np.nan  # request 0 reads zeros instead of slot 1
    inputs = candidates(2, 4 * ROWS)
    run = functools.partial(verify, *inputs, *weights(), implementation=implementation)
    out, after, new = run(pool, record, recorded, REQUEST, READ, write, HAS_STATE, COUNT)
    out = np.asarray(out, np.float32).reshape(4, ROWS, 2, 16)
    live = np.arange(ROWS) < COUNT[:, None]
    assert np.isfinite(out).all() and out[live].any(axis=(1, 2)).all()
    assert not out[~live].any(), "rows that are not live"
    untouched = np.setdiff1d(np.arange(11), write[write > 0])
    assert_same_bits(np.asarray(after)[untouched], pool[untouched], "slots that no group writes")
    assert np.isfinite(np.asarray(after[write[write > 0]], np.float32)).all()

    expected = jax.tree.map(np.copy, record)
    _, k, v = SHAPE.layout.split(np.asarray(inputs[0]).reshape(4, ROWS, -1))
    raw = np.stack([x.reshape(4, ROWS, -1) for x in inputs[1:]], axis=2)
    for group, request in enumerate(REQUEST):
        for t in range(COUNT[group]):
            half = 1 - recorded.parity[request]
            expected.keys[request, half, t], expected.values[request, half, t] = k[group, t], v[group, t]
            expected.gates[request, half, t] = raw[group, t]
    for name in ("keys", "values", "gates"):
        assert_same_bits(getattr(new, name), getattr(expected, name), f"record.{name}")

    # The step read nothing that it wrote: again, with what it left behind, it gives the same bits.
    again = run(after, new, recorded, REQUEST, READ, write, HAS_STATE, COUNT)
    for one, other in zip(
        jax.tree.leaves(again),
        jax.tree.leaves((run(pool, record, recorded, REQUEST, READ, write, HAS_STATE, COUNT)[0], after, new)),
        strict=True,
    ):
        assert_same_bits(one, other, "a step that runs again")

    # Replaying alone stores the same checkpoints, in place too.
    for target in (write, READ):
        state = replay(
            *weights(), pool, record, recorded, REQUEST, READ, target, HAS_STATE, implementation=implementation
        )
        assert_same_bits(np.asarray(state)[target[target > 0]], np.asarray(after)[write[write > 0]], "replayed")


@both
def test_accepted_counts_are_clamped(implementation: Implementation) -> None:
    pool, record, recorded = world()
    inputs = candidates(3, 4 * ROWS)

    def run(advance: np.ndarray) -> Any:
        state = dataclasses.replace(recorded, advance=advance)
        groups = (REQUEST, READ, READ, HAS_STATE, COUNT)
        return verify(*inputs, *weights(), pool, record, state, *groups, implementation=implementation)

    for stray, clamped in (
        (recorded.live + 5, recorded.live),
        (np.full(REQUESTS, -1, np.int32), 0 * recorded.live),
        (np.full(REQUESTS, 2**31 - 1, np.int32), recorded.live),
    ):
        assert dataclasses.replace(recorded, advance=stray).replayed.tolist() == clamped.tolist()
        for one, other in zip(jax.tree.leaves(run(stray)), jax.tree.leaves(run(clamped)), strict=True):
            assert_same_bits(one, other)


@both
def test_a_step_with_no_drafts_replays(implementation: Implementation) -> None:
    # Three drafts accepted, a step of one row in a batch of its own, one of all rows again: as token by token.
    counts, advances = (3, 1, 3), (3, 1, 2)
    rows = [candidates(10 + step, count) for step, count in enumerate(counts)]
    pool = np.full((3, 2, 16, 16), np.nan, np.float32)
    pool[0] = 0
    declared = record_shapes(SHAPE.layout, REQUESTS, ROWS, jnp.bfloat16)
    record = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), declared)
    recorded = Recorded(*(jnp.zeros(REQUESTS, jnp.int32) for _ in range(3)))
    state, slot, position, tokens = jnp.asarray(pool), vector(1), 0, jnp.asarray(pool)
    only = np.arange(REQUESTS) == 4
    for (qkv, a, b), count, advance in zip(rows, counts, advances, strict=True):
        has_state = np.array([position - int(recorded.replayed[4]) > 0])
        out, state, record = verify(
            *(qkv, a, b, *weights(), state, record, recorded, vector(4), slot, slot, has_state, vector(count)),
            implementation=implementation,
        )
        for t in range(advance):
            token = qkv[t : t + 1], a[t : t + 1], b[t : t + 1], *weights()
            expected, tokens = decode(*token, tokens, slot, slot, np.array([position + t > 0]), implementation)
            assert_same_bits(out[t : t + 1], expected, f"row {t} of a step of {count}")
        recorded = after_step(recorded, np.where(only, count, 0), np.where(only, advance, 0))
        position += advance
    state = replay(*weights(), state, record, recorded, vector(4), slot, slot, np.array([True]), implementation)
    assert_same_bits(state, tokens)
    assert recorded.live.tolist() == [0, 0, 0, 0, 3] and recorded.parity.tolist() == [0, 0, 0, 0, 1]


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_most_rows_and_as_many_to_replay(dtype: Any, implementation: Implementation) -> None:
    # Two steps of eight rows, all of them accepted: as on a page for each row, and in float32 as token by token.
    pool = np.full((2 + 2 * MOST_ROWS, 2, 16, 16), np.nan, dtype)
    pool[0] = 0
    declared = record_shapes(SHAPE.layout, 1, MOST_ROWS, jnp.bfloat16)
    record = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), declared)
    recorded = Recorded(vector(0), vector(0), vector(0))
    state = paged = tokens = jnp.asarray(pool)
    slot, rows, all_rows = vector(1), np.arange(MOST_ROWS, dtype=np.int32), vector(MOST_ROWS)
    for step in range(2):
        inputs, started = candidates(20 + step, MOST_ROWS), np.array([step > 0])
        out, state, record = verify(
            *(*inputs, *weights(), state, record, recorded, vector(0), slot, slot, np.array([False]), all_rows),
            implementation=implementation,
        )
        source, targets = vector(1 + step * MOST_ROWS), 2 + step * MOST_ROWS + rows[None, :]
        wanted, paged = pages(*inputs, *weights(), paged, source, targets, started, all_rows, implementation)
        assert np.asarray(out, np.float32).any()
        assert_same_bits(out, wanted, f"step {step}")
        for t in range(MOST_ROWS if dtype == jnp.float32 else 0):
            token = [x[t : t + 1] for x in inputs]
            y, tokens = decode(*token, *weights(), tokens, slot, slot, started | (t > 0), implementation)
            assert_same_bits(out[t : t + 1], y, f"row {t} of step {step}")
        recorded = after_step(recorded, all_rows, all_rows)
    state = replay(*weights(), state, record, recorded, vector(0), slot, slot, np.array([True]), implementation)
    if dtype == jnp.float32:
        assert_same_bits(state[1], tokens[1])
    assert_same_bits(state[1], paged[1 + 2 * MOST_ROWS], "the checkpoint")


@both
@pytest.mark.parametrize("accepted", range(1, 5))
def test_the_window_of_accepted_rows(accepted: int, implementation: Implementation) -> None:
    # After k of 4 rows the ring's window is what token by token leaves, at any position and past wrapped columns.
    rng = np.random.default_rng(accepted)
    x, weight = rng.normal(size=(4, 8)).astype(np.float32), rng.normal(size=(8, 1, 4)).astype(np.float32)
    packed, single = (jax.jit(f, static_argnums=5) for f in (causal_conv_packed, causal_conv_decode))
    for position in (0, 2, 6, 13):
        ring = rng.normal(size=(2, 7, 8)).astype(np.float32)
        segments = Segments(*(vector(value) for value in (0, 4, position, 0)))
        out, after = packed(x, weight, ring, segments, np.zeros(4, np.int32), implementation)
        expected = jnp.asarray(ring)
        for t in range(accepted):
            y, expected = single(x[t : t + 1], weight, expected, vector(1), vector(position + t), implementation)
            assert_same_bits(out[t : t + 1], y, f"row {t}")
        end = vector(position + accepted)
        window = ring_window(after, vector(1), end, 3)
        assert_same_bits(window, ring_window(expected, vector(1), end, 3))
        # the window of one accepted row, moved on by the others
        first = ring_window(after, vector(1), vector(position + 1), 3)[0]
        moved = jnp.concatenate([first, jnp.asarray(x[1:accepted])])[accepted - 1 :]
        assert_same_bits(window[0], moved)


def test_all_paths_share_one_update_and_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def spy(state: Any, token: Any, v: jax.Array) -> Any:
        seen.append([x.shape for x in (*state, *token.q, *token.k, token.decay, token.beta, v)])
        return update(state, token, v)

    update = decode_kernel.update_strip
    assert kernel.update_strip is update
    assert kernel.prepare_token is decode_kernel.prepare_token
    monkeypatch.setattr(kernel, "update_strip", spy)
    monkeypatch.setattr(decode_kernel, "update_strip", spy)
    pool, record, recorded = jax.tree.map(jnp.asarray, world())
    groups = (REQUEST, READ, READ, HAS_STATE)
    inputs, pages = candidates(4, 4 * ROWS), np.zeros((4, ROWS), np.int32)
    calls = (
        lambda: gated_delta_verify(*inputs, *weights(), pool, record, recorded, *groups, COUNT, "interpret"),
        lambda: gated_delta_replay(*weights(), pool, record, recorded, *groups, "interpret"),
        lambda: gated_delta_pages(*inputs, *weights(), pool, READ, pages, HAS_STATE, COUNT, "interpret"),
        lambda: gated_delta_decode(*(x[:4] for x in inputs), *weights(), pool, READ, READ, HAS_STATE, "interpret"),
    )
    for call in calls:
        before = len(seen)
        jax.eval_shape(call)
        assert len(seen) > before
    assert all(pieces == seen[0] for pieces in seen)
    for op in (gated_delta_verify, gated_delta_replay, gated_delta_pages, gated_delta_decode):
        assert inspect.signature(op).parameters["tile"].default is DEFAULT_TILE


@pytest.mark.skipif(ON_GPU, reason="a GPU calls nobody back")
def test_rows_that_are_asked_for_ahead_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last request has all rows of its second half to replay: behind them the record ends.
    seen: list[tuple[int, int]] = []
    values = kernel.Place.values

    def spy(self: Any, rows: Any, row: jax.Array, first: jax.Array) -> Any:
        jax.debug.callback(lambda at, most=rows.shape[0]: seen.append((int(at), most)), row)
        return values(self, rows, row, first)

    monkeypatch.setattr(kernel.Place, "values", spy)
    pool, record, _ = world()
    every = np.full(REQUESTS, ROWS, np.int32)
    recorded = Recorded(every, np.ones(REQUESTS, np.int32), every)
    groups = (vector(REQUESTS - 1), vector(4), vector(4), np.array([True]), vector(ROWS))
    gated_delta_verify(*candidates(5, ROWS), *weights(), pool, record, recorded, *groups, "interpret")
    jax.effects_barrier()
    assert {most for _, most in seen} == {2 * ROWS * REQUESTS, ROWS}
    assert all(0 <= at < most for at, most in seen)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs programs in an order of its own")
def test_order_of_programs_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, record, recorded = world()
    args = (*candidates(5, 4 * ROWS), *weights(), pool, record, recorded, REQUEST, READ, READ, HAS_STATE, COUNT)
    forward, forward_id = gated_delta_verify(*args, KERNEL), kernel.pl.program_id
    monkeypatch.setattr(kernel.pl, "program_id", lambda axis: kernel.pl.num_programs(axis) - 1 - forward_id(axis))
    for one, other in zip(*map(jax.tree.leaves, (gated_delta_verify(*args, KERNEL), forward)), strict=True):
        assert_same_bits(one, other)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, record, recorded = world()
    inputs = candidates(6, 4 * ROWS)

    def call(inputs: Any = inputs, record: Any = record, recorded: Any = recorded, **groups: Any) -> Any:
        named = dict(request=REQUEST, read_slot=READ, write_slot=READ, has_state=HAS_STATE, count=COUNT) | groups
        return gated_delta_verify(*inputs, *weights(), pool, record, recorded, **named)

    with pytest.raises(ValueError, match="11 rows for 4 groups; it takes as many for each, from 1 to 8"):
        call(tuple(x[:-1] for x in inputs))
    with pytest.raises(ValueError, match="4 rows a group with a record of 3"):
        call(candidates(7, 16))
    with pytest.raises(ValueError, match=r"record.keys is float32\[5, 2, 3, 1, 16\]; it takes bfloat16"):
        call(record=jax.tree.map(lambda x: x.astype(np.float32), record))
    with pytest.raises(ValueError, match=r"recorded.live is int32\[4\]; it takes int32\[5\]"):
        call(recorded=dataclasses.replace(recorded, live=recorded.live[:4]))
    with pytest.raises(ValueError, match=r"count is int32\[3\]; it takes int32\[4\]"):
        call(count=COUNT[:3])
    for name in ("request", "read_slot", "write_slot"):
        with pytest.raises(ValueError, match=rf"{name} is int64\[4\]; it takes int32\[4\]"):
            call(**{name: READ.astype(np.int64)})
    with pytest.raises(ValueError, match=r"read_slot is int64\[4\]; it takes int32\[4\]"):
        gated_delta_pages(
            *inputs, *weights(), pool, READ.astype(np.int64), np.zeros((4, ROWS), np.int32), HAS_STATE, COUNT
        )
    with pytest.raises(ValueError, match="rows = 9; a record takes 1 to 8"):
        record_shapes(SHAPE.layout, 2, 9, jnp.bfloat16)
    monkeypatch.setenv("GDNJAX_DEBUG", "2")
    with pytest.raises(ValueError, match=r"request\[0\] = request\[2\] = 3; every row takes one of its own"):
        call(request=vector(3, -1, 3, 4))
    with pytest.raises(ValueError, match=r"write_slot\[3\] = 11; it takes 0 to 10"):
        call(write_slot=vector(4, 0, 1, 11))


@pytest.mark.parametrize("implementation", ["pallas"] if ON_GPU else ["reference"])
def test_pool_and_record_are_updated_in_place(implementation: Implementation) -> None:
    layout = shapes.Shape("", 2, 2, 16, 16).layout
    # XLA for the CPU scatters bfloat16 as float32.
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32

    def compiled(requests: int) -> Any:
        slots = jax.ShapeDtypeStruct((1 + 2 * requests, 2, 16, 16), jnp.float32)
        record = record_shapes(layout, requests, 4, dtype)
        vector, flags = jax.ShapeDtypeStruct((requests,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.bool_)
        group, width = jax.ShapeDtypeStruct((2,), jnp.int32), layout.width
        rows = [jax.ShapeDtypeStruct((8, n), dtype) for n in (width, 2, 2)]
        call = functools.partial(gated_delta_verify, implementation=implementation)
        jitted = jax.jit(call, donate_argnums=(5, 6), keep_unused=True)
        recorded = Recorded(vector, vector, vector)
        lowered = jitted.lower(*rows, *weights(), slots, record, recorded, group, group, group, flags, group)
        return lowered.compile(), {x.size for x in jax.tree.leaves((slots, record))}

    program, sizes = compiled(1000)
    assert not whole_array_writes(program.as_text(), sizes)
    few, many = (compiled(n)[0].memory_analysis().temp_size_in_bytes for n in (1000, 4000))
    # the three vectors by request may grow
    assert many - few < 200_000, f"{few} and {many} bytes of temporaries"

"""The gated delta rule over packed rows as three kernels; see the reference for the formulas.

`build` and `solve` work on every chunk and head at once, `advance` goes through a segment's chunks in
order with a strip of the state in registers.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_prefill.build import READ, RECALL, WRITE, build_kernel, solve_kernel
from pallas_kernels.gated_delta_prefill.products import COLUMNS, ROWS, mixed_product, split_product
from pallas_kernels.segments import CHUNK, Segments
from pallas_kernels.triton_backend import Warps, launch, load, store

STRIP = 16
PART = 64
"""Rows of V whose state one program carries through the chunks."""

FIRST_CHUNK, START, LENGTH, POSITION, SLOT = range(5)
"""Columns of the table of segments."""


def chunk_tables(segments: Segments, rows: int) -> tuple[jax.Array, jax.Array]:
    """Int32 tables of chunks `[N, 2]` (first row, live rows: none if there's no such chunk) and of segments `[B, 5]`.

    N is the most chunks that any segments of `rows` rows can need.
    """
    count = segments.length.shape[0]
    bound = (rows + (CHUNK - 1) * min(rows, count)) // CHUNK
    chunks = (segments.length + CHUNK - 1) // CHUNK
    ends = jnp.cumsum(chunks)
    first = ends - chunks
    number = jnp.arange(bound, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1), count - 1)
    offset = (number - first[owner]) * CHUNK
    live = jnp.where(number < ends[-1], jnp.minimum(segments.length[owner] - offset, CHUNK), 0)
    table = jnp.stack([segments.start[owner] + offset, live], axis=1)
    per_segment = [first, segments.start, segments.length, segments.position, segments.slot]
    return table.astype(jnp.int32), jnp.stack(per_segment, axis=1).astype(jnp.int32)


def owned_rows(segments: Segments, rows: int) -> jax.Array:
    """`[rows]` int32, 1 where a row belongs to a segment."""
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    inside = (row >= segments.start) & (row < segments.start + segments.length)
    return jnp.any(inside, axis=1).astype(jnp.int32)


def advance_kernel(
    segments, q_ref, k_ref, v_ref, solve_ref, attend_ref, scales_ref, total_ref, _out, _pool, out_ref, pool_ref
):
    """Program (segment, value head, strip of V): the segment's chunks in order.

    All products have the strip's rows first, so that one's result is the next one's left operand as it
    lies in registers, and everything else is a right operand that does not wait for the chunk before.
    """
    segment, head, strip = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    key_head = head // (v_ref.shape[1] // k_ref.shape[1])
    start, length, slot = segments[segment, START], segments[segment, LENGTH], segments[segment, SLOT]
    values = pl.ds(strip * STRIP, STRIP)
    within = jax.lax.iota(jnp.int32, CHUNK)

    @pl.when(length > 0)
    def _():
        parts = [pl.ds(p, PART) for p in range(0, k_ref.shape[2], PART)]

        def body(number: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            n = segments[segment, FIRST_CHUNK] + number
            span = pl.ds(start + number * CHUNK, CHUNK)
            live = (within < length - number * CHUNK)[:, None]
            recalled = 0.0
            for part, cols in enumerate(parts):
                k = load(k_ref.at[span, key_head, cols], mask=live, other=0.0)
                recalled = recalled + mixed_product(k, state[part], (COLUMNS, ROWS))
            recalled = recalled * scales_ref[n, head, RECALL][:, None]
            v = load(v_ref.at[span, head, values], mask=live, other=0.0).astype(jnp.float32)
            solve = tuple(solve_ref[piece, n, head] for piece in range(solve_ref.shape[0]))
            new = split_product(solve, v - recalled, (COLUMNS, ROWS))
            out = 0.0
            for part, cols in enumerate(parts):
                q = load(q_ref.at[span, key_head, cols], mask=live, other=0.0)
                out = out + mixed_product(q, state[part], (COLUMNS, ROWS))
            out = out * scales_ref[n, head, READ][:, None]
            attend = tuple(attend_ref[piece, n, head] for piece in range(attend_ref.shape[0]))
            out = out + split_product(attend, new, (COLUMNS, ROWS))
            store(out_ref.at[span, head, values], out.astype(out_ref.dtype), mask=live)
            written = new * scales_ref[n, head, WRITE][:, None]
            after = []
            for part, cols in enumerate(parts):
                k = load(k_ref.at[span, key_head, cols], mask=live, other=0.0)
                after.append(state[part] * total_ref[n, head] + mixed_product(k, written, (ROWS, ROWS)))
            return tuple(after)

        stored = [pool_ref.at[slot, head, values, cols] for cols in parts]
        # not multiplied away: an unused slot may hold NaN
        has_state = segments[segment, POSITION] > 0
        state = tuple(jnp.where(has_state, load(x).astype(jnp.float32), 0.0).T for x in stored)
        state = jax.lax.fori_loop(0, (length + CHUNK - 1) // CHUNK, body, state)

        @pl.when(slot > 0)
        def _():
            for x, y in zip(stored, state):
                store(x, y.T.astype(pool_ref.dtype))


def gated_delta_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    segments: Segments,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The reference's function; head sizes are powers of two from 16 up. `interpret` runs it as plain JAX."""
    rows, heads, dv = v.shape
    dk = k.shape[2]
    chunks, table = chunk_tables(segments, rows)
    count = chunks.shape[0]
    split = q.dtype == jnp.bfloat16
    matrices = jax.ShapeDtypeStruct((2 if split else 1, count, heads, CHUNK, CHUNK), q.dtype)
    shape = jax.ShapeDtypeStruct
    m, attend, scales, total, out = launch(
        functools.partial(build_kernel, rows=rows),
        (chunks, owned_rows(segments, rows), q, k, a, b, a_log, dt_bias),
        name="gated_delta_build",
        grid=(count, heads),
        out_shape=[
            shape((count, heads, CHUNK, CHUNK), jnp.float32),
            matrices,
            shape((count, heads, 4, CHUNK), jnp.float32),
            shape((count, heads), jnp.float32),
            shape(v.shape, v.dtype),
        ],
        warps=Warps(4, 8),
        interpret=interpret,
    )
    (solve,) = launch(
        solve_kernel,
        (chunks, m, scales),
        name="gated_delta_solve",
        grid=(count, heads),
        out_shape=[matrices],
        warps=Warps(1, 1),
        interpret=interpret,
    )
    out, pool = launch(
        advance_kernel,
        (table, q, k, v, solve, attend, scales, total, out, pool),
        name="gated_delta_advance",
        grid=(table.shape[0], heads, dv // STRIP),
        out_shape=[shape(out.shape, out.dtype), shape(pool.shape, pool.dtype)],
        warps=Warps(4, 4),
        aliases={8: 0, 9: 1},
        interpret=interpret,
    )
    return out, pool

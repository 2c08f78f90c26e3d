"""The gated delta rule over packed rows, in three launches; formulas: see the reference.

`build` and `solve` (in `build.py`) work on every chunk and head at once, `advance` walks through a segment's
chunks with a strip of the state in registers. One kernel for all of it would need several times the registers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_prefill.build import BLOCK, FROM_START_K, FROM_START_Q, TO_END_K, build, solve
from pallas_kernels.products import (
    COLUMNS,
    ROWS,
    column_parts,
    mixed_product,
    operands,
    product,
    split_product,
)
from pallas_kernels.segments import CHUNK, Segments, chunk_table, owned_rows
from pallas_kernels.triton_backend import Warps, device_kind, launch, load, store

STRIP = 16
"""Rows of V of one program of `advance`: the fewest that matrix units take, for the most programs."""

FIRST_CHUNK, START, LENGTH, POSITION, SLOT = range(5)
"""Columns of the table of segments."""


def segment_table(segments: Segments) -> jax.Array:
    """Int32 `[B, 5]`: number of the segment's first chunk, start, length, position, slot."""
    chunks = (segments.length + CHUNK - 1) // CHUNK
    first = jnp.cumsum(chunks) - chunks
    columns = [first, segments.start, segments.length, segments.position, segments.slot]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def advance(
    segments: Any,
    qkv: Any,
    inverse: Any,
    attend: Any,
    scales: Any,
    total: Any,
    _out: Any,
    _pool: Any,
    out: Any,
    pool: Any,
    *,
    layout: QkvLayout,
    early: bool,
) -> None:
    """Program (strip of V, value head, segment): the segment's chunks in order.

    The state is carried as `[dk, strip]`, in parts along dk: every product then has a chunk's or the state's
    64 rows on the left, which the warps share out among them, and the strip's few columns on the right.

    `early` asks for all of a chunk, and for the next one's k, before the first product, which hides the
    memory's latency; otherwise operands are loaded where they are used, which takes fewer registers.
    """
    strip, head, segment = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    length, slot = segments[segment, LENGTH], segments[segment, SLOT]
    values = pl.ds(strip * STRIP, STRIP)
    q_parts, k_parts = (column_parts(first, layout.key_dim, qkv.dtype) for first in (layout.q(head), layout.k(head)))
    v_columns = pl.ds(layout.v(head) + strip * STRIP, STRIP)
    state_parts = column_parts(0, layout.key_dim, qkv.dtype)

    def rows_of(number: jax.Array) -> tuple[Any, jax.Array]:
        # The start is read here and not once: addresses made from it before the store to `out` would stay
        # in registers until after it.
        first = segments[segment, START] + number * CHUNK
        live = jax.lax.iota(jnp.int32, CHUNK) < length - number * CHUNK
        return pl.ds(first, CHUNK), live[:, None]

    def read(number: jax.Array, columns: Any) -> jax.Array:
        span, live = rows_of(number)
        return load(qkv.at[span, columns], mask=live, other=0.0)

    def ask(read: Callable[[], jax.Array]) -> Callable[[], jax.Array]:
        if not early:
            return read
        value = read()
        return lambda: value

    def body(number: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, k_early = carry
        n = segments[segment, FIRST_CHUNK] + number
        span, live = rows_of(number)
        if early:
            read_k = [lambda value=value: value for value in k_early]
        else:
            read_k = [functools.partial(read, number, columns) for columns in k_parts]
        read_q = [ask(functools.partial(read, number, columns)) for columns in q_parts]
        read_v = ask(functools.partial(read, number, v_columns))
        read_inverse, read_attend = (
            [ask(lambda ref=ref, piece=piece: ref[piece, n, head]) for piece in range(ref.shape[0])]
            for ref in (inverse, attend)
        )
        # past the last chunk no row is live, and nothing is read
        k_next = tuple(read(number + 1, columns) for columns in k_parts) if early else ()

        # [i, v]
        recalled = answer = jnp.zeros((CHUNK, STRIP), jnp.float32)
        for k_part, q_part, state_part in zip(read_k, read_q, state, strict=True):
            recalled += mixed_product(k_part(), state_part, (COLUMNS, ROWS))
            answer += mixed_product(q_part(), state_part, (COLUMNS, ROWS))
        recalled = recalled * scales[n, head, FROM_START_K][:, None]
        # beta is in the inverse's columns
        new = split_product(read_inverse, read_v().astype(jnp.float32) - recalled, (COLUMNS, ROWS))
        answer = answer * scales[n, head, FROM_START_Q][:, None]
        answer = answer + split_product(read_attend, new, (COLUMNS, ROWS))
        store(out.at[span, head, values], answer.astype(out.dtype), mask=live)
        new = new * scales[n, head, TO_END_K][:, None]
        whole_k = [part() for part in read_k]
        state = tuple(state_part * total[n, head] for state_part in state)
        # Whole: without decay, what were lost here would add up over the chunk's rows. A piece at a time for
        # all of k, and onto the state itself, since registers hold no more.
        for piece in operands(new, qkv.dtype, count=3):
            state = tuple(
                state_part + product(k_part, piece, (ROWS, ROWS))
                for k_part, state_part in zip(whole_k, state, strict=True)
            )
        return state, k_next

    @pl.when(length > 0)
    def _() -> None:
        # selected, not multiplied: an unused slot may hold NaN
        has_state = segments[segment, POSITION] > 0
        stored = [load(pool.at[slot, head, values, columns]).astype(jnp.float32) for columns in state_parts]
        state = tuple(jnp.where(has_state, x, 0.0).T for x in stored)
        k_first = tuple(read(jnp.int32(0), columns) for columns in k_parts) if early else ()
        state, _ = jax.lax.fori_loop(0, (length + CHUNK - 1) // CHUNK, body, (state, k_first))
        # read again for the same reason as the start
        target = segments[segment, SLOT]

        @pl.when(target > 0)
        def _() -> None:
            for columns, state_part in zip(state_parts, state, strict=True):
                store(pool.at[target, head, values, columns], state_part.T.astype(pool.dtype))


def gated_delta_prefill(
    qkv: jax.Array,
    a: Columns,
    b: Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    segments: Segments,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See the reference; qkv is float32 or bfloat16, dk and dv powers of two from 16 up.

    With bfloat16 inputs the state is off by up to 7e-6 of its largest element instead of 1e-6: see `products`.
    """
    rows, (_, heads, dv, dk) = qkv.shape[0], pool.shape
    layout = qkv_layout(qkv, pool)
    chunks, table = chunk_table(segments, rows), segment_table(segments)
    count = chunks.shape[0]
    shape = jax.ShapeDtypeStruct
    # What comes in bfloat16 is multiplied by it, so that these matrices are kept as two pieces of it.
    exact = qkv.dtype == jnp.float32
    matrices = shape((1 if exact else 2, count, heads, CHUNK, CHUNK), qkv.dtype)
    square = count * heads * CHUNK * CHUNK
    row_bytes = qkv.size * qkv.dtype.itemsize
    out_bytes = rows * heads * dv * qkv.dtype.itemsize

    m, attend, scales, total, out = launch(
        functools.partial(build, layout=layout, a_column=a.start, b_column=b.start),
        [chunks, owned_rows(segments, rows), qkv, a.array, b.array, a_log, dt_bias],
        name="gated_delta_build",
        grid=(heads, count),
        out_shape=[
            shape((count, heads, CHUNK, CHUNK), jnp.float32),
            matrices,
            shape((count, heads, 4, CHUNK), jnp.float32),
            shape((count, heads), jnp.float32),
            shape((rows, heads, dv), qkv.dtype),
        ],
        warps=Warps(wave64=4, wave32=8),
        cost=pl.CostEstimate(flops=4 * square * dk, transcendentals=square, bytes_accessed=row_bytes + 8 * square),
        interpret=interpret,
    )
    (inverse,) = launch(
        solve,
        [chunks, m, scales],
        name="gated_delta_solve",
        grid=(heads, count),
        out_shape=[matrices],
        warps=Warps(wave64=1, wave32=1),
        cost=pl.CostEstimate(flops=20 * square * BLOCK, transcendentals=0, bytes_accessed=8 * square),
        interpret=interpret,
    )
    state_bytes = 2 * min(rows, table.shape[0]) * heads * dv * dk * pool.dtype.itemsize
    out, pool = launch(
        functools.partial(advance, layout=layout, early=not device_kind().startswith("gfx1")),
        [table, qkv, inverse, attend, scales, total, out, pool],
        name="gated_delta_advance",
        grid=(dv // STRIP, heads, table.shape[0]),
        out_shape=[shape(out.shape, out.dtype), shape(pool.shape, pool.dtype)],
        warps=Warps(wave64=4, wave32=8 if exact else 4),
        aliases={6: 0, 7: 1},
        cost=pl.CostEstimate(
            flops=count * heads * CHUNK * dv * (6 * dk + 4 * CHUNK),
            transcendentals=0,
            bytes_accessed=state_bytes + row_bytes + 8 * square + out_bytes,
        ),
        interpret=interpret,
    )
    return out, pool

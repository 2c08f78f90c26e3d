"""The kernels that need no state: what every chunk and head contributes, all at once.

`build` makes the triangular matrices of a chunk, `solve` inverts one of them. Formulas: see the reference.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_decode.qkv import QkvLayout
from pallas_kernels.gated_delta_decode.reference import L2_EPS, gates
from pallas_kernels.products import COLUMNS, ROWS, column_parts, product, stored_pieces
from pallas_kernels.segments import CHUNK
from pallas_kernels.triton_backend import load, store

BLOCK = 16
"""Size of the blocks by which a matrix is inverted: the smallest that matrix units take."""

FROM_START_K, FROM_START_Q, TO_END_K, BETA = range(4)
"""Scales of a chunk's rows: exp(c) / |k|, exp(c) / (|q| sqrt(dk)), exp(c_last - c) / |k|, and beta."""


def build(
    chunks: Any,
    owned: Any,
    qkv: Any,
    a: Any,
    b: Any,
    a_log: Any,
    dt_bias: Any,
    m: Any,
    attend: Any,
    scales: Any,
    total: Any,
    out: Any,
    *,
    layout: QkvLayout,
    a_column: int,
    b_column: int,
) -> None:
    """Program (value head, chunk): M, (q k^T) * L, the scales of the chunk's rows, and its whole decay.

    q and k enter their products as they came and their norms are scales of rows and columns, so that
    bfloat16 products are exact. What a row's segment leaves of the 64 rows acts as zeros.

    The same program clears the output on rows [64 n, 64 n + 64) as far as they belong to no segment.
    """
    head, n = pl.program_id(0), pl.program_id(1)
    within = jax.lax.iota(jnp.int32, CHUNK)

    span = pl.ds(n * CHUNK, CHUNK)
    unowned = load(owned.at[span], mask=n * CHUNK + within < owned.shape[0], other=1) == 0
    store(out.at[span, head, :], jnp.zeros((CHUNK, out.shape[2]), out.dtype), mask=unowned[:, None])

    start, count = chunks[n, 0], chunks[n, 1]

    @pl.when(count > 0)
    def _() -> None:
        live = within < count
        span = pl.ds(start, CHUNK)

        def part(columns: Any) -> jax.Array:
            return load(qkv.at[span, columns], mask=live[:, None], other=0.0)

        g, beta = gates(
            load(a.at[span, a_column + head], mask=live, other=0.0),
            load(b.at[span, b_column + head], mask=live, other=0.0),
            a_log[head],
            dt_bias[head],
        )
        g, beta = jnp.where(live, g, 0.0), jnp.where(live, beta, 0.0)
        i = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        j = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        # [t, j]: g_t where t > j; its running sum over t is the log decay from j to i, and no difference
        after = jnp.where(i > j, g[:, None], 0.0)
        decay = jnp.where(i >= j, jnp.exp(jnp.cumsum(after, axis=0)), 0.0)
        from_start = jnp.exp(jnp.sum(jnp.where(j <= i, g[None, :], 0.0), axis=1))
        to_end = jnp.exp(jnp.sum(after, axis=0))
        total[n, head] = jnp.exp(jnp.sum(g))
        scales[n, head, BETA] = beta

        # Each matrix is stored before the next one's operands are loaded: fewer values live at once.
        k_parts = column_parts(layout.k(head), layout.key_dim, qkv.dtype)
        matrix, squares = jnp.zeros((CHUNK, CHUNK), jnp.float32), jnp.zeros((CHUNK,), jnp.float32)
        for columns in k_parts:
            k_part = part(columns)
            matrix += product(k_part, k_part, (COLUMNS, COLUMNS))
            squares += _sum_of_squares(k_part)
        k_scale = jax.lax.rsqrt(squares + L2_EPS)
        decay = decay * k_scale[None, :]
        m[n, head] = jnp.where(i > j, matrix * decay * (beta * k_scale)[:, None], 0.0)
        scales[n, head, FROM_START_K] = from_start * k_scale
        scales[n, head, TO_END_K] = to_end * k_scale

        matrix, squares = jnp.zeros((CHUNK, CHUNK), jnp.float32), jnp.zeros((CHUNK,), jnp.float32)
        q_parts = column_parts(layout.q(head), layout.key_dim, qkv.dtype)
        for columns, k_columns in zip(q_parts, k_parts, strict=True):
            q_part = part(columns)
            matrix += product(q_part, part(k_columns), (COLUMNS, COLUMNS))
            squares += _sum_of_squares(q_part)
        q_scale = jax.lax.rsqrt(squares + L2_EPS) * layout.key_dim**-0.5
        for number, piece in enumerate(stored_pieces(matrix * decay * q_scale[:, None], attend)):
            attend[number, n, head] = piece
        scales[n, head, FROM_START_Q] = from_start * q_scale


def solve(chunks: Any, m: Any, scales: Any, inverse: Any) -> None:
    """Program (value head, chunk): T = (I + M)^-1 with beta folded into its columns.

    In blocks, since what is loaded cannot be cut: T_ii by halves as in the reference, and down each column
    T_ij = -T_ii (sum of M_ik T_kj over j <= k < i).
    """
    head, n = pl.program_id(0), pl.program_id(1)
    count = CHUNK // BLOCK
    span = [pl.ds(index * BLOCK, BLOCK) for index in range(count)]

    def put(i: int, j: int, block: jax.Array) -> None:
        block = block * scales[n, head, BETA, span[j]][None, :]
        for number, piece in enumerate(stored_pieces(block, inverse)):
            inverse[number, n, head, span[i], span[j]] = piece

    # Stored one by one: a store keeps the loads behind it behind it, and so the live registers few.
    @pl.when(chunks[n, 1] > 0)
    def _() -> None:
        diagonal: list[jax.Array] = []
        for i in range(count):
            diagonal.append(_inverse_of_block(m[n, head, span[i], span[i]]))
            put(i, i, diagonal[i])
        for j in range(count):
            for i in range(j):
                put(i, j, jnp.zeros((BLOCK, BLOCK), jnp.float32))
            column = {j: diagonal[j]}
            for i in range(j + 1, count):
                known = jnp.zeros((BLOCK, BLOCK), jnp.float32)
                for k in range(j, i):
                    known += product(m[n, head, span[i], span[k]], column[k], (COLUMNS, ROWS))
                column[i] = -product(diagonal[i], known, (COLUMNS, ROWS))
                put(i, j, column[i])


def _sum_of_squares(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.sum(x * x, axis=1)


def _inverse_of_block(m: jax.Array) -> jax.Array:
    i = jax.lax.broadcasted_iota(jnp.int32, m.shape, 0)
    j = jax.lax.broadcasted_iota(jnp.int32, m.shape, 1)
    inverse = jnp.where(i == j, 1.0, 0.0) - jnp.where((i // 2 == j // 2) & (i > j), m, 0.0)
    size = 2
    while size < BLOCK:
        corner = (i // (2 * size) == j // (2 * size)) & (i // size % 2 == 1) & (j // size % 2 == 0)
        step = product(jnp.where(corner, m, 0.0), inverse, (COLUMNS, ROWS))
        inverse = inverse - product(inverse, step, (COLUMNS, ROWS))
        size *= 2
    return inverse

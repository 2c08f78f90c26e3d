"""The two kernels that need no state: what a chunk contributes, for every chunk and head at once.

The first builds the triangular matrices of a chunk, the second inverts one of them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gated_delta_decode.reference import L2_EPS, gates
from pallas_kernels.gated_delta_prefill.products import COLUMNS, ROWS, pieces, product
from pallas_kernels.segments import CHUNK
from pallas_kernels.triton_backend import load, store

PART = 64

BLOCK = 16
"""Rows of the blocks by which the triangular matrix is inverted: the smallest that matrix units take."""

RECALL, READ, WRITE, BETA = range(4)
"""Rows of a chunk's scales: of k before the state, of q before the state, of what is written, and beta."""


def store_pieces(ref, index: tuple, value: jax.Array) -> None:
    """Stores a float32 matrix at `index` as the ref's leading axis has it: whole, or as two pieces."""
    for number, piece in enumerate((value,) if ref.shape[0] == 1 else pieces(value)):
        ref[(number, *index)] = piece


def _squares(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return jnp.sum(x * x, axis=1)


def build_kernel(
    chunks, owned, q_ref, k_ref, a_ref, b_ref, a_log, dt_bias, m_ref, attend_ref, scales_ref, total_ref, out_ref, *, rows
):
    """Program (chunk, value head): M, (q k^T) L and the scales of the chunk's rows.

    q and k stay as they came, their norms are scales of rows and columns: bfloat16 products are exact.
    The same program clears rows [64 n, 64 n + 64) of the output where they belong to no segment.
    """
    n, head = pl.program_id(0), pl.program_id(1)
    key_head = head // (m_ref.shape[1] // k_ref.shape[1])
    within = jax.lax.iota(jnp.int32, CHUNK)

    row = n * CHUNK + within
    unowned = load(owned.at[pl.ds(n * CHUNK, CHUNK)], mask=row < rows, other=1) == 0
    zeros = jnp.zeros((CHUNK, out_ref.shape[2]), out_ref.dtype)
    store(out_ref.at[pl.ds(n * CHUNK, CHUNK), head, :], zeros, mask=unowned[:, None])

    start, count = chunks[n, 0], chunks[n, 1]

    @pl.when(count > 0)
    def _():
        live = within < count
        span = pl.ds(start, CHUNK)
        a = load(a_ref.at[span, head], mask=live, other=0.0)
        b = load(b_ref.at[span, head], mask=live, other=0.0)
        g, beta = gates(a, b, a_log[head], dt_bias[head])
        g, beta = jnp.where(live, g, 0.0), jnp.where(live, beta, 0.0)

        i = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0)
        j = jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1)
        # [t, j]: g_t where t > j; its running sum over t is the log decay from j to i, without a difference
        after = jnp.where(i > j, g[:, None], 0.0)
        decay = jnp.where(i >= j, jnp.exp(jnp.cumsum(after, axis=0)), 0.0)
        from_start = jnp.exp(jnp.sum(jnp.where(j <= i, g[None, :], 0.0), axis=1))
        to_end = jnp.exp(jnp.sum(after, axis=0))
        total_ref[n, head] = jnp.exp(jnp.sum(g))
        scales_ref[n, head, BETA] = beta

        def part(ref, columns):
            return load(ref.at[span, key_head, columns], mask=live[:, None], other=0.0)

        parts = [pl.ds(first, PART) for first in range(0, k_ref.shape[2], PART)]
        m, squares = 0.0, 0.0
        for columns in parts:
            k = part(k_ref, columns)
            m = m + product(k, k, (COLUMNS, COLUMNS))
            squares = squares + _squares(k)
        k_scale = jax.lax.rsqrt(squares + L2_EPS)
        decay = decay * k_scale[None, :]
        m = m * decay * (beta * k_scale)[:, None]
        m_ref[n, head] = jnp.where(i > j, m, 0.0)
        scales_ref[n, head, RECALL] = from_start * k_scale
        scales_ref[n, head, WRITE] = to_end * k_scale

        attend, squares = 0.0, 0.0
        for columns in parts:
            q = part(q_ref, columns)
            attend = attend + product(q, part(k_ref, columns), (COLUMNS, COLUMNS))
            squares = squares + _squares(q)
        q_scale = jax.lax.rsqrt(squares + L2_EPS) * k_ref.shape[2] ** -0.5
        store_pieces(attend_ref, (n, head), attend * decay * q_scale[:, None])
        scales_ref[n, head, READ] = from_start * q_scale


def solve_kernel(chunks, m_ref, scales_ref, solve_ref):
    """Program (chunk, value head): T = (I + M)^-1 with beta folded into its columns.

    By blocks of 16, since a loaded matrix cannot be cut: T_ii by halves as in the reference, then
    T_ij = -T_ii (sum of M_ik T_kj over j <= k < i), nearest diagonals first.
    """
    n, head = pl.program_id(0), pl.program_id(1)

    @pl.when(chunks[n, 1] > 0)
    def _():
        count = CHUNK // BLOCK
        span = [pl.ds(index * BLOCK, BLOCK) for index in range(count)]
        diagonal = [_inverse_of_block(m_ref[n, head, span[i], span[i]]) for i in range(count)]
        for j in range(count):
            beta = scales_ref[n, head, BETA, span[j]][None, :]
            column = {j: diagonal[j]}
            for i in range(count):
                if i > j:
                    known = sum(product(m_ref[n, head, span[i], span[k]], column[k], (COLUMNS, ROWS)) for k in range(j, i))
                    column[i] = -product(diagonal[i], known, (COLUMNS, ROWS))
                block = column[i] * beta if i >= j else jnp.zeros((BLOCK, BLOCK), jnp.float32)
                store_pieces(solve_ref, (n, head, span[i], span[j]), block)


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

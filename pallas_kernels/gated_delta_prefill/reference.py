"""The gated delta rule over many tokens, in chunks of 64: the same function as token by token.

Within a chunk, with decays L[i, j] = exp(sum of g over (j, i]) for j <= i and 0 above the diagonal:

    M = strictly lower part of (beta_i k_i . k_j L[i, j]);  T = (I + M)^-1
    vn = T (beta (v - exp(c) k S))          c: inclusive sums of g from the chunk's start
    o  = exp(c) q S + ((q k^T) * L) vn
    S <- exp(c_last) S + vn^T (k exp(c_last - c))

Source: Yang et al., arXiv:2412.06464, section 3.3. Differences of a running sum lose digits when decays
are strong, so the exponents of L are summed directly, and the mask comes before exp (inf * 0).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode.qkv import qkv_layout
from pallas_kernels.gated_delta_decode.reference import gates, normalize_qk
from pallas_kernels.segments import CHUNK, Segments, chunk_at, count_chunks

HIGHEST = jax.lax.Precision.HIGHEST


def _dot(equation: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(equation, *operands, precision=HIGHEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedChunk:
    """What of a chunk does not depend on the state: `i`, `j` are positions in the chunk."""

    q: jax.Array  # [..., i, k] normalised and scaled
    k: jax.Array  # [..., i, k] normalised
    v: jax.Array  # [..., i, v]
    beta: jax.Array  # [..., i]
    solve: jax.Array  # [..., i, j] T = (I + M)^-1
    attend: jax.Array  # [..., i, j] (q k^T) * L
    from_start: jax.Array  # [..., i] exp(c_i)
    to_end: jax.Array  # [..., i] exp(c_last - c_i)


def inverse_unit_lower(m: jax.Array) -> jax.Array:
    """(I + M)^-1 for strictly lower triangular M `[..., C, C]`, C a power of two.

    By halves: with the inverse T of the diagonal blocks of size s, those of size 2 s are T - T N T
    where N holds M's lower-left s x s blocks. Only products, no division: error about 1e-6 in float32
    also for nearly equal keys, where the product form (I - M)(I + M^2)(I + M^4)... is useless.
    """
    size = m.shape[-1]
    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    inverse = jnp.eye(size, dtype=m.dtype) - jnp.where((i // 2 == j // 2) & (i > j), m, 0.0)
    block = 2
    while block < size:
        corner = (i // (2 * block) == j // (2 * block)) & (i // block % 2 == 1) & (j // block % 2 == 0)
        step = _dot("...ij,...jk->...ik", jnp.where(corner, m, 0.0), inverse)
        inverse = inverse - _dot("...ij,...jk->...ik", inverse, step)
        block *= 2
    return inverse


def prepare_chunk(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> PreparedChunk:
    """Everything of a chunk that needs no state. Rows that are padding have k = v = 0, g = 0, beta = 0.

    Args:
        q, k: `[..., C, dk]` float32, normalised. v: `[..., C, dv]` float32.
        g, beta: `[..., C]` float32.
    """
    size = q.shape[-2]
    i, j = jnp.arange(size)[:, None], jnp.arange(size)[None, :]
    lower = (i >= j).astype(g.dtype)
    # [..., t, j]: g_t where t > j; summed over t <= i it is the log decay from j to i
    after = jnp.where(i > j, g[..., :, None], 0.0)
    log_decay = _dot("it,...tj->...ij", lower, after)
    decay = jnp.where(i >= j, jnp.exp(jnp.where(i >= j, log_decay, 0.0)), 0.0)
    m = jnp.where(i > j, beta[..., :, None] * _dot("...ik,...jk->...ij", k, k) * decay, 0.0)
    return PreparedChunk(
        q=q,
        k=k,
        v=v,
        beta=beta,
        solve=inverse_unit_lower(m),
        attend=_dot("...ik,...jk->...ij", q, k) * decay,
        from_start=jnp.exp(_dot("it,...t->...i", lower, g)),
        to_end=decay[..., -1, :],
    )


def advance_chunk(state: jax.Array, chunk: PreparedChunk) -> tuple[jax.Array, jax.Array]:
    """State `[..., dv, dk]` before the chunk -> state after it, and outputs `[..., C, dv]`; float32."""
    recalled = chunk.from_start[..., None] * _dot("...ik,...vk->...iv", chunk.k, state)
    new = _dot("...ij,...jv->...iv", chunk.solve, chunk.beta[..., None] * (chunk.v - recalled))
    out = chunk.from_start[..., None] * _dot("...ik,...vk->...iv", chunk.q, state)
    out = out + _dot("...ij,...jv->...iv", chunk.attend, new)
    state = chunk.from_start[..., -1, None, None] * state
    return state + _dot("...iv,...ik->...vk", new, chunk.to_end[..., None] * chunk.k), out


def gated_delta_sequence(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rule over whole sequences; differentiable in every argument.

    Args:
        q, k: `[b, t, Hk, dk]` raw (l2norm and scaling happen here). v: `[b, t, Hv, dv]`.
        g, beta: `[b, t, Hv]` float32, from `gates`.
        initial_state: `[b, Hv, dv, dk]` float32; None is zeros.

    Returns:
        Outputs `[b, t, Hv, dv]` and the final state `[b, Hv, dv, dk]`, float32.
    """
    batch, length, heads, dv = v.shape
    per_key_head, dk = heads // k.shape[2], k.shape[3]
    size = min(CHUNK, max(2, 1 << (length - 1).bit_length()))
    count = -(-length // size)
    q, k = normalize_qk(q, k)
    q, k = jnp.repeat(q, per_key_head, axis=2), jnp.repeat(k, per_key_head, axis=2)

    def chunked(x: jax.Array) -> jax.Array:  # [b, t, h, ...] -> [n, b, h, i, ...]
        padding = [(0, 0), (0, count * size - length)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x.astype(jnp.float32), padding).reshape(batch, count, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 1), 2, 0)

    chunks = prepare_chunk(*map(chunked, (q, k, v, g, beta)))
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, dv, dk), jnp.float32)
    state, out = jax.lax.scan(advance_chunk, initial_state.astype(jnp.float32), chunks)
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(batch, count * size, heads, dv)
    return out[:, :length], state


def gated_delta_prefill(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    segments: Segments,
) -> tuple[jax.Array, jax.Array]:
    """The rule over the packed rows of many requests; every request's slot is updated in place.

    Args:
        qkv: `[R, 2 Hk dk + Hv dv]`, the convolution's output: all q, all k, all v.
        a, b: `[R, Hv]` raw projections. a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; returned updated (donate it).
        segments: which rows belong together. A segment at position 0 starts from zeros.

    Returns:
        Outputs `[R, Hv, dv]` in qkv's dtype (zeros on rows of no segment), and the pool. The state is
        rounded to the pool's dtype once, after the segment's last row.
    """
    q, k, v = qkv_layout(qkv, pool).split(qkv)
    rows, heads, dv = v.shape
    per_key_head, dk = heads // k.shape[1], k.shape[2]
    g, beta = gates(a, b, a_log, dt_bias)
    q, k = normalize_qk(q, k)

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        pool, state, out = carry
        chunk = chunk_at(segments, index, rows)
        slot, position = segments.slot[chunk.segment], segments.position[chunk.segment]

        def take(x: jax.Array, repeats: int = 1) -> jax.Array:  # [r, h, ...] -> [h, i, ...]
            live = chunk.live.reshape(-1, *[1] * (x.ndim - 1))
            x = jnp.where(live, x[chunk.rows].astype(jnp.float32), 0.0)
            return jnp.moveaxis(jnp.repeat(x, repeats, axis=1), 1, 0)

        stored = jnp.where(position > 0, pool[slot].astype(jnp.float32), 0.0)
        state = jnp.where(chunk.first, stored, state)
        prepared = prepare_chunk(take(q, per_key_head), take(k, per_key_head), take(v), take(g), take(beta))
        state, piece = advance_chunk(state, prepared)
        target = jnp.where(chunk.last & (slot > 0), slot, pool.shape[0])
        pool = pool.at[target].set(state.astype(pool.dtype), mode="drop")
        target_rows = jnp.where(chunk.live, chunk.rows, rows)
        out = out.at[target_rows].set(jnp.moveaxis(piece, 0, 1).astype(out.dtype), mode="drop")
        return pool, state, out

    carry = (pool, jnp.zeros((heads, dv, dk), jnp.float32), jnp.zeros(v.shape, v.dtype))
    pool, _, out = jax.lax.fori_loop(0, count_chunks(segments), body, carry)
    return out, pool

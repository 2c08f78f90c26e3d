"""Grouped-query attention: over whole sequences, over pages for one token a row, and for packed rows.

Scores are q k / sqrt(D); softmax and its sums are float32; query head a reads KV head a // (A / G).
The gate and the output projection are the model's. Outputs are float32 `[..., A, D]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.segments import Segments, chunk_at, count_chunks

HIGHEST = jax.lax.Precision.HIGHEST


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array) -> jax.Array:
    """q `[..., t, A, D]`, k and v `[..., s, G, D]`, visible `[..., t, s]` -> `[..., t, A, D]` float32."""
    groups = k.shape[-2]
    q = q.reshape(*q.shape[:-2], groups, q.shape[-2] // groups, q.shape[-1])
    precision = HIGHEST if q.dtype == jnp.float32 else None
    scores = jnp.einsum("...tgpd,...sgd->...gpts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scores = scores * q.shape[-1] ** -0.5
    visible = visible[..., None, None, :, :]
    # A row that sees nothing (padding) would divide 0 by 0.
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.where(visible, jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    out = jnp.einsum("...gpts,...sgd->...tgpd", weights, v.astype(jnp.float32), precision=HIGHEST)
    return out.reshape(*out.shape[:-3], -1, out.shape[-1])


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Whole sequences: q `[b, t, A, D]`, k and v `[b, t, G, D]` -> `[b, t, A, D]` float32."""
    t = jnp.arange(q.shape[1])
    return _attend(q, k, v, t[:, None] >= t[None, :])


def _read_pages(cache: jax.Array, pages: jax.Array, page_size: int) -> jax.Array:
    """The tokens of a request's pages in order: cache `[kv_slots, G, D]`, pages `[..., P]`."""
    slots = pages[..., :, None] * page_size + jnp.arange(page_size, dtype=jnp.int32)
    return cache[slots.reshape(*pages.shape[:-1], -1)]


def paged_attention_decode(
    q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, length: jax.Array, page_size: int
) -> jax.Array:
    """One token a row over the keys of its request.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`.
        pages: `[R, P]` int32, the row's page table; unused entries point at page 0.
        length: `[R]` int32, keys that the row sees, its own included; 0 for padding (output 0).
        page_size: tokens a page.
    """
    k, v = _read_pages(keys, pages, page_size), _read_pages(values, pages, page_size)
    visible = jnp.arange(k.shape[1]) < length[:, None]
    # Selected away: cells behind a row's length may hold anything, NaN too.
    v = jnp.where(visible[..., None, None], v, jnp.zeros((), v.dtype))
    return _attend(q[:, None], k, v, visible[:, None])[:, 0]


def paged_attention_packed(
    q: jax.Array, keys: jax.Array, values: jax.Array, page_table: jax.Array, segments: Segments, page_size: int
) -> jax.Array:
    """Packed rows, each over the keys of its request up to its own position.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`, with the rows' own keys already written.
        page_table: `[segments, P]` int32.
        segments: which rows belong together, and their positions.

    Returns:
        `[R, A, D]` float32, zeros on rows of no segment.
    """
    rows = q.shape[0]

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        chunk = chunk_at(segments, index, rows)
        pages = page_table[chunk.segment]
        k, v = _read_pages(keys, pages, page_size), _read_pages(values, pages, page_size)
        position = segments.position[chunk.segment] + chunk.offset + jnp.arange(chunk.rows.shape[0])
        seen = jnp.arange(k.shape[0])
        end = segments.position[chunk.segment] + segments.length[chunk.segment]
        v = jnp.where((seen < end)[:, None, None], v, jnp.zeros((), v.dtype))
        piece = _attend(q[chunk.rows], k, v, (seen <= position[:, None]) & chunk.live[:, None])
        return out.at[jnp.where(chunk.live, chunk.rows, rows)].set(piece, mode="drop")

    return jax.lax.fori_loop(0, count_chunks(segments), body, jnp.zeros(q.shape, jnp.float32))

"""Grouped-query attention: over whole sequences, over pages for one token a row, and for packed rows.

Scores are q k / sqrt(D); softmax and its sums are float32; query head a reads KV head a // (A / G).
The output projection is the model's, and so is the gate, except where a function takes one. Outputs are
float32 `[..., A, D]` without a gate.

A decoding row's keys are cut into a fixed number of segments, which are attended apart and combined
(`paged_attention_segmented`). How a row is cut (`cut`) depends on its own length and nothing else, so
that its output does not depend on the batch it is in or on the room its cache has.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.segments import Segments, chunk_at, count_chunks

HIGHEST = jax.lax.Precision.HIGHEST
BLOCK = 32
"""Keys that a segment takes at a time: what compiles without spills on every target."""
DEAD = -1e30
"""The score of a key that is not there, and the running maximum of no keys."""
LOG2E = math.log2(math.e)


def cut(length: jax.Array, segments: int) -> tuple[jax.Array, jax.Array]:
    """How the keys of a row are cut: (blocks of `BLOCK` keys in the row, blocks of one segment).

    Segment s takes the blocks from s * width, `width` of them or what is left: from width blocks on to none.
    Short rows so spread over many segments, and long rows still fit into all of them.
    """
    blocks = (length + (BLOCK - 1)) // BLOCK
    return blocks, (blocks + (segments - 1)) // segments


def apply_gate(out: jax.Array, gate: jax.Array | None) -> jax.Array:
    """out float32 times sigmoid(gate), rounded once to the gate's dtype; without a gate out as it is."""
    if gate is None:
        return out
    return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(gate.dtype)


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


def paged_attention_segmented(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    page_size: int,
    gate: jax.Array | None = None,
    attention_pin: int = 4096,
    attention_segment: int = 256,
) -> jax.Array:
    """`paged_attention_decode` in segments, whose unnormalised parts are combined, and the gate.

    The definition of what the kernels compute, in the same order: every segment goes through its blocks
    with a running maximum and sum.

    Args:
        q, keys, values, length, page_size: as `paged_attention_decode` takes them.
        pages: `[N, P]` int32, N a divisor of R: each is the page table of R / N rows that follow each other.
        gate: `[R, A, D]`, or None.
        attention_pin, attention_segment: every row is cut into attention_pin / attention_segment segments,
            which have attention_segment keys at length attention_pin.

    Returns:
        `[R, A, D]`, float32 without a gate, rounded once to the gate's dtype with it.
    """
    rows, heads, dim = q.shape
    groups, segments = keys.shape[1], attention_pin // attention_segment
    precision = HIGHEST if q.dtype == jnp.float32 else None
    q_groups = q.reshape(rows, groups, heads // groups, dim)
    pages = jnp.repeat(pages, rows // pages.shape[0], axis=0)
    length = jnp.minimum(length, pages.shape[1] * page_size)
    _, width = cut(length, segments)
    first = jnp.arange(segments) * width[:, None]

    def body(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, peak, total = carry
        key = (first + index)[..., None] * BLOCK + jnp.arange(BLOCK)
        live = (index < width)[:, None, None] & (key < length[:, None, None])
        page = jnp.take_along_axis(pages, jnp.where(live, key // page_size, 0).reshape(rows, -1), axis=1)
        slot = jnp.where(live, page.reshape(live.shape) * page_size + key % page_size, 0)
        # Selected away: slots that are not the row's may hold anything, NaN too.
        k, v = keys[slot], jnp.where(live[..., None, None], values[slot], jnp.zeros((), values.dtype))
        scores = jnp.einsum("rgpd,rsbgd->rsgpb", q_groups, k, precision=precision, preferred_element_type=jnp.float32)
        live = live[:, :, None, None, :]
        scores = jnp.where(live, scores * (dim**-0.5 * LOG2E), DEAD)
        higher = jnp.maximum(peak, jnp.max(scores, axis=-1))
        weights = jnp.where(live, jnp.exp2(scores - higher[..., None]), 0.0)
        shrink = jnp.exp2(peak - higher)
        piece = jnp.einsum("rsgpb,rsbgd->rsgpd", weights, v.astype(jnp.float32), precision=HIGHEST)
        return out * shrink[..., None] + piece, higher, total * shrink + jnp.sum(weights, axis=-1)

    shape = (rows, segments, groups, heads // groups)
    empty = (jnp.zeros((*shape, dim)), jnp.full(shape, DEAD), jnp.zeros(shape))
    out, peak, total = jax.lax.fori_loop(0, jnp.max(width, initial=0), body, empty)
    weights = jnp.exp2(peak - jnp.max(peak, axis=1, keepdims=True))
    total = jnp.maximum(jnp.sum(total * weights, axis=1), 1e-30)
    out = jnp.sum(out * weights[..., None], axis=1) / total[..., None]
    return apply_gate(out.reshape(rows, heads, dim), gate)


def paged_attention_packed(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    segments: Segments,
    page_size: int,
    gate: jax.Array | None = None,
) -> jax.Array:
    """Packed rows, each over the keys of its request up to its own position.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`, with the rows' own keys already written.
        page_table: `[segments, P]` int32.
        segments: which rows belong together, and their positions.
        page_size: tokens a page.
        gate: `[R, A, D]`, or None.

    Returns:
        `[R, A, D]`, float32 without a gate, rounded once to the gate's dtype with it; zeros on rows of no
        segment.
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

    out = jax.lax.fori_loop(0, count_chunks(segments), body, jnp.zeros(q.shape, jnp.float32))
    return apply_gate(out, gate)

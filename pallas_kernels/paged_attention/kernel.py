"""Paged attention for one token a row: one launch over segments of the keys, one that combines them.

A program of the first kernel takes one segment of one row and one KV head, for all query heads that share
it, padded to at least 16 because that is the least a matrix unit takes. It leaves its unnormalised output with its maximum and
sum, float32; a segment without keys leaves nothing, and the second kernel, which cuts the row in the same
way, does not look at it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.reference import BLOCK, DEAD, HIGHEST, LOG2E, apply_gate, cut
from pallas_kernels.triton_backend import Warps, launch, load, store

SEGMENT_WARPS = Warps(wave64=4, wave32=4)
COMBINE_WARPS = Warps(wave64=4, wave32=4)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q `[heads, D]` times k `[keys, D]`: exact products, float32 sums."""
    precision = HIGHEST if q.dtype == jnp.float32 else None
    contract = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q, k, contract, precision=precision, preferred_element_type=jnp.float32)


def _weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 weights in [0, 1] `[heads, keys]` times v `[keys, D]`."""
    if v.dtype == jnp.float32:
        return jnp.dot(weights, v, precision=HIGHEST)
    # Two bfloat16 parts carry 17 bits of a weight. The first is rounded on its bits, because a
    # compiler may drop a conversion there and back.
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    rounded = jax.lax.bitcast_convert_type((bits + 0x8000) & -0x10000, jnp.float32)
    high, low = rounded.astype(v.dtype), (weights - rounded).astype(v.dtype)
    return jnp.dot(low, v, preferred_element_type=jnp.float32) + jnp.dot(high, v, preferred_element_type=jnp.float32)


def _segment(
    q_ref: Any,
    keys: Any,
    values: Any,
    pages: Any,
    lengths: Any,
    out: Any,
    peaks: Any,
    totals: Any,
    *,
    shared: int,
    padded: int,
    page_size: int,
    segments: int,
) -> None:
    groups, dim = keys.shape[1:]
    # KV heads of a row next to each other: their keys lie side by side in memory.
    row, group = jax.lax.div(pl.program_id(0), groups), jax.lax.rem(pl.program_id(0), groups)
    segment = pl.program_id(1)
    length = jnp.minimum(lengths[row], pages.shape[1] * page_size)
    blocks, width = cut(length, segments)
    first = segment * width
    dtype = jnp.promote_types(q_ref.dtype, keys.dtype)

    @pl.when(first < blocks)
    def _() -> None:
        heads = pl.ds(group * shared, padded)
        real = jnp.arange(padded) < shared
        import os
        PIECE = min(dim, int(os.environ.get("PIECE", "64")))

        def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            key = block * BLOCK + jnp.arange(BLOCK)
            live = key < length
            if page_size % BLOCK == 0:
                page = pages[row, jax.lax.div(block * BLOCK, page_size)]
            else:
                page = pages[row, jax.lax.div(jnp.where(live, key, 0), page_size)]
            # Dead keys of a page read that page: a legal place, whose contents are selected away.
            slot = page * page_size + jax.lax.rem(key, page_size)
            # Values first: keys go into the product at once, and what is loaded behind them waits for that.
            v = values[slot, group, :].astype(dtype)
            ks = [keys[slot, group, pl.ds(o, PIECE)].astype(dtype) for o in range(0, dim, PIECE)]
            if os.environ.get("SEL"):
                ks = [jnp.where(live[:, None], k, jnp.zeros((), dtype)) for k in ks]
            sc = 0.0
            for o, k in zip(range(0, dim, PIECE), ks):
                q = load(q_ref.at[row, heads, pl.ds(o, PIECE)], mask=real[:, None], other=0.0, volatile=bool(os.environ.get("VOL"))).astype(dtype)
                sc = sc + _scores(q, k)
            scores = jnp.where(live[None, :], sc * (dim**-0.5 * LOG2E), DEAD)
            v = jnp.where(live[:, None], v, jnp.zeros((), dtype))
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - higher[:, None])
            shrink = jnp.exp2(peak - higher)
            return acc * shrink[:, None] + _weigh(weights, v), higher, total * shrink + jnp.sum(weights, axis=1)

        empty = (
            jnp.zeros((padded, dim), jnp.float32),
            jnp.full((padded,), DEAD, jnp.float32),
            jnp.zeros((padded,), jnp.float32),
        )
        acc, peak, total = jax.lax.fori_loop(first, jnp.minimum(first + width, blocks), body, empty)
        store(out.at[row, segment, heads, :], acc, mask=real[:, None])
        store(peaks.at[row, segment, heads], peak, mask=real)
        store(totals.at[row, segment, heads], total, mask=real)


def _combine(lengths: Any, parts: Any, peaks: Any, totals: Any, *rest: Any, capacity: int) -> None:
    *gate, out = rest
    row, head = pl.program_id(0), pl.program_id(1)
    segments = parts.shape[1]
    blocks, width = cut(jnp.minimum(lengths[row], capacity), segments)
    live = jnp.arange(segments) * width < blocks
    peak = load(peaks.at[row, :, head], mask=live, other=DEAD)
    total = load(totals.at[row, :, head], mask=live, other=0.0)
    part = load(parts.at[row, :, head, :], mask=live[:, None], other=0.0)
    weights = jnp.exp2(peak - jnp.max(peak))
    result = jnp.sum(part * weights[:, None], axis=0) / jnp.maximum(jnp.sum(total * weights), 1e-30)
    out[row, head, :] = apply_gate(result, gate[0][row, head, :] if gate else None)


def paged_attention_decode(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    page_size: int,
    gate: jax.Array | None,
    attention_pin: int,
    attention_segment: int,
    interpret: bool,
) -> jax.Array:
    """See `paged_attention_segmented` in the reference; D, page_size and the segments must be powers of two."""
    rows, heads, dim = q.shape
    groups, segments = keys.shape[1], attention_pin // attention_segment
    shared = heads // groups
    capacity = pages.shape[1] * page_size
    partial = jax.ShapeDtypeStruct((rows, segments, heads), jnp.float32)
    read = rows * min(capacity, attention_pin)  # keys, as far as one can tell without the lengths
    parts = launch(
        functools.partial(
            _segment,
            shared=shared,
            padded=max(16, pl.next_power_of_2(shared)),
            page_size=page_size,
            segments=segments,
        ),
        [q, keys, values, pages, length],
        name="attention_segment",
        grid=(rows * groups, segments),
        out_shape=[jax.ShapeDtypeStruct((*partial.shape, dim), jnp.float32), partial, partial],
        warps=SEGMENT_WARPS,
        cost=pl.CostEstimate(
            flops=4 * read * heads * dim,
            transcendentals=read * heads,
            bytes_accessed=2 * read * groups * dim * keys.dtype.itemsize + 4 * partial.size * dim,
        ),
        interpret=interpret,
    )
    out_dtype = jnp.float32 if gate is None else gate.dtype
    (out,) = launch(
        functools.partial(_combine, capacity=capacity),
        [length, *parts, *([] if gate is None else [gate])],
        name="attention_combine",
        grid=(rows, heads),
        out_shape=[jax.ShapeDtypeStruct(q.shape, out_dtype)],
        warps=COMBINE_WARPS,
        cost=pl.CostEstimate(
            flops=3 * partial.size * dim, transcendentals=partial.size + q.size, bytes_accessed=4 * partial.size * dim
        ),
        interpret=interpret,
    )
    return out

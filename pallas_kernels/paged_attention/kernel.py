"""Paged attention for one token a row: one launch over segments of the keys, one that combines them.

A program of the first kernel takes one segment of one row and one KV head, for all query heads that share
it, padded to at least 16, the least that a matrix unit takes. In float32, which most matrix units do not
take without rounding, it takes one query head and multiplies and sums. It leaves its unnormalised output
with its maximum and sum, float32; a segment without keys leaves nothing, and the second kernel, which cuts
the row in the same way, does not look at it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.reference import BLOCK, DEAD, LOG2E, apply_gate, cut
from pallas_kernels.triton_backend import Warps, device_kind, launch, load, store

SEGMENT_WARPS = Warps(wave64=4, wave32=4)
COMBINE_WARPS = Warps(wave64=4, wave32=4)
PIECE = 128
"""Dimensions of a key that enter one product: whole heads of 256 need more registers than gfx11 has."""


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q `[heads, D]` times k `[keys, D]` of one dtype: exact products, float32 sums."""
    if q.dtype == jnp.float32:
        return jnp.sum(q[:, None, :] * k[None, :, :], axis=2)
    return jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 weights in [0, 1] `[heads, keys]` times v `[keys, D]`, float32."""
    if v.dtype == jnp.float32:
        return jnp.sum(weights[:, :, None] * v[None, :, :], axis=1)
    # Two bfloat16 parts carry 17 bits of a weight. The first is rounded on its bits, because a compiler
    # may drop a conversion there and back.
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
    taken: int,
    padded: int,
    page_size: int,
    segments: int,
    read_again: bool,
) -> None:
    """`taken` query heads a program, in blocks of `padded`; `read_again`: q is loaded for every block of keys."""
    all_heads, dim = q_ref.shape[1:]
    # Programs of a row lie next to each other, as their keys do in memory.
    parts = all_heads // taken
    row, part = jax.lax.div(pl.program_id(0), parts), jax.lax.rem(pl.program_id(0), parts)
    group = jax.lax.div(part * taken, all_heads // keys.shape[1])
    segment = pl.program_id(1)
    length = jnp.minimum(lengths[row], pages.shape[1] * page_size)
    blocks, width = cut(length, segments)
    first = segment * width
    dtype = jnp.promote_types(q_ref.dtype, keys.dtype)
    pieces = [(start, min(PIECE, dim)) for start in range(0, dim, PIECE)]

    @pl.when(first < blocks)
    def _() -> None:
        heads = part * taken
        real = jnp.arange(padded) < taken

        def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            key = block * BLOCK + jnp.arange(BLOCK)
            live = key < length
            if page_size % BLOCK == 0:
                page = pages[row, jax.lax.div(block * BLOCK, page_size)]
            else:
                page = pages[row, jax.lax.div(jnp.where(live, key, 0), page_size)]
            # Dead keys read the page all the same: a legal place, whose contents are selected away.
            slot = page * page_size + jax.lax.rem(key, page_size)
            dead = jnp.zeros((), dtype)
            # Everything is under way before anything is waited for: the compiler moves what a product takes
            # to just behind its load, but for what a select holds back. (So keys are selected, too.)
            v = values[slot, group, :].astype(dtype)
            loaded = [keys[slot, group, pl.ds(*piece)].astype(dtype) for piece in pieces]
            scores = jnp.zeros((padded, BLOCK), jnp.float32)
            for piece, k in zip(pieces, loaded, strict=True):
                # block >= 0, which compilers don't know: to them the address changes.
                start = heads + jnp.minimum(block, 0) if read_again else heads
                q = load(q_ref.at[row, pl.ds(start, padded), pl.ds(*piece)], mask=real[:, None], other=0.0)
                scores += _scores(q.astype(dtype), jnp.where(live[:, None], k, dead))
            scores = jnp.where(live[None, :], scores * (dim**-0.5 * LOG2E), DEAD)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - higher[:, None])
            shrink = jnp.exp2(peak - higher)
            acc = acc * shrink[:, None] + _weigh(weights, jnp.where(live[:, None], v, dead))
            return acc, higher, total * shrink + jnp.sum(weights, axis=1)

        empty = (
            jnp.zeros((padded, dim), jnp.float32),
            jnp.full((padded,), DEAD, jnp.float32),
            jnp.zeros((padded,), jnp.float32),
        )
        acc, peak, total = jax.lax.fori_loop(first, jnp.minimum(first + width, blocks), body, empty)
        store(out.at[row, segment, pl.ds(heads, padded), :], acc, mask=real[:, None])
        store(peaks.at[row, segment, pl.ds(heads, padded)], peak, mask=real)
        store(totals.at[row, segment, pl.ds(heads, padded)], total, mask=real)


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
    capacity = pages.shape[1] * page_size
    partial = jax.ShapeDtypeStruct((rows, segments, heads), jnp.float32)
    read = rows * min(capacity, attention_pin)  # keys, as far as one can tell without the lengths
    exact = jnp.promote_types(q.dtype, keys.dtype) == jnp.float32
    taken = 1 if exact else heads // groups
    padded = 1 if exact else max(16, pl.next_power_of_2(taken))
    # AMD's matrix units take operands from registers, where q would stay for the whole loop; NVIDIA's read
    # them from shared memory.
    read_again = device_kind().lower().startswith("gfx")
    parts = launch(
        functools.partial(
            _segment, taken=taken, padded=padded, page_size=page_size, segments=segments, read_again=read_again
        ),
        [q, keys, values, pages, length],
        name="attention_segment",
        grid=(rows * (heads // taken), segments),
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

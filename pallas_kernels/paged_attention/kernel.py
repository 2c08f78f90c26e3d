"""Paged attention for rows that each see a number of keys: one launch over segments of the keys, one that combines.

A program of the first kernel takes one segment and one KV head, for all query heads that share it, and for rows of one
request together, which so read its keys once: padded to at least 16 queries, the least that a matrix unit takes. In
float32, which most matrix units do not take without rounding, it takes one query head of one row and multiplies and
sums. It leaves its unnormalised output with its maximum and sum, float32. Every row is cut by its own length: the
program goes through the blocks that any of its rows has in the segment, and each row sees those of its own. What a row
without keys in the segment leaves, if anything, the second kernel does not look at: it cuts the row in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.reference import BLOCK, DEAD, LOG2E, apply_gate, cut
from pallas_kernels.products import COLUMNS, ROWS, operands, product
from pallas_kernels.triton_backend import Warps, device_kind, launch, load, store

SEGMENT_WARPS = Warps(wave64=4, wave32=4)
SHARED_WARPS_AMD = Warps(wave64=4, wave32=16)
"""Of segments that rows share, whose queries' ends take registers that gfx11 does not have with fewer warps."""
COMBINE_WARPS = Warps(wave64=4, wave32=4)
MOST_QUERIES = 32
"""Queries of a program where rows share one, query heads times rows: 64 spill registers on gfx11 and on NVIDIA."""
PIECE = 128
"""Dimensions of a key that enter one product: whole heads of 256 need more registers than gfx11 has."""


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q `[queries, D]` times k `[keys, D]` of one dtype: exact products, float32 sums."""
    if q.dtype == jnp.float32:
        return jnp.sum(q[:, None, :] * k[None, :, :], axis=2)
    return product(q, k, (COLUMNS, COLUMNS))


def _weigh(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Float32 weights in [0, 1] `[queries, keys]`, of which 17 bits count beside bfloat16, times v `[keys, D]`."""
    if v.dtype == jnp.float32:
        return jnp.sum(weights[:, :, None] * v[None, :, :], axis=1)
    low, high = operands(weights, v.dtype)
    return product(low, v, (COLUMNS, ROWS)) + product(high, v, (COLUMNS, ROWS))


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
    heads: int,
    taken: int,
    together: int,
    deals: int,
    padded: int,
    page_size: int,
    segments: int,
    read_again: bool,
) -> None:
    """q is `[R A, D]`; out `[R segments A, D]`, peaks and totals `[R segments A]`.

    A program takes `taken` query heads of each of `together` rows, `padded` in all, and `deals` programs take the rows
    of a request; `read_again`: q is loaded for every block of keys.
    """
    dim = q_ref.shape[1]
    # Programs of a row lie next to each other, as their keys do in memory.
    parts = heads // taken
    index, part = jax.lax.div(pl.program_id(0), parts), jax.lax.rem(pl.program_id(0), parts)
    request, first_row = jax.lax.div(index, deals), index * together
    group = jax.lax.div(part * taken, heads // keys.shape[1])
    segment = pl.program_id(1)

    query = jnp.arange(padded)
    within = jax.lax.div(query, taken)
    row, head = first_row + within, part * taken + query - within * taken
    place = row * heads + head
    real = within < together

    def of_queries(of_rows: Iterable[jax.Array]) -> jax.Array:
        first, *others = of_rows
        for t, value in enumerate(others, 1):
            first = jnp.where(within[:, None] == t, value, first)
        return first

    length = [jnp.minimum(lengths[first_row + t], pages.shape[1] * page_size) for t in range(together)]
    longest = functools.reduce(jnp.maximum, length)
    cuts = [cut(n, segments) for n in length]
    starts = [segment * width for _, width in cuts]
    ends = [jnp.minimum(start + width, blocks) for start, (blocks, width) in zip(starts, cuts, strict=True)]
    last = functools.reduce(jnp.maximum, ends)
    first = functools.reduce(jnp.minimum, [jnp.where(s < e, s, last) for s, e in zip(starts, ends, strict=True)])
    seen_from = of_queries(start * BLOCK for start in starts)
    seen_to = of_queries(jnp.minimum(end * BLOCK, n) for end, n in zip(ends, length, strict=True))
    dtype = jnp.promote_types(q_ref.dtype, keys.dtype)
    width = min(PIECE, dim)
    pieces = [pl.ds(start, width) for start in range(0, dim, width)]

    @pl.when(first < last)
    def _() -> None:
        def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            key = block * BLOCK + jnp.arange(BLOCK)
            live = key < longest
            if page_size % BLOCK == 0:
                page = pages[request, jax.lax.div(block * BLOCK, page_size)]
            else:
                page = pages[request, jax.lax.div(jnp.where(live, key, 0), page_size)]
            # Dead keys read the page all the same: a legal place, whose contents are selected away.
            slot = page * page_size + jax.lax.rem(key, page_size)
            dead = jnp.zeros((), dtype)
            # Everything is under way before anything is waited for: the compiler moves what a product takes
            # to just behind its load, but for what a select holds back. (So keys are selected, too.)
            v = values[slot, group, :].astype(dtype)
            loaded = [keys[slot, group, piece].astype(dtype) for piece in pieces]
            scores = jnp.zeros((padded, BLOCK), jnp.float32)
            for piece, k in zip(pieces, loaded, strict=True):
                # block >= 0, which compilers don't know: to them the address changes.
                again = place + jnp.minimum(block, 0) if read_again else place
                columns = piece.start + jnp.arange(width)[None, :]
                q = load(q_ref.at[again[:, None], columns], mask=real[:, None], other=0.0)
                scores += _scores(q.astype(dtype), jnp.where(live[:, None], k, dead))
            # One row sees all of the blocks; a vector less lives in the loop.
            visible = (key[None, :] >= seen_from) & (key[None, :] < seen_to) if together > 1 else live[None, :]
            # What a row gathers before it sees a key is multiplied by 0 once it does.
            scores = jnp.where(visible, scores * (dim**-0.5 * LOG2E), DEAD)
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
        acc, peak, total = jax.lax.fori_loop(first, last, body, empty)
        target = (row * segments + segment) * heads + head
        store(out.at[target[:, None], jnp.arange(dim)[None, :]], acc, mask=real[:, None])
        store(peaks.at[target], peak, mask=real)
        store(totals.at[target], total, mask=real)


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
    flat = jax.ShapeDtypeStruct((rows * segments * heads,), jnp.float32)
    read = rows * min(capacity, attention_pin)  # keys, as far as one can tell without the lengths
    exact = jnp.promote_types(q.dtype, keys.dtype) == jnp.float32
    sharing = rows // pages.shape[0]
    taken = 1 if exact else heads // groups
    # As many rows as fit into a program and leave the others of their request in programs as full.
    fits = [n for n in range(2, sharing + 1) if sharing % n == 0 and n * taken <= MOST_QUERIES and not exact]
    together = max(fits, default=1)
    padded = 1 if exact else max(16, pl.next_power_of_2(taken * together))
    # AMD's matrix units take operands from registers, where q would stay for the whole loop; NVIDIA's read
    # them from shared memory.
    amd = device_kind().lower().startswith("gfx")
    parts = launch(
        functools.partial(
            _segment,
            heads=heads,
            taken=taken,
            together=together,
            deals=sharing // together,
            padded=padded,
            page_size=page_size,
            segments=segments,
            read_again=amd,
        ),
        [q.reshape(rows * heads, dim), keys, values, pages, length],
        name="attention_segment",
        grid=(rows // together * (heads // taken), segments),
        out_shape=[jax.ShapeDtypeStruct((rows * segments * heads, dim), jnp.float32), flat, flat],
        warps=SHARED_WARPS_AMD if amd and together > 1 else SEGMENT_WARPS,
        cost=pl.CostEstimate(
            flops=4 * read * heads * dim,
            transcendentals=read * heads,
            bytes_accessed=2 * read // together * groups * dim * keys.dtype.itemsize + 4 * flat.size * dim,
        ),
        interpret=interpret,
    )
    out_dtype = jnp.float32 if gate is None else gate.dtype
    (out,) = launch(
        functools.partial(_combine, capacity=capacity),
        [length, *(x.reshape(rows, segments, heads, *x.shape[1:]) for x in parts), *([] if gate is None else [gate])],
        name="attention_combine",
        grid=(rows, heads),
        out_shape=[jax.ShapeDtypeStruct(q.shape, out_dtype)],
        warps=COMBINE_WARPS,
        cost=pl.CostEstimate(
            flops=3 * flat.size * dim, transcendentals=flat.size + q.size, bytes_accessed=4 * flat.size * dim
        ),
        interpret=interpret,
    )
    return out

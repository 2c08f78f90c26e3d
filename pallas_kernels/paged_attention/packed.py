"""Paged attention for packed rows: one launch, a program a KV head and chunk of a request.

A program takes `TILE` queries: all query heads of one KV head for as many rows as fit. It goes through the
request's keys in blocks, from the first one up to its last row's own, with a running maximum and sum. How a
request is cut is its own affair, and blocks behind a row's position leave it as it is, so that the row's bits
depend on no other request.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.reference import BLOCK, DEAD, LOG2E, apply_gate
from pallas_kernels.products import COLUMNS, ROWS, operands, product
from pallas_kernels.segments import Segments, chunk_table, owned_rows
from pallas_kernels.triton_backend import Warps, device_kind, launch, load, store

TILE = 64
"""Queries of one program."""
PIECE = 128
"""Dimensions of a key that enter one product."""
WARPS = Warps(wave64=4, wave32=8)


def _packed(
    chunks: Any,
    owned: Any,
    q: Any,
    keys: Any,
    values: Any,
    pages: Any,
    *rest: Any,
    heads: int,
    page_size: int,
    read_again: bool,
) -> None:
    """q, gate and the output are `[R A, D]`, a row's heads one after the other."""
    *gate, out = rest
    group, n = pl.program_id(0), pl.program_id(1)
    groups, dim = keys.shape[1:]
    shared = heads // groups
    size = TILE // shared
    query = jax.lax.iota(jnp.int32, TILE)
    within, head = jax.lax.div(query, shared), group * shared + jax.lax.rem(query, shared)
    columns = jax.lax.iota(jnp.int32, dim)[None, :]
    nowhere = q.shape[0]

    def put(live: jax.Array, row: jax.Array, value: jax.Array) -> None:
        place = jnp.where(live, row * heads + head, nowhere)
        store(out.at[place[:, None], columns], value.astype(out.dtype), mask=live[:, None])

    row = n * size + within
    inside = (within < size) & (row < owned.shape[0])
    put(inside & (load(owned.at[row], mask=inside, other=1) == 0), row, jnp.zeros((TILE, dim), jnp.float32))

    start, count, segment, position = (chunks[n, column] for column in range(4))

    @pl.when(count > 0)
    def _() -> None:
        live = within < count
        # Queries of no row are those of the chunk's first row over again, and are stored nowhere.
        place = (start + jnp.where(live, within, 0)) * heads + head
        seen = position + within
        end = jnp.minimum(position + count, pages.shape[1] * page_size)
        dtype = jnp.promote_types(q.dtype, keys.dtype)
        pieces = [pl.ds(first, min(PIECE, dim)) for first in range(0, dim, PIECE)]

        def body(block: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc, peak, total = carry
            key = block * BLOCK + jax.lax.iota(jnp.int32, BLOCK)
            held = key < end
            if page_size % BLOCK == 0:
                page = pages[segment, jax.lax.div(block * BLOCK, page_size)]
            else:
                page = pages[segment, jax.lax.div(jnp.where(held, key, 0), page_size)]
            # Keys from the end on are read in a legal place, which may hold NaN: selected away.
            slot = page * page_size + jax.lax.rem(key, page_size)
            v = values[slot, group, :].astype(dtype)
            loaded = [keys[slot, group, columns].astype(dtype) for columns in pieces]
            scores = jnp.zeros((TILE, BLOCK), jnp.float32)
            for columns, k in zip(pieces, loaded, strict=True):
                # block >= 0, which compilers don't know: to them the address changes.
                again = place + jnp.minimum(block, 0) if read_again else place
                scores += product(q[again, columns].astype(dtype), k, (COLUMNS, COLUMNS))
            visible = (key[None, :] <= seen[:, None]) & held[None, :]
            scores = jnp.where(visible, scores * (dim**-0.5 * LOG2E), DEAD)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - higher[:, None])
            shrink = jnp.exp2(peak - higher)
            acc = acc * shrink[:, None]
            v = jnp.where(held[:, None], v, jnp.zeros((), dtype))
            for piece in operands(weights, dtype):
                acc += product(piece, v, (COLUMNS, ROWS))
            return acc, higher, total * shrink + jnp.sum(weights, axis=1)

        empty = (
            jnp.zeros((TILE, dim), jnp.float32),
            jnp.full((TILE,), DEAD, jnp.float32),
            jnp.zeros((TILE,), jnp.float32),
        )
        # Every row sees its request's first key, so that no total is 0.
        acc, _, total = jax.lax.fori_loop(0, jax.lax.div(end + (BLOCK - 1), BLOCK), body, empty)
        result = acc / total[:, None]
        put(live, start + within, apply_gate(result, gate[0][place, :] if gate else None))


def paged_attention_packed(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    segments: Segments,
    page_size: int,
    gate: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """See the reference; D and page_size must be powers of two, and at most `TILE` heads share a KV head."""
    rows, heads, dim = q.shape
    groups = keys.shape[1]
    size = TILE * groups // heads
    chunks = chunk_table(segments, rows, size)
    flat = [array.reshape(rows * heads, dim) for array in (q, *([] if gate is None else [gate]))]
    # Keys as far as one can tell without the positions: each window its own.
    read = chunks.shape[0] * groups * rows
    (out,) = launch(
        functools.partial(
            _packed, heads=heads, page_size=page_size, read_again=device_kind().lower().startswith("gfx")
        ),
        [chunks, owned_rows(segments, rows), flat[0], keys, values, page_table, *flat[1:]],
        name="attention_packed",
        grid=(groups, chunks.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(flat[0].shape, jnp.float32 if gate is None else gate.dtype)],
        warps=WARPS,
        cost=pl.CostEstimate(
            flops=4 * TILE * read * dim // 2,
            transcendentals=TILE * read // 2,
            bytes_accessed=read * dim * keys.dtype.itemsize + 3 * q.size * q.dtype.itemsize,
        ),
        interpret=interpret,
    )
    return out.reshape(q.shape)

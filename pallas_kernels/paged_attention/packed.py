"""Paged attention for packed rows: one launch, a program a KV head and chunk of a request.

A program takes the queries of a `Tile`: all query heads of one KV head for as many rows as fit. It goes through the
request's keys in blocks, from the first one up to its last row's own, with a running maximum and sum. How a
request is cut is its own affair, and blocks behind a row's position leave it as it is, so that the row's bits
depend on no other request.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.reference import BLOCK, DEAD, LOG2E, apply_gate
from pallas_kernels.products import COLUMNS, ROWS, operands, product
from pallas_kernels.segments import Segments, chunk_table, owned_rows
from pallas_kernels.triton_backend import Warps, device_kind, launch, load, store


@dataclasses.dataclass(frozen=True)
class Tile:
    """Queries of one program, and the dimensions of a head that are multiplied at a time: as many as registers hold
    on every target, with so many warps."""

    queries: int
    piece: int
    amd: Warps
    nvidia: Warps


def tile_for(q: jax.Array, keys: jax.Array) -> Tile:
    """bfloat16 products run on matrix units. Float32 takes more registers and is no dtype for speed."""
    if jnp.promote_types(q.dtype, keys.dtype) == jnp.float32:
        return Tile(16, 32, Warps(wave64=4, wave32=16), Warps(wave64=4, wave32=8))
    return Tile(64, 64, Warps(wave64=4, wave32=16), Warps(wave64=4, wave32=4))


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
    tile: Tile,
    read_again: bool,
) -> None:
    """q, gate and the output are `[R A, D]`, a row's heads one after the other."""
    *gate, out = rest
    group, n = pl.program_id(0), pl.program_id(1)
    groups, dim = keys.shape[1:]
    shared = heads // groups
    size = tile.queries // shared
    query = jax.lax.iota(jnp.int32, tile.queries)
    within, head = jax.lax.div(query, shared), group * shared + jax.lax.rem(query, shared)
    nowhere = q.shape[0]
    width = min(tile.piece, dim)
    pieces = [pl.ds(first, width) for first in range(0, dim, width)]

    def put(live: jax.Array, row: jax.Array, piece: Any, value: jax.Array) -> None:
        place = jnp.where(live, row * heads + head, nowhere)[:, None]
        columns = (piece.start + jax.lax.iota(jnp.int32, width))[None, :]
        store(out.at[place, columns], value.astype(out.dtype), mask=live[:, None])

    row = n * size + within
    inside = (within < size) & (row < owned.shape[0])
    unowned = inside & (load(owned.at[row], mask=inside, other=1) == 0)
    for piece in pieces:
        put(unowned, row, piece, jnp.zeros((tile.queries, width), jnp.float32))

    start, count, segment, position = (chunks[n, column] for column in range(4))

    @pl.when(count > 0)
    def _() -> None:
        live = within < count
        # Queries of no row are those of the chunk's first row over again, and are stored nowhere.
        place = (start + jnp.where(live, within, 0)) * heads + head
        seen = position + within
        end = jnp.minimum(position + count, pages.shape[1] * page_size)
        dtype = jnp.promote_types(q.dtype, keys.dtype)

        def body(block: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            parts, peak, total = carry
            key = block * BLOCK + jax.lax.iota(jnp.int32, BLOCK)
            held = key < end
            if page_size % BLOCK == 0:
                page = pages[segment, jax.lax.div(block * BLOCK, page_size)]
            else:
                page = pages[segment, jax.lax.div(jnp.where(held, key, 0), page_size)]
            # Keys from the end on are read in a legal place, which may hold NaN: selected away.
            slot = page * page_size + jax.lax.rem(key, page_size)

            def read(cache: Any) -> list[jax.Array]:
                return [cache[slot, group, piece].astype(dtype) for piece in pieces]

            def held_of(x: jax.Array) -> jax.Array:
                return jnp.where(held[:, None], x, jnp.zeros((), dtype))

            # Everything is under way before a select or a product waits for any of it.
            k, v = read(keys), read(values)
            scores = jnp.zeros((tile.queries, BLOCK), jnp.float32)
            for piece, k_piece in zip(pieces, k, strict=True):
                # block >= 0, which compilers don't know: to them the address changes.
                again = place + jnp.minimum(block, 0) if read_again else place
                scores += product(q[again, piece].astype(dtype), held_of(k_piece), (COLUMNS, COLUMNS))
            visible = (key[None, :] <= seen[:, None]) & held[None, :]
            scores = jnp.where(visible, scores * (dim**-0.5 * LOG2E), DEAD)
            higher = jnp.maximum(peak, jnp.max(scores, axis=1))
            weights = jnp.exp2(scores - higher[:, None])
            shrink = jnp.exp2(peak - higher)
            split = operands(weights, dtype)
            for number, v_piece in enumerate(v):
                v_piece = held_of(v_piece)
                part = parts[number] * shrink[:, None]
                for x in split:
                    part += product(x, v_piece, (COLUMNS, ROWS))
                parts = (*parts[:number], part, *parts[number + 1 :])
            return parts, higher, total * shrink + jnp.sum(weights, axis=1)

        empty = (
            (jnp.zeros((tile.queries, width), jnp.float32),) * len(pieces),
            jnp.full((tile.queries,), DEAD, jnp.float32),
            jnp.zeros((tile.queries,), jnp.float32),
        )
        parts, _, total = jax.lax.fori_loop(0, jax.lax.div(end + (BLOCK - 1), BLOCK), body, empty)
        scale = 1 / jnp.maximum(total, 1e-30)
        for piece, part in zip(pieces, parts, strict=True):
            put(live, start + within, piece, apply_gate(part * scale[:, None], gate[0][place, piece] if gate else None))


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
    """See the reference; D and page_size must be powers of two. A KV head's query heads must fit into a `Tile`."""
    rows, heads, dim = q.shape
    groups = keys.shape[1]
    tile = tile_for(q, keys)
    size = tile.queries * groups // heads
    chunks = chunk_table(segments, rows, size)
    flat = [array.reshape(rows * heads, dim) for array in (q, *([] if gate is None else [gate]))]
    # AMD's matrix units take operands from registers, where q would stay for the whole loop.
    amd = device_kind().lower().startswith("gfx")
    # Keys that all programs read, as far as one can tell without the positions.
    read = chunks.shape[0] * groups * rows // 2
    (out,) = launch(
        functools.partial(_packed, heads=heads, page_size=page_size, tile=tile, read_again=amd),
        [chunks, owned_rows(segments, rows), flat[0], keys, values, page_table, *flat[1:]],
        name="attention_packed",
        grid=(groups, chunks.shape[0]),
        out_shape=[jax.ShapeDtypeStruct(flat[0].shape, jnp.float32 if gate is None else gate.dtype)],
        warps=tile.amd if amd else tile.nvidia,
        cost=pl.CostEstimate(
            flops=4 * tile.queries * read * dim,
            transcendentals=tile.queries * read,
            bytes_accessed=2 * read * dim * keys.dtype.itemsize + 3 * q.size * q.dtype.itemsize,
        ),
        interpret=interpret,
    )
    return out.reshape(q.shape)

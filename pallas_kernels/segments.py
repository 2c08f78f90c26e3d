"""How rows of a packed batch belong to requests, and how they are cut into chunks.

A packed batch is a flat list of rows; the rows of one request lie together and in order. Everything a
kernel needs to know about a request's rows is one entry of `Segments`, whose index is a number of its
own (the model uses the request's number).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

CHUNK = 64
"""Rows of one chunk of the delta rule, and of one query block of the attention reference."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """Int32 vectors with one entry a segment; a segment of length 0 takes no rows and changes nothing.

    * `start`: first row. `length`: number of rows.
    * `position`: tokens of the request before its first row (0: it has no state yet).
    * `slot`: recurrent slot that is read and written in place.
    """

    start: jax.Array
    length: jax.Array
    position: jax.Array
    slot: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of one segment: scalars, and per row of the chunk its index and whether it is live."""

    segment: jax.Array
    rows: jax.Array
    live: jax.Array
    offset: jax.Array  # rows of the segment before this chunk
    first: jax.Array
    last: jax.Array


def count_chunks(segments: Segments, size: int = CHUNK) -> jax.Array:
    """Chunks that all segments need together, a scalar."""
    return jnp.sum((segments.length + size - 1) // size)


def chunk_at(segments: Segments, index: jax.Array, rows: int, size: int = CHUNK) -> Chunk:
    """The chunk number `index`, counting through the segments in order of their entry.

    `rows` is the number of rows of the batch; a chunk that runs over its segment's end has rows that
    are not live, clamped to legal indices.
    """
    chunks = (segments.length + size - 1) // size
    ends = jnp.cumsum(chunks)
    segment = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    number = index - (ends[segment] - chunks[segment])
    offset = number * size
    within = offset + jnp.arange(size, dtype=jnp.int32)
    return Chunk(
        segment=segment,
        rows=jnp.clip(segments.start[segment] + within, 0, rows - 1),
        live=within < segments.length[segment],
        offset=offset,
        first=number == 0,
        last=number == chunks[segment] - 1,
    )


def chunk_table(segments: Segments, rows: int, size: int = CHUNK) -> jax.Array:
    """Int32 `[N, 4]`: the chunks in order of the segments, for a launch with one program or more a chunk.

    Columns: first row, live rows, segment, position of the first row. No rows are live where there is no such
    chunk. N is the most chunks that so many segments of `rows` rows together can have. The same for all layers,
    so that a step makes it once.
    """
    count = segments.length.shape[0]
    bound = (rows + (size - 1) * min(rows, count)) // size
    chunks = (segments.length + size - 1) // size
    ends = jnp.cumsum(chunks)
    number = jnp.arange(bound, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(ends[None, :] <= number[:, None], axis=1), count - 1)
    offset = (number - (ends - chunks)[owner]) * size
    live = jnp.where(number < ends[-1], jnp.minimum(segments.length[owner] - offset, size), 0)
    columns = [segments.start[owner] + offset, live, owner, segments.position[owner] + offset]
    return jnp.stack(columns, axis=1).astype(jnp.int32)


def owned_rows(segments: Segments, rows: int) -> jax.Array:
    """`[rows]` int32: 1 where a row belongs to a segment."""
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    inside = (row >= segments.start) & (row < segments.start + segments.length)
    return jnp.any(inside, axis=1).astype(jnp.int32)

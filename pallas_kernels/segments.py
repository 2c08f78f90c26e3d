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

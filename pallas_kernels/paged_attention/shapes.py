"""Real sizes of attention over pages, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class Shape:
    """A query heads over G KV heads of D dimensions."""

    name: str
    heads: int
    groups: int
    dim: int = 256


SHAPES = (
    Shape("0.8B", 8, 2),
    Shape("2B", 8, 2),
    Shape("4B", 16, 4),
    Shape("9B", 16, 4),
    Shape("27B", 24, 4),
    Shape("397B", 32, 2),
    Shape("tiny", 4, 2, dim=64),
)


def arguments(
    shape: Shape,
    rows: int,
    key: jax.Array,
    length: int = 4096,
    page_size: int = 64,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    sharing: int = 1,
) -> tuple[jax.Array, ...]:
    """(q, keys, values, pages, length, gate) of `sharing` rows for each of `rows` requests, whose keys lie in shuffled
    pages of its own: its last row sees `length` keys, and each row one more than the row before."""
    keys = jax.random.split(key, 5)
    table = -(-length // page_size)
    pages = 1 + jax.random.permutation(keys[0], rows * table).reshape(rows, table).astype(jnp.int32)
    cache = ((1 + rows * table) * page_size, shape.groups, shape.dim)
    head = (rows * sharing, shape.heads, shape.dim)
    return (
        jax.random.normal(keys[1], head, dtype),
        jax.random.normal(keys[2], cache, dtype),
        jax.random.normal(keys[3], cache, dtype),
        pages,
        jnp.tile(jnp.arange(length - sharing + 1, length + 1, dtype=jnp.int32), rows),
        jax.random.normal(keys[4], head, dtype),
    )


def packed_arguments(
    shape: Shape,
    lengths: Sequence[int],
    key: jax.Array,
    position: int = 0,
    page_size: int = 64,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Segments, jax.Array]:
    """(q, keys, values, page_table, segments, gate): one segment a length, back to back, each after `position`
    tokens of its request, in shuffled pages of its own."""
    rows, count = sum(lengths), len(lengths)
    starts = [sum(lengths[:index]) for index in range(count)]
    _, keys, values, pages, _, _ = arguments(shape, count, key, position + max(lengths), page_size, dtype)
    q, gate = jax.random.normal(jax.random.fold_in(key, 1), (2, rows, shape.heads, shape.dim), dtype)
    segments = Segments(
        start=jnp.asarray(starts, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        position=jnp.full((count,), position, jnp.int32),
        slot=jnp.zeros((count,), jnp.int32),
    )
    return q, keys, values, pages, segments, gate


def bytes_moved(shape: Shape, rows: int, length: int = 4096, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
    """Bytes that must be read and written: keys and values, q, gate and the output."""
    return (2 * length * shape.groups + 3 * shape.heads) * shape.dim * rows * jnp.dtype(dtype).itemsize


def packed_bytes_moved(
    shape: Shape, lengths: Sequence[int], position: int = 0, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> int:
    """Bytes that must be read and written: each segment's keys and values once, q, gate and the output."""
    keys = sum(position + length for length in lengths)
    return (2 * keys * shape.groups + 3 * sum(lengths) * shape.heads) * shape.dim * jnp.dtype(dtype).itemsize


def packed_flops(shape: Shape, lengths: Sequence[int], position: int = 0) -> int:
    """Operations of the two products over the keys that each row sees."""
    seen = sum(length * position + length * (length + 1) // 2 for length in lengths)
    return 4 * seen * shape.heads * shape.dim

"""Real sizes of the chunked delta rule, shared by tests and benchmarks: those of the decode operation."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode import shapes as decode_shapes
from pallas_kernels.gated_delta_decode.shapes import SHAPES, Shape
from pallas_kernels.segments import Segments

__all__ = ["SHAPES", "Shape", "arguments", "bytes_moved", "packed_arguments"]


def arguments(
    shape: Shape,
    rows: int,
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array | Segments, ...]:
    """The operation's arguments: one request's `rows` tokens in the middle of its text."""
    return packed_arguments(shape, [rows], key, dtype, pool_dtype)


def packed_arguments(
    shape: Shape,
    lengths: Sequence[int],
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array | Segments, ...]:
    """The same with one segment a length, back to back, in shuffled slots.

    Gates are those of a trained model: memories from a few tokens to thousands.
    """
    rows, count = sum(lengths), len(lengths)
    small, order, *keys = jax.random.split(key, 7)
    s = shape
    a_log, dt_bias, pool = decode_shapes.arguments(shape, count, small, dtype, pool_dtype)[5:8]
    starts = [sum(lengths[:index]) for index in range(count)]
    segments = Segments(
        start=jnp.asarray(starts, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        position=jnp.full((count,), 1024, jnp.int32),
        slot=1 + jax.random.permutation(order, count).astype(jnp.int32),
    )
    return (
        jax.random.normal(keys[0], (rows, s.key_heads, s.key_dim), dtype),
        jax.random.normal(keys[1], (rows, s.key_heads, s.key_dim), dtype),
        jax.random.normal(keys[2], (rows, s.value_heads, s.value_dim), dtype),
        jax.random.normal(keys[3], (rows, s.value_heads), dtype),
        jax.random.normal(keys[4], (rows, s.value_heads), dtype),
        a_log,
        dt_bias,
        pool,
        segments,
    )


def bytes_moved(
    shape: Shape,
    rows: int,
    segments: int = 1,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> int:
    """Bytes that must be read and written: q, k, v in, the output out, and each segment's state both ways."""
    state = shape.value_heads * shape.value_dim * shape.key_dim
    activations = 2 * shape.key_heads * shape.key_dim + 2 * shape.value_heads * shape.value_dim
    return rows * activations * jnp.dtype(dtype).itemsize + 2 * segments * state * jnp.dtype(pool_dtype).itemsize

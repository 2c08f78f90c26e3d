"""Real sizes of the chunked delta rule, shared by tests and benchmarks: those of the decode operation."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns
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
) -> tuple[jax.Array | Columns | Segments, ...]:
    """The operation's arguments: one request's `rows` tokens in the middle of its text."""
    return packed_arguments(shape, [rows], key, dtype, pool_dtype)


def packed_arguments(
    shape: Shape,
    lengths: Sequence[int],
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array | Columns | Segments, ...]:
    """The same with one segment a length, back to back, in shuffled slots.

    Gates are those of a trained model: memories from a few tokens to thousands.
    """
    rows, count = sum(lengths), len(lengths)
    small, order, inputs, gates = jax.random.split(key, 4)
    a_log, dt_bias, pool = decode_shapes.arguments(shape, count, small, dtype, pool_dtype)[3:6]
    starts = [sum(lengths[:index]) for index in range(count)]
    segments = Segments(
        start=jnp.asarray(starts, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        position=jnp.full((count,), 1024, jnp.int32),
        slot=1 + jax.random.permutation(order, count).astype(jnp.int32),
    )
    return (
        jax.random.normal(inputs, (rows, shape.layout.width), dtype),
        *decode_shapes.raw_gates(shape, rows, gates, dtype),
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
    outputs = shape.value_heads * shape.value_dim
    state, activations = outputs * shape.key_dim, shape.layout.width + outputs
    return rows * activations * jnp.dtype(dtype).itemsize + 2 * segments * state * jnp.dtype(pool_dtype).itemsize

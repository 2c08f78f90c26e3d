"""Real sizes of verification, shared by tests and benchmarks: those of the rule, with some candidate rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode import shapes as decode_shapes
from pallas_kernels.gated_delta_decode.shapes import SHAPES, Shape
from pallas_kernels.gated_delta_verify.record import Recorded, record_shapes

__all__ = ["SHAPES", "Shape", "arguments", "bytes_moved"]


def arguments(
    shape: Shape,
    groups: int,
    rows: int,
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
    twin: bool = False,
    advance: int | None = None,
) -> tuple[Any, ...]:
    """The arguments of `gated_delta_verify` up to `count`: every group live, in shuffled slots, with `rows` live
    rows and `advance` (None: `rows`) recorded ones to replay."""
    keys = jax.random.split(key, 4)
    qkv, a, b, a_log, dt_bias, *_ = decode_shapes.arguments(shape, groups * rows, keys[0], dtype)
    *_, pool, read_slot, write_slot, has_state = decode_shapes.arguments(
        shape, groups, keys[1], dtype, pool_dtype, twin
    )
    declared = record_shapes(shape.layout, groups, rows, dtype)
    leaves, structure = jax.tree.flatten(declared)
    filled = [jax.random.normal(k, s.shape, s.dtype) for k, s in zip(jax.random.split(keys[2], 3), leaves, strict=True)]
    every = lambda value: jnp.full(groups, value, jnp.int32)  # noqa: E731
    return (
        *(qkv, a, b, a_log, dt_bias, pool, jax.tree.unflatten(structure, filled)),
        Recorded(live=every(rows), parity=every(0), advance=every(rows if advance is None else advance)),
        jnp.arange(groups, dtype=jnp.int32),
        *(read_slot, write_slot, has_state),
        every(rows),
    )


def bytes_moved(
    shape: Shape,
    groups: int,
    rows: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
    advance: int | None = None,
) -> int:
    """Bytes that must be read and written: the state both ways; each new row in, its output and its record out; each
    replayed row in."""
    outputs, width = shape.value_heads * shape.value_dim, shape.layout.width
    recorded = width - shape.key_heads * shape.key_dim
    state = 2 * outputs * shape.key_dim * jnp.dtype(pool_dtype).itemsize
    activations = rows * (width + outputs + recorded) + (rows if advance is None else advance) * recorded
    return groups * (state + activations * jnp.dtype(dtype).itemsize)

"""Real sizes of the convolution, shared by tests and benchmarks: those of the rule that it feeds."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode import shapes as delta_shapes
from pallas_kernels.segments import Segments


@dataclasses.dataclass(frozen=True)
class Shape:
    """Channels of q, k and v together, in packed rows of `projected` columns of which they are the first; the
    convolution's width K and the ring's W columns."""

    name: str
    channels: int
    projected: int
    width: int = 4
    columns: int = 4


SHAPES = tuple(Shape(s.name, s.layout.width, s.projected) for s in delta_shapes.SHAPES)


def arguments(
    shape: Shape, rows: int, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16, spare: int = 0
) -> tuple[jax.Array | Columns, ...]:
    """Arguments of `causal_conv_decode`: every row live, in shuffled ring rows, at positions up to 32k."""
    keys = jax.random.split(key, 5)
    requests = rows + spare
    return (
        *_inputs(shape, rows, requests, keys, dtype),
        1 + jax.random.permutation(keys[3], requests)[:rows].astype(jnp.int32),
        jax.random.randint(keys[4], (rows,), 0, 32768),
    )


def packed_arguments(
    shape: Shape, lengths: list[int], key: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[Columns, jax.Array, jax.Array, Segments, jax.Array]:
    """Arguments of `causal_conv_packed`: one segment a length, back to back, each mid-request."""
    keys = jax.random.split(key, 5)
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    position = jax.random.randint(keys[4], (len(lengths),), 0, 32768)
    segments = Segments(
        start=jnp.asarray(starts, jnp.int32),
        length=jnp.asarray(lengths, jnp.int32),
        position=position,
        slot=jnp.arange(1, len(lengths) + 1, dtype=jnp.int32),
    )
    owner = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths), jnp.int32)
    return (*_inputs(shape, sum(lengths), len(lengths), keys, dtype), segments, owner)


def bytes_moved(shape: Shape, rows: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
    """Bytes of one decode call: a row in and out, K - 1 columns read, one written, and the weight once."""
    size = jnp.dtype(dtype).itemsize
    return shape.channels * size * (rows * (shape.width + 2) + shape.width)


def _inputs(
    shape: Shape, rows: int, requests: int, keys: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[Columns, jax.Array, jax.Array]:
    return (
        Columns(jax.random.normal(keys[0], (rows, shape.projected), dtype), 0, shape.channels),
        0.5 * jax.random.normal(keys[1], (shape.channels, 1, shape.width), dtype),
        jax.random.normal(keys[2], (requests + 1, shape.columns, shape.channels), dtype),
    )

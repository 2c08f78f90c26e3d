"""Real sizes of the gated norm, shared by tests and benchmarks: those of the rule that it follows."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode import shapes as delta_shapes


@dataclasses.dataclass(frozen=True)
class Shape:
    """Value heads of `dim` dimensions, each normed by itself. Their gates begin at column `first` of packed rows of
    `projected` columns."""

    name: str
    heads: int
    dim: int
    first: int
    projected: int


SHAPES = tuple(Shape(s.name, s.value_heads, s.value_dim, s.layout.width, s.projected) for s in delta_shapes.SHAPES)


def arguments(
    shape: Shape, rows: int, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, Columns, jax.Array]:
    """x, gate and weight. x has the size of the rule's output, which is small enough for eps to count."""
    keys = jax.random.split(key, 3)
    packed = jax.random.normal(keys[1], (rows, shape.projected), dtype)
    return (
        0.05 * jax.random.normal(keys[0], (rows, shape.heads, shape.dim), dtype),
        Columns(packed, shape.first, shape.heads * shape.dim),
        1.0 + 0.1 * jax.random.normal(keys[2], (shape.dim,)),
    )


def bytes_moved(shape: Shape, rows: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
    """Bytes that must be read and written: x and gate in, the result out."""
    return 3 * rows * shape.heads * shape.dim * jnp.dtype(dtype).itemsize

"""Real sizes of the gated norm, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Value heads of `dim` dimensions; each head is normed by itself."""

    name: str
    heads: int
    dim: int = 128


SHAPES = (
    Shape("0.8B", 16),
    Shape("2B", 16),
    Shape("4B", 32),
    Shape("9B", 32),
    Shape("27B", 48),
    Shape("397B", 64),
    Shape("tiny", 4, dim=64),
)


def arguments(
    shape: Shape, rows: int, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, gate and weight. x has the size of the rule's output, which is small enough for eps to count."""
    keys = jax.random.split(key, 3)
    size = (rows, shape.heads, shape.dim)
    return (
        0.05 * jax.random.normal(keys[0], size, dtype),
        jax.random.normal(keys[1], size, dtype),
        1.0 + 0.1 * jax.random.normal(keys[2], (shape.dim,)),
    )


def bytes_moved(shape: Shape, rows: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
    """Bytes that must be read and written: x and gate in, the result out."""
    return 3 * rows * shape.heads * shape.dim * jnp.dtype(dtype).itemsize

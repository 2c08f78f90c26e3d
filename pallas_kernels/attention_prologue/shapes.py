"""Real sizes of the attention prologue, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention_prologue.reference import rope_table


@dataclasses.dataclass(frozen=True)
class Shape:
    """A query heads and G key heads of D dimensions, the first `rotary_dim` of which are turned."""

    name: str
    heads: int
    groups: int
    dim: int = 256
    rotary_dim: int = 64
    theta: float = 1e7


SHAPES = (
    Shape("0.8B", 8, 2),
    Shape("2B", 8, 2),
    Shape("4B", 16, 4),
    Shape("9B", 16, 4),
    Shape("27B", 24, 4),
    Shape("397B", 32, 2),
    Shape("tiny", 4, 2, dim=64, rotary_dim=16),
)


def arguments(
    shape: Shape, rows: int, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.bfloat16, spare: int = 3
) -> tuple[jax.Array, ...]:
    """(packed projections, q_weight, k_weight, cos, sin, slot, keys, values): every row writes a slot of its own.

    The caches hold `rows + spare` slots of random contents, the slots are a random choice of them.
    """
    keys = jax.random.split(key, 7)
    s = shape
    width = 2 * (s.heads + s.groups) * s.dim
    position = jax.random.randint(keys[0], (rows,), 0, 32768)
    cos, sin = rope_table(position, s.theta, s.rotary_dim)
    cache = (rows + spare, s.groups, s.dim)
    return (
        jax.random.normal(keys[1], (rows, width), dtype),
        0.2 * jax.random.normal(keys[2], (s.dim,), dtype),
        0.2 * jax.random.normal(keys[3], (s.dim,), dtype),
        cos,
        sin,
        jax.random.permutation(keys[4], rows + spare)[:rows].astype(jnp.int32),
        jax.random.normal(keys[5], cache, dtype),
        jax.random.normal(keys[6], cache, dtype),
    )


def bytes_moved(shape: Shape, rows: int, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> int:
    """Bytes that must be read and written: projections in, q, gate, k and v out, and the rope table."""
    projected = 2 * (shape.heads + shape.groups) * shape.dim
    return rows * (2 * projected * jnp.dtype(dtype).itemsize + shape.rotary_dim * 4)

"""Real sizes of the delta rule, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """Hk key heads of dk and Hv value heads of dv dimensions."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128


SHAPES = (
    Shape("0.8B", 16, 16),
    Shape("2B", 16, 16),
    Shape("4B", 16, 32),
    Shape("9B", 16, 32),
    Shape("27B", 16, 48),
    Shape("397B", 16, 64),
    Shape("tiny", 2, 4, key_dim=64, value_dim=64),
)


def arguments(
    shape: Shape,
    rows: int,
    key: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
    twin: bool = False,
    spare: int = 0,
) -> tuple[jax.Array, ...]:
    """The operation's arguments up to `has_state`: every row live, in shuffled slots of its own.

    The pool has slot 0 (zero) and, a row, one slot (two if `twin`), and `spare` more, all of random contents.
    Gates are those of a trained model: memories from a few tokens to thousands.
    """
    keys = jax.random.split(key, 9)
    s = shape
    per_row = 2 if twin else 1
    slots = 1 + per_row * rows + spare
    order = 1 + jax.random.permutation(keys[0], slots - 1)[: per_row * rows].astype(jnp.int32)
    pool = 0.3 * jax.random.normal(keys[1], (slots, s.value_heads, s.value_dim, s.key_dim), pool_dtype)
    return (
        jax.random.normal(keys[2], (rows, s.key_heads, s.key_dim), dtype),
        jax.random.normal(keys[3], (rows, s.key_heads, s.key_dim), dtype),
        jax.random.normal(keys[4], (rows, s.value_heads, s.value_dim), dtype),
        jax.random.normal(keys[5], (rows, s.value_heads), dtype),
        jax.random.normal(keys[6], (rows, s.value_heads), dtype),
        jax.random.uniform(keys[7], (s.value_heads,), minval=-6.0, maxval=2.0),
        jax.random.normal(keys[8], (s.value_heads,)),
        pool.at[0].set(0.0),
        order[:rows],
        order[-rows:],
        jnp.ones(rows, bool),
    )


def bytes_moved(
    shape: Shape,
    rows: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> int:
    """Bytes that must be read and written: the state both ways, q, k, v in, the output out."""
    state = shape.value_heads * shape.value_dim * shape.key_dim
    activations = 2 * shape.key_heads * shape.key_dim + 2 * shape.value_heads * shape.value_dim
    return rows * (2 * state * jnp.dtype(pool_dtype).itemsize + activations * jnp.dtype(dtype).itemsize)

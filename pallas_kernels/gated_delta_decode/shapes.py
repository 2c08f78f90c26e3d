"""Real sizes of the delta rule, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.qkv import QkvLayout


@dataclasses.dataclass(frozen=True)
class Shape:
    """Hk key heads of dk and Hv value heads of dv dimensions."""

    name: str
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128

    @property
    def layout(self) -> QkvLayout:
        return QkvLayout(self.key_heads, self.value_heads, self.key_dim, self.value_dim)

    @property
    def projected(self) -> int:
        """Columns of the packed product that a layer starts with: qkv, z, b and a."""
        return self.layout.width + self.value_heads * self.value_dim + 2 * self.value_heads


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
) -> tuple[Any, ...]:
    """The operation's arguments up to `has_state`: every row live, in shuffled slots of its own; b and a are the
    last columns of packed rows.

    The pool has slot 0 (zero) and, a row, one slot (two if `twin`), and `spare` more, all of random contents.
    Gates are those of a trained model: memories from a few tokens to thousands.
    """
    keys = jax.random.split(key, 6)
    s = shape
    per_row = 2 if twin else 1
    slots = 1 + per_row * rows + spare
    order = 1 + jax.random.permutation(keys[0], slots - 1)[: per_row * rows].astype(jnp.int32)
    pool = 0.3 * jax.random.normal(keys[1], (slots, s.value_heads, s.value_dim, s.key_dim), pool_dtype)
    return (
        jax.random.normal(keys[2], (rows, s.layout.width), dtype),
        *raw_gates(s, rows, keys[3], dtype),
        jax.random.uniform(keys[4], (s.value_heads,), minval=-6.0, maxval=2.0),
        jax.random.normal(keys[5], (s.value_heads,)),
        pool.at[0].set(0.0),
        order[:rows],
        order[-rows:],
        jnp.ones(rows, bool),
    )


def raw_gates(shape: Shape, rows: int, key: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[Columns, Columns]:
    """a and b, in packed rows that end in b and a."""
    packed = jax.random.normal(key, (rows, shape.projected), dtype)
    heads = shape.value_heads
    return Columns(packed, shape.projected - heads, heads), Columns(packed, shape.projected - 2 * heads, heads)


def bytes_moved(
    shape: Shape,
    rows: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    pool_dtype: jax.typing.DTypeLike = jnp.float32,
) -> int:
    """Bytes that must be read and written: the state both ways, q, k, v in, the output out."""
    outputs = shape.value_heads * shape.value_dim
    state, activations = outputs * shape.key_dim, shape.layout.width + outputs
    return rows * (2 * state * jnp.dtype(pool_dtype).itemsize + activations * jnp.dtype(dtype).itemsize)

"""Matrix products inside the kernels, accurate to float32 or close to it.

Operands are float32, or bfloat16, whose products are exact. On matrix units float32 is slow or (as TF32)
rough. So next to a bfloat16 operand a float32 one is cut into two bfloat16 pieces, which together hold
at least 16 of its 24 bits, and the products of pieces are added in float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ROWS, COLUMNS = 0, 1
"""The axis of an operand that a product sums over."""


def pieces(x: jax.Array, count: int = 2) -> tuple[jax.Array, ...]:
    """Float32 x as `count` bfloat16 arrays, largest first: two add up to x but for 2^-16 of it, three to x.

    Rounded as integers, since XLA may drop the pair of conversions that says the same, and the rest with it.
    """
    cut = []
    for _ in range(count - 1):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        high = jax.lax.bitcast_convert_type((bits + 0x8000) & ~0xFFFF, jnp.float32)
        cut.append(high.astype(jnp.bfloat16))
        x = x - high
    return (*cut, x.astype(jnp.bfloat16))


def stored_pieces(x: jax.Array, ref: Any) -> tuple[jax.Array, ...]:
    """What a float32 matrix is kept as in a ref whose leading axis counts pieces: one is x itself."""
    return (x,) if ref.shape[0] == 1 else pieces(x)


def product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """x and y of one dtype, summed over an axis of each in float32."""
    dimensions = (((over[0],), (over[1],)), ((), ()))
    # without HIGHEST float32 would be lowered as TF32
    return jax.lax.dot_general(
        x, y, dimensions, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def mixed_product(x: jax.Array, y: jax.Array, over: tuple[int, int], count: int = 2) -> jax.Array:
    """x of either dtype, y float32: in `count` pieces if x is bfloat16."""
    if x.dtype == jnp.float32:
        return product(x, y, over)
    smallest, *larger = reversed(pieces(y, count))
    total = product(x, smallest, over)
    for piece in larger:
        total = total + product(x, piece, over)
    return total


def split_product(x: tuple[jax.Array, ...], y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """x as `stored_pieces` keeps it, y float32."""
    if len(x) == 1:
        return product(x[0], y, over)
    high, low = pieces(y)
    # low times low is beneath what either was cut to
    return product(x[1], high, over) + product(x[0], low, over) + product(x[0], high, over)


def column_parts(start: Any, dim: int, dtype: Any) -> list[Any]:
    """`dim` columns from `start` on, in parts: the products of one part at a time need far fewer registers."""
    width = min(dim, 64 if dtype == jnp.bfloat16 else 32)
    return [pl.ds(start + first, width) for first in range(0, dim, width)]

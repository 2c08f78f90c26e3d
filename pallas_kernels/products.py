"""Matrix products inside the kernels, accurate to float32 or close to it.

Operands are float32, or bfloat16, whose products are exact. On matrix units float32 is slow or (as TF32)
rough. So next to a bfloat16 operand a float32 one is cut into two bfloat16 pieces, which together hold
at least 16 of its 24 bits, and the products of pieces are added in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def operands(y: jax.Array, beside: jax.typing.DTypeLike, count: int = 2) -> tuple[jax.Array, ...]:
    """Float32 y as what is multiplied by an operand of dtype `beside`: itself, or its pieces, smallest first."""
    return (y,) if beside == jnp.float32 else pieces(y, count)[::-1]


def mixed_product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """x of either dtype, y float32."""
    first, *others = operands(y, x.dtype)
    total = product(x, first, over)
    for other in others:
        total = total + product(x, other, over)
    return total


def split_product(read: Sequence[Callable[[], jax.Array]], y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """x as `stored_pieces` keeps it, a function for each piece that is called where it is needed; y float32."""
    if len(read) == 1:
        return product(read[0](), y, over)
    # low times low is beneath what either was cut to
    high, low = pieces(y)
    x_high = read[0]()
    total = product(x_high, low, over) + product(x_high, high, over)
    return total + product(read[1](), high, over)


def column_parts(start: Any, dim: int, dtype: Any) -> list[Any]:
    """`dim` columns from `start` on, in parts: the products of one part at a time need far fewer registers."""
    width = min(dim, 64 if dtype == jnp.bfloat16 else 32)
    return [pl.ds(start + first, width) for first in range(0, dim, width)]

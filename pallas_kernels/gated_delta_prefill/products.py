"""Matrix products inside the kernels, accurate to float32 or close to it.

Operands are bfloat16, which is exact, or float32. Float32 products on matrix units are slow (or, as TF32,
rough), so next to bfloat16 operands a float32 one is cut into two bfloat16 pieces that together hold 16
bits, and every product of pieces that counts is added in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

ROWS, COLUMNS = 0, 1


def pieces(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Bfloat16 high and low with high + low = x to about 2^-17 of x.

    Rounded as integers: XLA may drop the pair of conversions that says the same, and low with it.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    high = jax.lax.bitcast_convert_type((bits + 0x8000) & ~0xFFFF, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Two bfloat16 or two float32 matrices, summed over an axis of each; exact products, float32 sums."""
    return jax.lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def mixed_product(x: jax.Array, y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """A matrix of either dtype with a float32 one; the smaller terms are added first."""
    if x.dtype == jnp.float32:
        return product(x, y, over)
    high, low = pieces(y)
    return product(x, low, over) + product(x, high, over)


def split_product(x: tuple[jax.Array, ...], y: jax.Array, over: tuple[int, int]) -> jax.Array:
    """A matrix that is stored as its pieces (two bfloat16 ones, or itself) with a float32 one."""
    if len(x) == 1:
        return product(x[0], y, over)
    high, low = pieces(y)
    return product(x[1], high, over) + product(x[0], low, over) + product(x[0], high, over)

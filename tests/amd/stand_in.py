"""A small kernel to compile, launched as every kernel of the project is, and an unbuildable one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_backend import Warps, launch, store

ROWS, COLUMNS = 32, 256
ARGUMENTS = (jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),)


def _scale(x: Any, out: Any) -> None:
    row = x[pl.program_id(0), :]
    # With a hint, since hints are what jaxlib's versions write differently.
    store(out.at[pl.program_id(0), :], row * jax.lax.rsqrt(jnp.sum(row * row)), eviction_policy="evict_first")


def scale_rows(x: jax.Array) -> jax.Array:
    """Every row divided by its length; 2 warps of 64 lanes or 4 of 32."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return launch(_scale, [x], name="scale_rows", grid=(x.shape[0],), out_shape=[shape], warps=Warps(2, 4))[0]


def twice(x: jax.Array) -> jax.Array:
    """Two launches, one of them inside a function of its own."""
    return jax.jit(scale_rows)(scale_rows(x))


def too_large(x: jax.Array) -> jax.Array:
    """A block that is no power of two: cannot be lowered."""

    def kernel(x: Any, out: Any) -> None:
        out[0, :] = x[0, pl.ds(0, 3)]

    return launch(
        kernel, [x], name="odd", grid=(1,), out_shape=[jax.ShapeDtypeStruct((1, 3), x.dtype)], warps=Warps(1, 1)
    )[0]

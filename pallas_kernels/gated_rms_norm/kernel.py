"""The gated norm in one launch: the reference's arithmetic on tiles of a few heads."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.gated_rms_norm import reference
from pallas_kernels.triton_backend import Warps, launch

HEADS = 4
"""Most heads of one program: with 128 dimensions in bfloat16 every lane of a warp reads 16 bytes at a time."""
WARPS = Warps(wave64=1, wave32=1)


def _gated(x: Any, gate: Any, weight: Any, out: Any, *, heads: int, eps: float) -> None:
    tile = (pl.ds(pl.program_id(0) * heads, heads), slice(None))
    out[tile] = reference.gated_rms_norm(x[tile], gate[tile], weight[:], eps)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, interpret: bool) -> jax.Array:
    """See the reference; the last axis must be a power of two."""
    dim = x.shape[-1]
    # Cut by heads and never by rows: how a row is summed must not depend on how many rows there are.
    heads = math.gcd(x.shape[-2] if x.ndim > 1 else 1, HEADS)
    flat = (-1, dim)
    [out] = launch(
        functools.partial(_gated, heads=heads, eps=eps),
        [x.reshape(flat), gate.reshape(flat), weight],
        name="gated_rms_norm",
        grid=(x.size // (heads * dim),),
        out_shape=[jax.ShapeDtypeStruct((x.size // dim, dim), x.dtype)],
        warps=WARPS,
        cost=pl.CostEstimate(
            flops=9 * x.size,
            transcendentals=x.size + x.size // dim,
            bytes_accessed=2 * x.size * x.dtype.itemsize + gate.size * gate.dtype.itemsize,
        ),
        interpret=interpret,
    )
    return out.reshape(x.shape)

"""The gated norm in one launch: the reference's arithmetic on tiles of a few heads."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_rms_norm import reference
from pallas_kernels.triton_backend import Warps, launch

HEADS = 4
"""Most heads of one program: with 128 dimensions in bfloat16 every lane of a warp reads 16 bytes at a time."""
WARPS = Warps(wave64=1, wave32=1)


def _gated(x: Any, gate: Any, weight: Any, out: Any, *, heads: int, first_column: int, eps: float) -> None:
    first, row = pl.program_id(0) * heads, pl.program_id(1)
    tile = (row, pl.ds(first, heads), slice(None))
    columns = pl.ds(first_column + first * x.shape[2], heads * x.shape[2])
    out[tile] = reference.gated_rms_norm(x[tile], gate[row, columns], weight[:], eps)


def gated_rms_norm(x: jax.Array, gate: Columns, weight: jax.Array, eps: float, interpret: bool) -> jax.Array:
    """See the reference; dv must be a power of two."""
    heads, dim = x.shape[-2:]
    rows = x.size // (heads * dim)
    # Cut by heads and never by rows: how a row is summed must not depend on how many rows there are.
    count = math.gcd(heads, HEADS)
    [out] = launch(
        functools.partial(_gated, heads=count, first_column=gate.start, eps=eps),
        [x.reshape(rows, heads, dim), gate.array.reshape(rows, -1), weight],
        name="gated_rms_norm",
        grid=(heads // count, rows),
        out_shape=[jax.ShapeDtypeStruct((rows, heads, dim), x.dtype)],
        warps=WARPS,
        cost=pl.CostEstimate(
            flops=9 * x.size,
            transcendentals=x.size + x.size // dim,
            bytes_accessed=2 * x.size * x.dtype.itemsize + gate.nbytes,
        ),
        interpret=interpret,
    )
    return out.reshape(x.shape)

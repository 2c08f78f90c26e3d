"""The other design, a state page for every candidate row: what verifying on one page must agree with, bit for bit.

A step runs its rows from one page of a request and stores the state after row t in page t; the next step starts
from the page of the last row that was accepted. The kernel runs the same loop as the one with a record.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.kernel import Tile
from pallas_kernels.gated_delta_decode.qkv import qkv_layout
from pallas_kernels.gated_delta_verify.kernel import Sizes, Strips, cut, here, run_strip
from pallas_kernels.triton_backend import launch


def _pages(
    sources: Any,
    pages: Any,
    counts: Any,
    qkv: Any,
    a: Any,
    b: Any,
    a_log: Any,
    dt_bias: Any,
    _: Any,
    out: Any,
    pool: Any,
    *,
    sizes: Sizes,
) -> None:
    place = here(sizes)
    weights = a_log[place.head], dt_bias[place.head]

    def keep(t: jax.Array, state: Strips) -> None:
        # What goes on is not what was rounded: a step rounds what it stores.
        place.store(pool, pages[place.group, t], state)

    state = place.load(pool, sources[place.group])
    run_strip(place, (qkv, a, b), out, counts[place.group], state, weights, keep)


def gated_delta_pages(
    qkv: jax.Array,
    a: Columns,
    b: Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    source: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See the reference; dk must be a power of two."""
    (groups, rows), (_, heads, dv, dk) = pages.shape, pool.shape
    sizes = Sizes(qkv_layout(qkv, pool), *cut(tile, pool, groups), rows, a=a.start, b=b.start)
    out = jax.ShapeDtypeStruct((qkv.shape[0], heads, dv), qkv.dtype)
    out, pool = launch(
        functools.partial(_pages, sizes=sizes),
        [source, pages, count, qkv, a.array, b.array, a_log, dt_bias, pool],
        name="gated_delta_pages",
        grid=(dv // sizes.width, heads, groups),
        out_shape=[out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        warps=tile.warps,
        aliases={8: 1},
        cost=pl.CostEstimate(
            flops=7 * rows * groups * heads * dv * dk,
            transcendentals=5 * rows * groups * heads,
            bytes_accessed=(1 + rows) * groups * heads * dv * dk * pool.dtype.itemsize
            + (qkv.size + out.size) * qkv.dtype.itemsize,
        ),
        interpret=interpret,
    )
    return out, pool

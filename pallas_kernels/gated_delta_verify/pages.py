"""The other design, a state page for every candidate row: what verifying on one page must agree with, bit for bit.

A step runs its rows from one page of a request and stores the state after row t in page t; the next step starts
from the page of the last row that was accepted. The kernel runs the same loop as the one with a record.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.kernel import Pieces, Tile
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_verify.kernel import Cut, ask_strip, cut, run_strip, store_strip, zero_dead_rows
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
    layout: QkvLayout,
    gate_columns: tuple[int, int],
    cut: Cut,
    rows: int,
) -> None:
    first, head, group = pl.program_id(0) * cut.block, pl.program_id(1), pl.program_id(2)
    source, count = sources[group], counts[group]
    inputs, weights = (qkv, a, b), (a_log[head], dt_bias[head])
    for number in range(cut.strips):
        start = first + number * cut.strip
        rows_of_v = pl.ds(start, cut.strip)

        def keep(t: jax.Array, state: Pieces, rows_of_v: Any = rows_of_v) -> None:
            stored = tuple(x.astype(pool.dtype) for x in state)
            store_strip(pool, pages[group, t], head, rows_of_v, stored, layout, cut)

        state = tuple(x.astype(jnp.float32) for x in ask_strip(pool, source, head, rows_of_v, layout, cut))
        run_strip(inputs, out, gate_columns, group, count, head, start, state, weights, layout, cut, rows, keep)
    zero_dead_rows(out, group, count, head, first, cut, rows)


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
    sizes = cut(tile, pool)
    out = jax.ShapeDtypeStruct((qkv.shape[0], heads, dv), qkv.dtype)
    out, pool = launch(
        functools.partial(_pages, layout=qkv_layout(qkv, pool), gate_columns=(a.start, b.start), cut=sizes, rows=rows),
        [source, pages, count, qkv, a.array, b.array, a_log, dt_bias, pool],
        name="gated_delta_pages",
        grid=(dv // sizes.block, heads, groups),
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

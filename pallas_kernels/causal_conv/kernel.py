"""The causal convolution on its ring: one token a request, and any number of tokens a request, packed.

What makes the ring safe: **whoever writes a segment's ring is the only one to read it.** A program owns a
block of channels of one segment's ring: it computes the first K - 1 rows of the segment, which alone look
back into the ring, and writes the segment's last W inputs after that. Rows further in need nothing but
inputs; programs of their own take them a few at a time, in the same launch. Decoding is the first of these
with one row. All of them call `_convolve`, so a token gives the same bits on every path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.dispatch import power_of_two
from pallas_kernels.segments import Segments
from pallas_kernels.triton_backend import Warps, launch

BLOCK = 256
"""Most channels of one program: 16 bytes a lane in bfloat16 with 32 lanes, one warp."""
TILE_ROWS = 8
"""Rows of one program of rows that need no ring."""
WARPS = Warps(wave64=1, wave32=1)
"""One, so that a program's reads of a ring come before its writes whichever lanes they fall on."""

Read = Callable[[jax.Array], jax.Array]
"""Row -> the program's block of its inputs."""


def _convolve(live: jax.Array, taps: list[jax.Array], weights: list[jax.Array]) -> jax.Array:
    """silu(sum_j w_j x_j) of K taps `[block]`, oldest first, in float32, rounded once; zeros unless `live`.

    A loop of one or no turn, known only at run time, keeps the arithmetic apart from what surrounds it:
    fused with it, it could round differently here and there.
    """

    def turn(_: jax.Array, __: jax.Array) -> jax.Array:
        total = jnp.zeros(taps[0].shape, jnp.float32)
        for tap, weight in zip(taps, weights, strict=True):
            total = total + tap.astype(jnp.float32) * weight.astype(jnp.float32)
        return jax.nn.silu(total).astype(taps[0].dtype)

    return jax.lax.fori_loop(0, live.astype(jnp.int32), turn, jnp.zeros_like(taps[0]))


def _weights(weight: Any, channels: Any) -> list[jax.Array]:
    """The K columns of `[C, 1, K]` for a block of channels, oldest tap first."""
    width = weight.shape[2]
    if power_of_two(width):
        # One contiguous read, taken apart in registers. (Blocks have no other sizes.)
        columns = jax.lax.split(weight[channels, 0, :], [1] * width, axis=1)
        return [jax.lax.squeeze(column, (1,)) for column in columns]
    return [weight[channels, 0, j] for j in range(width)]


def _history(ring: Any, channels: Any, ring_row: jax.Array, position: jax.Array, count: int) -> list[jax.Array]:
    """The last `count` inputs before `position`, oldest first, zeros before the request's start."""
    taps = []
    for back in range(count, 0, -1):
        before = position - back
        stored = ring[ring_row, jax.lax.rem(jnp.maximum(before, 0), ring.shape[1]), channels]
        # Selected: before a request's start its ring may hold anything.
        taps.append(jnp.where(before >= 0, stored, jnp.zeros_like(stored)))
    return taps


def _decode(
    x: Any, weight: Any, ring_rows: Any, positions: Any, _: Any, out: Any, ring: Any, *, block: int, first_column: int
) -> None:
    first, row = pl.program_id(0) * block, pl.program_id(1)
    channels = pl.ds(first, block)
    ring_row, position = ring_rows[row], positions[row]
    weights, here = _weights(weight, channels), x[row, pl.ds(first_column + first, block)]
    taps = [*_history(ring, channels, ring_row, position, len(weights) - 1), here]
    out[row, channels] = _convolve(ring_row > 0, taps, weights)

    @pl.when(ring_row > 0)
    def _() -> None:
        ring[ring_row, jax.lax.rem(position, ring.shape[1]), channels] = here


def _packed(
    x: Any,
    weight: Any,
    starts: Any,
    lengths: Any,
    positions: Any,
    first_rows: Any,
    _: Any,
    out: Any,
    ring: Any,
    *,
    block: int,
    tiles: int,
    first_column: int,
) -> None:
    first, number = pl.program_id(0) * block, pl.program_id(1)
    channels, columns = pl.ds(first, block), pl.ds(first_column + first, block)

    def read(row: jax.Array) -> jax.Array:
        """Inputs of a row; of one that does not exist those of the first or the last one, which nobody uses."""
        return x[jnp.clip(row, 0, x.shape[0] - 1), columns]

    @pl.when(number < tiles)
    def _() -> None:
        _inner_rows(read, _weights(weight, channels), first_rows, out, channels, number * TILE_ROWS)

    segment = jnp.maximum(number - tiles, 0)
    start, length, position = starts[segment], lengths[segment], positions[segment]

    @pl.when((number >= tiles) & (length > 0))
    def _() -> None:
        weights = _weights(weight, channels)
        _head_rows(read, weights, out, ring, channels, start, length, position, segment + 1)
        for back in range(1, ring.shape[1] + 1):

            @pl.when(back <= length)
            def _(back: int = back) -> None:
                column = jax.lax.rem(position + length - back, ring.shape[1])
                ring[segment + 1, column, channels] = read(start + length - back)


def _head_rows(
    read: Read,
    weights: list[jax.Array],
    out: Any,
    ring: Any,
    channels: Any,
    start: jax.Array,
    length: jax.Array,
    position: jax.Array,
    ring_row: jax.Array,
) -> None:
    """A segment's first K - 1 rows, as far as it has them."""
    heads = len(weights) - 1
    line = [*_history(ring, channels, ring_row, position, heads), *(read(start + i) for i in range(heads))]
    for i in range(heads):
        y = _convolve(i < length, line[i : i + len(weights)], weights)

        @pl.when(i < length)
        def _(i: int = i, y: jax.Array = y) -> None:
            out[start + i, channels] = y


def _inner_rows(
    read: Read, weights: list[jax.Array], first_rows: Any, out: Any, channels: Any, start: jax.Array
) -> None:
    """Of TILE_ROWS rows of the batch those that lie K - 1 or more behind their segment's start, and zeros for
    padding."""
    heads, last = len(weights) - 1, out.shape[0] - 1
    line = [read(start + i) for i in range(-heads, TILE_ROWS)]
    for i in range(TILE_ROWS):
        row = start + i
        first = first_rows[jnp.minimum(row, last)]
        inner = (row <= last) & (first >= 0) & (row - first >= heads)
        y = _convolve(inner, line[i : i + len(weights)], weights)

        @pl.when(inner | ((row <= last) & (first < 0)))
        def _(row: jax.Array = row, y: jax.Array = y) -> None:
            out[row, channels] = y


def causal_conv_decode(
    x: Columns, weight: jax.Array, ring: jax.Array, ring_row: jax.Array, position: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the reference. Padding rows output zeros."""
    rows, channels = x.shape
    block = math.gcd(channels, BLOCK)
    out, ring = launch(
        functools.partial(_decode, block=block, first_column=x.start),
        [x.array, weight, ring_row, position, ring],
        name="causal_conv_decode",
        grid=(channels // block, rows),
        out_shape=[_struct(x), _struct(ring)],
        warps=WARPS,
        aliases={4: 1},
        # in, out and the column that is written; K - 1 columns that are read
        cost=_cost(x, weight, (3 + weight.shape[2] - 1) * x.nbytes),
        interpret=interpret,
    )
    return out, ring


def causal_conv_packed(
    x: Columns, weight: jax.Array, ring: jax.Array, segments: Segments, segment_of_row: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the reference. Padding rows output zeros."""
    rows, channels = x.shape
    block = math.gcd(channels, BLOCK)
    tiles = pl.cdiv(rows, TILE_ROWS)
    # The same for all layers, so that a step computes it once.
    first_rows = jnp.where(segment_of_row >= 0, segments.start[jnp.maximum(segment_of_row, 0)], -1)
    out, ring = launch(
        functools.partial(_packed, block=block, tiles=tiles, first_column=x.start),
        [x.array, weight, segments.start, segments.length, segments.position, first_rows, ring],
        name="causal_conv_packed",
        grid=(channels // block, tiles + segments.start.shape[0]),
        out_shape=[_struct(x), _struct(ring)],
        warps=WARPS,
        aliases={6: 1},
        cost=_cost(x, weight, 2 * x.nbytes),
        interpret=interpret,
    )
    return out, ring


def _struct(array: jax.Array | Columns) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _cost(x: Columns, weight: jax.Array, activation_bytes: int) -> pl.CostEstimate:
    outputs = math.prod(x.shape)
    return pl.CostEstimate(
        flops=(2 * weight.shape[2] + 3) * outputs,
        transcendentals=outputs,
        bytes_accessed=activation_bytes + weight.size * weight.dtype.itemsize,
    )

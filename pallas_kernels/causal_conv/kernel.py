"""The causal convolution on its ring: one token a request, and any number of tokens a request, packed.

What makes the ring safe: **whoever writes a segment's ring is the only one to read it.** A program owns a
block of channels of one segment's ring: it computes the first K - 1 rows of the segment, which alone look
back into the ring, and writes the segment's last W inputs after that. Rows further in need nothing but
inputs; programs of their own take them in tiles, in the same launch. Decoding is the first of these with one
row, and both kernels call `_head_row`, so one token gives the same bits on either path.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dispatch import power_of_two
from pallas_kernels.segments import Segments
from pallas_kernels.triton_backend import Warps, launch, load, store

BLOCK = 256
"""Most channels of one program: 16 bytes a lane in bfloat16 with 32 lanes, one warp."""
TILE_ROWS = 4
"""Rows of one program of rows that need no ring."""
WARPS = Warps(wave64=1, wave32=1)
"""One, so that a program's reads of a ring come before its writes whichever lanes they fall on."""


def _convolve(taps: list[jax.Array], weights: list[jax.Array], dtype: jax.typing.DTypeLike) -> jax.Array:
    """silu(sum_j w_j x_j), oldest tap first, in float32, rounded once. Every output comes from here."""
    total = jnp.zeros(taps[0].shape, jnp.float32)
    for tap, weight in zip(taps, weights, strict=True):
        total = total + tap.astype(jnp.float32) * weight
    return jax.nn.silu(total).astype(dtype)


def _weights(weight: Any, channels: Any) -> list[jax.Array]:
    """The K columns of `[C, 1, K]` for a block of channels, oldest tap first, float32."""
    width = weight.shape[2]
    if power_of_two(width):
        # One contiguous read, taken apart in registers. (Blocks have no other sizes.)
        columns = jax.lax.split(weight[channels, 0, :], [1] * width, axis=1)
        return [jax.lax.squeeze(column, (1,)).astype(jnp.float32) for column in columns]
    return [weight[channels, 0, j].astype(jnp.float32) for j in range(width)]


def _head_row(
    x: Any, ring: Any, weights: list[jax.Array], channels: Any, row: Any, ring_row: Any, position: Any, i: int
) -> jax.Array:
    """Output `[block]` of a segment's row number i, where i < K - 1: earlier taps come from the ring.

    row, position: of the segment's first row, and of its first token.
    """
    columns, taps = ring.shape[1], []
    for back in range(len(weights) - 1, -1, -1):
        if back <= i:
            taps.append(x[row + i - back, channels])
            continue
        before = position + i - back
        # Selected: before a request's start its ring may hold anything.
        column = jax.lax.rem(jnp.maximum(before, 0), columns)
        stored = ring[ring_row, column, channels]
        taps.append(jnp.where(before >= 0, stored, jnp.zeros(stored.shape, ring.dtype)))
    return _convolve(taps, weights, x.dtype)


def _decode(x: Any, weight: Any, ring_rows: Any, positions: Any, _: Any, out: Any, ring: Any, *, block: int) -> None:
    channels, row = pl.ds(pl.program_id(0) * block, block), pl.program_id(1)
    ring_row, position = ring_rows[row], positions[row]

    @pl.when(ring_row > 0)
    def _() -> None:
        weights = _weights(weight, channels)
        out[row, channels] = _head_row(x, ring, weights, channels, row, ring_row, position, 0)
        ring[ring_row, jax.lax.rem(position, ring.shape[1]), channels] = x[row, channels]

    @pl.when(ring_row <= 0)
    def _() -> None:
        out[row, channels] = jnp.zeros((block,), out.dtype)


def _packed(
    x: Any,
    weight: Any,
    starts: Any,
    lengths: Any,
    positions: Any,
    first_row: Any,
    _: Any,
    out: Any,
    ring: Any,
    *,
    block: int,
    tiles: int,
) -> None:
    first_channel, number = pl.program_id(0) * block, pl.program_id(1)
    channels = pl.ds(first_channel, block)

    @pl.when(number < tiles)
    def _() -> None:
        _inner_rows(x, _weights(weight, channels), first_row, out, number * TILE_ROWS, first_channel, block)

    @pl.when(number >= tiles)
    def _() -> None:
        segment = number - tiles
        length = lengths[segment]

        @pl.when(length > 0)
        def _() -> None:
            start, position = starts[segment], positions[segment]
            weights = _weights(weight, channels)
            for i in range(len(weights) - 1):

                @pl.when(i < length)
                def _(i: int = i) -> None:
                    row = start + i
                    out[row, channels] = _head_row(x, ring, weights, channels, start, segment + 1, position, i)

            columns = ring.shape[1]
            for back in range(1, columns + 1):

                @pl.when(back <= length)
                def _(back: int = back) -> None:
                    column = jax.lax.rem(position + length - back, columns)
                    ring[segment + 1, column, channels] = x[start + length - back, channels]


def _inner_rows(
    x: Any, weights: list[jax.Array], first_row: Any, out: Any, row: jax.Array, first_channel: jax.Array, block: int
) -> None:
    """Rows `row`.. of the batch that lie K - 1 or more behind their segment's start, and zeros for padding."""
    rows = row + jnp.arange(TILE_ROWS, dtype=jnp.int32)
    inside = rows < x.shape[0]
    # A row's segment's first row; -1 for padding.
    first = load(first_row.at[rows], mask=inside, other=jnp.zeros(rows.shape, jnp.int32))
    padding = inside & (first < 0)
    inner = inside & (first >= 0) & (rows - first >= len(weights) - 1)
    shape = (TILE_ROWS, block)
    channel = jnp.broadcast_to(first_channel + jnp.arange(block, dtype=jnp.int32), shape)
    across = lambda vector: jnp.broadcast_to(vector[:, None], shape)  # noqa: E731
    mask, nothing = across(inner), jnp.zeros(shape, x.dtype)
    taps = [
        load(x.at[across(rows - back), channel], mask=mask, other=nothing) for back in range(len(weights) - 1, -1, -1)
    ]
    y = jnp.where(mask, _convolve(taps, [w[None, :] for w in weights], x.dtype), nothing)
    store(out.at[across(rows), channel], y, mask=across(inner | padding))


def causal_conv_decode(
    x: jax.Array, weight: jax.Array, ring: jax.Array, ring_row: jax.Array, position: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the reference. Padding rows output zeros."""
    rows, channels = x.shape
    block = math.gcd(channels, BLOCK)
    out, ring = launch(
        functools.partial(_decode, block=block),
        [x, weight, ring_row, position, ring],
        name="causal_conv_decode",
        grid=(channels // block, rows),
        out_shape=[_struct(x), _struct(ring)],
        warps=WARPS,
        aliases={4: 1},
        # in, out and the column that is written; K - 1 columns that are read
        cost=_cost(x, weight, (3 + weight.shape[2] - 1) * x.size * x.dtype.itemsize),
        interpret=interpret,
    )
    return out, ring


def causal_conv_packed(
    x: jax.Array, weight: jax.Array, ring: jax.Array, segments: Segments, segment_of_row: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the reference. Padding rows output zeros."""
    rows, channels = x.shape
    block = math.gcd(channels, BLOCK)
    tiles = pl.cdiv(rows, TILE_ROWS)
    # The same for all layers, so that a step computes it once.
    first_row = jnp.where(segment_of_row >= 0, segments.start[jnp.maximum(segment_of_row, 0)], -1)
    out, ring = launch(
        functools.partial(_packed, block=block, tiles=tiles),
        [x, weight, segments.start, segments.length, segments.position, first_row, ring],
        name="causal_conv_packed",
        grid=(channels // block, tiles + segments.start.shape[0]),
        out_shape=[_struct(x), _struct(ring)],
        warps=WARPS,
        aliases={6: 1},
        cost=_cost(x, weight, 2 * x.size * x.dtype.itemsize),
        interpret=interpret,
    )
    return out, ring


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _cost(x: jax.Array, weight: jax.Array, activation_bytes: int) -> pl.CostEstimate:
    return pl.CostEstimate(
        flops=(2 * weight.shape[2] + 3) * x.size,
        transcendentals=x.size,
        bytes_accessed=activation_bytes + weight.size * weight.dtype.itemsize,
    )

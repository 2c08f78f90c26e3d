"""Causal depthwise convolution of width K with SiLU, and the ring that carries its last inputs.

y[c, t] = silu(sum_j w[c, j] x[c, t - (K - 1) + j]), zeros before the start, no bias. Sums and SiLU are
float32; inputs and outputs have the activation dtype.

The ring is `[requests + 1, W, C]`, W >= K: the input of position p lives in column p mod W. A step
reads the K - 1 columns before its position and writes only columns that it does not read, so nothing is
shifted and a step can be run again. Row 0 belongs to padding and is never written.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.segments import Segments


def weighted_taps(taps: list[jax.Array], weight: jax.Array) -> jax.Array:
    """silu(sum_j w_j x_j) in float32, rounded once to the taps' dtype.

    Args:
        taps: K arrays `[..., C]`, oldest first.
        weight: `[C, 1, K]`, the checkpoint's shape.
    """
    total = jnp.zeros(taps[0].shape, jnp.float32)
    for j, tap in enumerate(taps):
        total = total + tap.astype(jnp.float32) * weight[:, 0, j].astype(jnp.float32)
    return jax.nn.silu(total).astype(taps[0].dtype)


def causal_conv_sequence(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The convolution over whole sequences from their start. x `[b, t, C]` -> `[b, t, C]`."""
    width, length = weight.shape[2], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return weighted_taps([padded[:, j : j + length] for j in range(width)], weight)


def causal_conv_decode(
    x: jax.Array, weight: jax.Array, ring: jax.Array, ring_row: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token a row.

    Args:
        x: `[R, C]` inputs. weight: `[C, 1, K]`. ring: `[requests + 1, W, C]` (donate it).
        ring_row: `[R]` int32, the row's place in the ring; 0 for padding.
        position: `[R]` int32, the token's position.

    Returns:
        Outputs `[R, C]` and the ring.
    """
    width, columns = weight.shape[2], ring.shape[1]
    taps = [_from_ring(ring, ring_row, position - back) for back in range(width - 1, 0, -1)]
    out = weighted_taps([*taps, x], weight)
    target = jnp.where(ring_row > 0, ring_row, ring.shape[0])
    return out, _store(ring, target, position % columns, x, out)


def causal_conv_packed(
    x: jax.Array, weight: jax.Array, ring: jax.Array, segments: Segments, segment_of_row: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Any number of tokens a request, packed; the general form of `causal_conv_decode`.

    Args:
        x: `[R, C]` inputs. weight: `[C, 1, K]`. ring: `[segments + 1, W, C]`: segment s owns row s + 1.
        segments: which rows belong together, and their positions.
        segment_of_row: `[R]` int32; -1 for padding.

    Returns:
        Outputs `[R, C]` and the ring, in which each segment's last W inputs stand.
    """
    width, columns, rows = weight.shape[2], ring.shape[1], x.shape[0]
    segment = jnp.maximum(segment_of_row, 0)
    ring_row = segment_of_row + 1
    row = jnp.arange(rows, dtype=jnp.int32)
    within = row - segments.start[segment]
    position = segments.position[segment] + within
    taps = []
    for back in range(width - 1, 0, -1):
        here = x[jnp.maximum(row - back, 0)]
        taps.append(jnp.where((within >= back)[:, None], here, _from_ring(ring, ring_row, position - back)))
    out = weighted_taps([*taps, x], weight)
    # Only the last W rows of a segment: no two rows of one call may write one column.
    keep = (segment_of_row >= 0) & (within >= segments.length[segment] - columns)
    target = jnp.where(keep, ring_row, ring.shape[0])
    return out, _store(ring, target, position % columns, x, out)


def _from_ring(ring: jax.Array, ring_row: jax.Array, position: jax.Array) -> jax.Array:
    stored = ring[ring_row, position % ring.shape[1]]
    return jnp.where((position >= 0)[:, None], stored, jnp.zeros((), ring.dtype))


def _store(ring: jax.Array, target: jax.Array, column: jax.Array, x: jax.Array, out: jax.Array) -> jax.Array:
    # Rows that are dropped carry `out`, so that the write needs all that was read: where nothing orders
    # a write behind the reads, XLA copies the whole ring first.
    x = jnp.where((target < ring.shape[0])[:, None], x, out)
    return ring.at[target, column].set(x, mode="drop")


def ring_window(ring: jax.Array, ring_row: jax.Array, position: jax.Array, width: int) -> jax.Array:
    """The last `width` inputs before `position`, oldest first, zeros before the start.

    ring_row, position: `[R]` int32 -> `[R, width, C]`. Hugging Face keeps these as `[C, width]`.
    """
    return jnp.stack([_from_ring(ring, ring_row, position - back) for back in range(width, 0, -1)], axis=1)

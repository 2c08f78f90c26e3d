"""The causal convolution on its ring, by its kernels or by their references."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.causal_conv import kernel, reference
from pallas_kernels.columns import Columns, as_columns
from pallas_kernels.debug import check_values, place_faults, segment_faults
from pallas_kernels.dispatch import Implementation, choose
from pallas_kernels.segments import Segments

LEAST_BLOCK = 4


def causal_conv_decode(
    x: jax.Array | Columns,
    weight: jax.Array,
    ring: jax.Array,
    ring_row: jax.Array,
    position: jax.Array,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The convolution and SiLU for one token a row.

    Args:
        x: `[R, C]` inputs, an array or columns of packed rows. weight: `[C, 1, K]`, the checkpoint's shape.
        ring: `[requests + 1, W, C]`, W >= K; updated in place if donated.
        ring_row: `[R]` int32, the row's place in the ring, no two the same; 0 for padding, which stores
            nothing and whose output means nothing.
        position: `[R]` int32, the token's position.
        implementation: see `Implementation`.

    Returns:
        Outputs `[R, C]` and the ring.

    Raises:
        ValueError: shapes or dtypes that do not fit together; at debug level 2 (`pallas_kernels.debug`) also ring
            rows out of range or shared.
    """
    x = as_columns(x)
    _check_arrays(x, weight, ring)
    _check_vector("ring_row", ring_row, x.shape[:1])
    _check_vector("position", position, x.shape[:1])
    check_values("causal_conv_decode", place_faults("ring_row", 1, ring.shape[0]), ring_row)
    chosen = choose("causal_conv_decode", implementation, _unsupported(x.shape[1]))
    if chosen == "reference":
        return reference.causal_conv_decode(x.value(), weight, ring, ring_row, position)
    return kernel.causal_conv_decode(x, weight, ring, ring_row, position, interpret=chosen == "interpret")


def causal_conv_packed(
    x: jax.Array | Columns,
    weight: jax.Array,
    ring: jax.Array,
    segments: Segments,
    segment_of_row: jax.Array,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Any number of tokens a request, packed; one token gives the bits of `causal_conv_decode`.

    Args:
        x: `[R, C]` inputs, an array or columns of packed rows. weight: `[C, 1, K]`, the checkpoint's shape.
        ring: `[segments + 1, W, C]`, W >= K: segment s owns row s + 1; updated in place if donated.
        segments: which rows belong together, and their positions.
        segment_of_row: `[R]` int32; -1 for padding, whose outputs mean nothing.
        implementation: see `Implementation`.

    Returns:
        Outputs `[R, C]` and the ring, in which each segment's last W inputs stand.

    Raises:
        ValueError: shapes or dtypes that do not fit together; at debug level 2 also segments that overlap.
    """
    x = as_columns(x)
    _check_arrays(x, weight, ring)
    for name in ("start", "length", "position"):
        _check_vector(f"segments.{name}", getattr(segments, name), (ring.shape[0] - 1,))
    _check_vector("segment_of_row", segment_of_row, x.shape[:1])
    check_values("causal_conv_packed", segment_faults(x.shape[0]), segments.start, segments.length)
    chosen = choose("causal_conv_packed", implementation, _unsupported(x.shape[1]))
    if chosen == "reference":
        return reference.causal_conv_packed(x.value(), weight, ring, segments, segment_of_row)
    return kernel.causal_conv_packed(x, weight, ring, segments, segment_of_row, interpret=chosen == "interpret")


def _unsupported(channels: int) -> str | None:
    if channels % LEAST_BLOCK:
        return f"{channels} channels are no multiple of {LEAST_BLOCK}"
    return None


def _check_arrays(x: Columns, weight: jax.Array, ring: jax.Array) -> None:
    if len(x.shape) != 2 or weight.ndim != 3 or weight.shape[:2] != (x.shape[1], 1):
        raise ValueError(f"x has shape {x.shape} and weight {weight.shape}; they take [R, C] and [C, 1, K]")
    if ring.ndim != 3 or ring.shape[1] < weight.shape[2] or ring.shape[2] != x.shape[1] or ring.dtype != x.dtype:
        raise ValueError(
            f"ring is {ring.dtype}{list(ring.shape)}; it takes {x.dtype}[requests + 1, W, {x.shape[1]}], "
            f"W >= K = {weight.shape[2]}"
        )


def _check_vector(name: str, vector: jax.Array, shape: tuple[int, ...]) -> None:
    if vector.shape != shape or vector.dtype != jnp.int32:
        raise ValueError(f"{name} is {vector.dtype}{list(vector.shape)}; it takes int32{list(shape)}")

"""The delta rule over many tokens, by its kernels or by its reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns, as_columns
from pallas_kernels.debug import check_values, segment_faults
from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, check, check_rule
from pallas_kernels.gated_delta_prefill import kernel, reference
from pallas_kernels.segments import Segments


def gated_delta_prefill(
    qkv: jax.Array,
    a: jax.Array | Columns,
    b: jax.Array | Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    segments: Segments,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rule over the packed rows of many requests, in chunks; every request's slot is updated in place.

    Gates, l2 norms and the scale of q are part of it. A segment's bits do not depend on the other segments
    of the call, but do (within rounding) on how its tokens are cut into calls.

    Args:
        qkv: `[R, 2 Hk dk + Hv dv]`, the convolution's output as it is, activation dtype: all q, all k, all v,
            each head by head. The number of key heads Hk follows from the width.
        a, b: `[R, Hv]` raw projections, arrays or columns of packed rows.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; updated in place if donated.
        segments: which rows belong together. A segment at position 0 starts from zeros whatever its slot
            holds, one of length 0 changes nothing, one at slot 0 stores nothing. No two share a slot.
        implementation: see `Implementation`.

    Returns:
        Outputs `[R, Hv, dv]` in qkv's dtype (zeros on rows of no segment), and the pool. The state is
        rounded to the pool's dtype once, after the segment's last row.

    Raises:
        ValueError: shapes or dtypes that do not fit together; at debug level 2 (`pallas_kernels.debug`) also
            segments that overlap, and slots out of range or shared.
    """
    a, b = as_columns(a), as_columns(b)
    layout = check_rule(qkv, a, b, a_log, dt_bias, pool)
    for field in dataclasses.fields(segments):
        check(f"segments.{field.name}", getattr(segments, field.name), segments.start.shape[:1], jnp.int32)
    faults = segment_faults(qkv.shape[0], pool.shape[0])
    check_values("gated_delta_prefill", faults, segments.start, segments.length, segments.slot)
    chosen = choose("gated_delta_prefill", implementation, _unsupported(layout, qkv.dtype))
    rest = (a_log, dt_bias, pool, segments)
    if chosen == "reference" or qkv.shape[0] == 0 or segments.start.size == 0:
        return reference.gated_delta_prefill(qkv, a.value(), b.value(), *rest)
    return kernel.gated_delta_prefill(qkv, a, b, *rest, interpret=chosen == "interpret")


def _unsupported(layout: QkvLayout, dtype: jax.typing.DTypeLike) -> str | None:
    for name, size in (("key", layout.key_dim), ("value", layout.value_dim)):
        if not power_of_two(size) or not 16 <= size <= 256:
            return f"{name} head dimension {size} is no power of two from 16 to 256"
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"qkv is {dtype}, neither float32 nor bfloat16"
    return None

"""The delta rule over many tokens, by its kernels or by its reference."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.gated_delta_prefill import kernel, reference
from pallas_kernels.segments import Segments


def gated_delta_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
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
        q, k: `[R, Hk, dk]`, v: `[R, Hv, dv]`, after the convolution, activation dtype.
        a, b: `[R, Hv]` raw projections.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; updated in place if donated.
        segments: which rows belong together. A segment at position 0 starts from zeros whatever its slot
            holds, one of length 0 changes nothing, one at slot 0 stores nothing. No two share a slot.
        implementation: see `Implementation`.

    Returns:
        Outputs `[R, Hv, dv]` in v's dtype (zeros on rows of no segment), and the pool. The state is
        rounded to the pool's dtype once, after the segment's last row.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    if q.ndim != 3 or v.ndim != 3 or v.shape[0] != q.shape[0] or q.shape[1] < 1 or v.shape[1] % q.shape[1]:
        raise ValueError(
            f"q has shape {q.shape} and v {v.shape}; they take [R, Hk, dk] and [R, Hv, dv] with Hv a multiple of Hk"
        )
    (rows, heads, dv), dk = v.shape, q.shape[2]
    _check("k", k, q.shape, q.dtype)
    _check("a", a, (rows, heads), a.dtype)
    _check("b", b, (rows, heads), a.dtype)
    _check("a_log", a_log, (heads,), jnp.float32)
    _check("dt_bias", dt_bias, (heads,), jnp.float32)
    if pool.ndim != 4 or pool.shape[1:] != (heads, dv, dk) or pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"pool is {pool.dtype}{list(pool.shape)}; it takes float32 or bfloat16 [slots, {heads}, {dv}, {dk}]"
        )
    for field in dataclasses.fields(segments):
        _check(f"segments.{field.name}", getattr(segments, field.name), segments.start.shape[:1], jnp.int32)
    chosen = choose("gated_delta_prefill", implementation, _unsupported(q, v))
    arguments = (q, k, v, a, b, a_log, dt_bias, pool, segments)
    if chosen == "reference" or rows == 0 or segments.start.size == 0:
        return reference.gated_delta_prefill(*arguments)
    return kernel.gated_delta_prefill(*arguments, interpret=chosen == "interpret")


def _unsupported(q: jax.Array, v: jax.Array) -> str | None:
    for name, size in (("key", q.shape[2]), ("value", v.shape[2])):
        if not power_of_two(size) or not 16 <= size <= 256:
            return f"{name} head dimension {size} is no power of two from 16 to 256"
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q is {q.dtype}, neither float32 nor bfloat16"
    return None


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes {jnp.dtype(dtype)}{list(shape)}")

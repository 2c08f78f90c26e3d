"""The delta rule for one token a row, by its kernel or by its reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.gated_delta_decode import kernel, reference
from pallas_kernels.gated_delta_decode.kernel import DEFAULT_TILE, Tile


def gated_delta_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
    implementation: Implementation | None = None,
    tile: Tile = DEFAULT_TILE,
) -> tuple[jax.Array, jax.Array]:
    """The rule for one token a row, from slot `read_slot` to slot `write_slot` of the same pool.

    Gates, l2 norms and the scale of q are part of it. Equal slots update in place, different ones leave
    the slot that was read as it was; the values are the same bits. No row may write a slot that another
    row reads or writes, slot 0 excepted.

    Args:
        q, k: `[R, Hk, dk]`, v: `[R, Hv, dv]`, after the convolution, activation dtype.
        a, b: `[R, Hv]` raw projections.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; updated in place if donated.
        read_slot, write_slot: `[R]` int32. Slot 0 marks a padding row: it stores nothing and its output
            means nothing.
        has_state: `[R]` bool; a row without state reads as zero whatever its slot holds.
        implementation: see `Implementation`.
        tile: how the kernel cuts the state; measured, not derived.

    Returns:
        Outputs `[R, Hv, dv]` in v's dtype, and the pool.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a tile that can't be.
    """
    _check_inputs(q, k, v, a, b, a_log, dt_bias)
    rows, heads, dv = v.shape
    if pool.ndim != 4 or pool.shape[1:] != (heads, dv, q.shape[2]) or pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"pool is {pool.dtype}{list(pool.shape)}; it takes float32 or bfloat16 [slots, {heads}, {dv}, {q.shape[2]}]"
        )
    for name, vector, dtype in (
        ("read_slot", read_slot, jnp.int32),
        ("write_slot", write_slot, jnp.int32),
        ("has_state", has_state, jnp.bool_),
    ):
        _check(name, vector, (rows,), dtype)
    if not power_of_two(tile.strip):
        raise ValueError(f"tile.strip = {tile.strip}; it takes a power of two")
    arguments = (q, k, v, a, b, a_log, dt_bias, pool, read_slot, write_slot, has_state)
    unsupported = None if power_of_two(q.shape[2]) else f"key head dimension {q.shape[2]} is no power of two"
    chosen = choose("gated_delta_decode", implementation, unsupported)
    if chosen == "reference":
        return reference.gated_delta_decode(*arguments)
    return kernel.gated_delta_decode(*arguments, tile=tile, interpret=chosen == "interpret")


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes {jnp.dtype(dtype)}{list(shape)}")


def _check_inputs(
    q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array
) -> None:
    if q.ndim != 3 or v.ndim != 3 or v.shape[0] != q.shape[0] or q.shape[1] < 1 or v.shape[1] % q.shape[1]:
        raise ValueError(
            f"q has shape {q.shape} and v {v.shape}; they take [R, Hk, dk] and [R, Hv, dv] with Hv a multiple of Hk"
        )
    _check("k", k, q.shape, q.dtype)
    heads = v.shape[:2]
    _check("a", a, heads, a.dtype)
    _check("b", b, heads, a.dtype)
    _check("a_log", a_log, heads[1:], jnp.float32)
    _check("dt_bias", dt_bias, heads[1:], jnp.float32)

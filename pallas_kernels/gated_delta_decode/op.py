"""The delta rule for one token a row, by its kernel or by its reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns, as_columns
from pallas_kernels.debug import check_values, slot_faults
from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.gated_delta_decode import kernel, reference
from pallas_kernels.gated_delta_decode.kernel import DEFAULT_TILE, Tile
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, check, check_rule


def gated_delta_decode(
    qkv: jax.Array,
    a: jax.Array | Columns,
    b: jax.Array | Columns,
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
        qkv: `[R, 2 Hk dk + Hv dv]`, the convolution's output as it is, activation dtype: all q, all k, all v,
            each head by head. The number of key heads Hk follows from the width.
        a, b: `[R, Hv]` raw projections, arrays or columns of packed rows.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; updated in place if donated.
        read_slot, write_slot: `[R]` int32. Slot 0 marks a padding row: it stores nothing and its output
            means nothing.
        has_state: `[R]` bool; a row without state reads as zero whatever its slot holds.
        implementation: see `Implementation`.
        tile: how the kernel cuts the state; measured, not derived.

    Returns:
        Outputs `[R, Hv, dv]` in qkv's dtype, and the pool.

    Raises:
        ValueError: shapes or dtypes that do not fit together, or a tile that can't be; at debug
            level 2 (`pallas_kernels.debug`) also slots out of range, or a row's write slot that another row uses.
    """
    a, b = as_columns(a), as_columns(b)
    layout = check_rule(qkv, a, b, a_log, dt_bias, pool)
    for name, vector, dtype in (
        ("read_slot", read_slot, jnp.int32),
        ("write_slot", write_slot, jnp.int32),
        ("has_state", has_state, jnp.bool_),
    ):
        check(name, vector, qkv.shape[:1], dtype)
    chosen = choose_rule("gated_delta_decode", implementation, layout, tile)
    check_values("gated_delta_decode", slot_faults(pool.shape[0]), read_slot, write_slot)
    rest = (a_log, dt_bias, pool, read_slot, write_slot, has_state)
    if chosen == "reference":
        return reference.gated_delta_decode(qkv, a.value(), b.value(), *rest)
    return kernel.gated_delta_decode(qkv, a, b, *rest, tile=tile, interpret=chosen == "interpret")


def choose_rule(op: str, implementation: Implementation | None, layout: QkvLayout, tile: Tile) -> Implementation:
    """`choose` for the kernels that run the rule in tiles.

    Raises:
        ValueError: a tile that can't be.
    """
    for name, size in (("strip", tile.strip), ("strips", tile.strips), ("piece", tile.piece)):
        if not power_of_two(size):
            raise ValueError(f"tile.{name} = {size}; it takes a power of two")
    unsupported = None if power_of_two(layout.key_dim) else f"key head dimension {layout.key_dim} is no power of two"
    return choose(op, implementation, unsupported)

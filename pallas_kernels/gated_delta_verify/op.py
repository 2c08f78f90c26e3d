"""Verifying candidate rows of the delta rule, by kernels or by their references."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns, as_columns
from pallas_kernels.debug import check_values, place_faults, slot_faults
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode.op import DEFAULT_TILE, Tile, choose_rule
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, check, check_rule
from pallas_kernels.gated_delta_verify import kernel, reference
from pallas_kernels.gated_delta_verify import pages as pages_kernel
from pallas_kernels.gated_delta_verify.record import MOST_ROWS, Record, Recorded, locate, record_shapes


def gated_delta_verify(
    qkv: jax.Array,
    a: jax.Array | Columns,
    b: jax.Array | Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    record: Record,
    recorded: Recorded,
    request: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
    count: jax.Array,
    implementation: Implementation | None = None,
    tile: Tile = DEFAULT_TILE,
) -> tuple[jax.Array, jax.Array, Record]:
    """Candidate rows of every request, on one state page and a record of the step before.

    For every group of T rows, one request's: replays the recorded rows that the request has accepted into the
    checkpoint in `read_slot`, stores that as the new checkpoint in `write_slot`, runs the group's own rows from
    there without storing a state, and records them in the half that was not read. A bfloat16 checkpoint is
    rounded once, when it is stored, and the new rows start from what was stored. Nothing that the step reads
    is written unless `write_slot` is `read_slot`: with two slots it can be run again.

    The bits are those of `gated_delta_pages`, and with a float32 pool those of `gated_delta_decode` on the same
    rows one by one.

    Args:
        qkv: `[G T, 2 Hk dk + Hv dv]`, the convolution's output as it is, activation dtype; group g's rows are
            g T to g T + T - 1, in order. T is at most the record's.
        a, b: `[G T, Hv]` raw projections, arrays or columns of packed rows.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; updated in place if donated.
        record: the layer's, updated in place if donated.
        recorded: what of it means something, by request. Left to the caller: see `after_step`.
        request: `[G]` int32, whose rows these are, no two the same; -1 for padding.
        read_slot, write_slot: `[G]` int32; slot 0 marks padding, which stores nothing.
        has_state: `[G]` bool, whether the checkpoint contains a token; without, it reads as zero whatever its
            slot holds.
        count: `[G]` int32, live rows of the group. A request with 0 is replayed and no more.
        implementation: see `Implementation`.
        tile: how the kernel cuts the state. Bits depend on it: take the one that `gated_delta_decode` runs with.

    Returns:
        Outputs `[G T, Hv, dv]` in qkv's dtype, zeros on rows that are not live; the pool; the record.

    Raises:
        ValueError: shapes or dtypes that do not fit together; at debug level 2 (`pallas_kernels.debug`) also
            slots or requests out of range or shared.
    """
    a, b = as_columns(a), as_columns(b)
    layout = check_rule(qkv, a, b, a_log, dt_bias, pool)
    rows = _rows_of_group(qkv, request)
    _check_record(record, recorded, layout, qkv.dtype)
    if rows > record.rows:
        raise ValueError(f"{rows} rows a group with a record of {record.rows}; a step takes no more than are recorded")
    check("a", a, a.shape, qkv.dtype)
    _check_groups(request.shape[0], has_state, request=request, read_slot=read_slot, write_slot=write_slot, count=count)
    check_values("gated_delta_verify", slot_faults(pool.shape[0]), read_slot, write_slot)
    check_values("gated_delta_verify", place_faults("request", 0, record.keys.shape[0]), request)
    groups = locate(recorded, request, read_slot, write_slot, has_state, count, record.rows, rows)
    chosen = choose_rule("gated_delta_verify", implementation, layout, tile)
    rest = (a_log, dt_bias, pool, record, groups)
    if chosen == "reference":
        return reference.gated_delta_verify(qkv, a.value(), b.value(), *rest)
    return kernel.gated_delta_verify(qkv, a, b, *rest, tile=tile, interpret=chosen == "interpret")


def gated_delta_replay(
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    record: Record,
    recorded: Recorded,
    request: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
    implementation: Implementation | None = None,
    tile: Tile = DEFAULT_TILE,
) -> jax.Array:
    """What `gated_delta_verify` does to the checkpoints, alone: before anything that reads a whole state.

    Args: as there.

    Returns:
        The pool.

    Raises:
        ValueError: as there.
    """
    layout = QkvLayout(record.keys.shape[3], *_heads_first(pool))
    _check_record(record, recorded, layout, record.keys.dtype)
    for name, weight in (("a_log", a_log), ("dt_bias", dt_bias)):
        check(name, weight, pool.shape[1:2], jnp.float32)
    groups = read_slot.shape[0] if read_slot.ndim else 0
    _check_groups(groups, has_state, request=request, read_slot=read_slot, write_slot=write_slot)
    count = jnp.zeros_like(request)
    check_values("gated_delta_replay", slot_faults(pool.shape[0]), read_slot, write_slot)
    groups = locate(recorded, request, read_slot, write_slot, has_state, count, record.rows, 0)
    chosen = choose_rule("gated_delta_replay", implementation, layout, tile)
    if chosen == "reference":
        return reference.replay(pool, record, a_log, dt_bias, groups)[1]
    rest = (pool, record, groups, tile, chosen == "interpret")
    return kernel.gated_delta_replay(a_log, dt_bias, *rest)


def gated_delta_pages(
    qkv: jax.Array,
    a: jax.Array | Columns,
    b: jax.Array | Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    read_slot: jax.Array,
    pages: jax.Array,
    has_state: jax.Array,
    count: jax.Array,
    implementation: Implementation | None = None,
    tile: Tile = DEFAULT_TILE,
) -> tuple[jax.Array, jax.Array]:
    """Candidate rows of every request with a state page for each: the reference for `gated_delta_verify`.

    The group's rows run from `read_slot`, and the state after row t is stored in `pages[:, t]`. A bfloat16 state
    is rounded where it is stored, not between a step's rows.

    Args:
        qkv, a, b, a_log, dt_bias, pool, implementation, tile: as in `gated_delta_verify`.
        read_slot: `[G]` int32, any slot, one of the group's pages included.
        pages: `[G, T]` int32, slots of the group's own; 0 stores nothing.
        has_state: `[G]` bool.
        count: `[G]` int32, live rows of the group; 0 for padding.

    Returns:
        Outputs `[G T, Hv, dv]` in qkv's dtype, zeros on rows that are not live; and the pool.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    a, b = as_columns(a), as_columns(b)
    layout = check_rule(qkv, a, b, a_log, dt_bias, pool)
    rows = _rows_of_group(qkv, read_slot)
    check("pages", pages, (read_slot.shape[0], rows), jnp.int32)
    _check_groups(read_slot.shape[0], has_state, read_slot=read_slot, count=count)
    count, source = jnp.clip(count, 0, rows), jnp.where(has_state, read_slot, 0)
    chosen = choose_rule("gated_delta_pages", implementation, layout, tile)
    rest = (a_log, dt_bias, pool, source, pages, count)
    if chosen == "reference":
        return reference.gated_delta_pages(qkv, a.value(), b.value(), *rest)
    return pages_kernel.gated_delta_pages(qkv, a, b, *rest, tile=tile, interpret=chosen == "interpret")


def _heads_first(pool: jax.Array) -> tuple[int, int, int]:
    """Hv, dk and dv."""
    _, heads, dv, dk = pool.shape
    return heads, dk, dv


def _rows_of_group(qkv: jax.Array, vector: jax.Array) -> int:
    groups = vector.shape[0] if vector.ndim else 0
    if not groups or qkv.shape[0] % groups or not 1 <= qkv.shape[0] // groups <= MOST_ROWS:
        raise ValueError(
            f"qkv has {qkv.shape[0]} rows for {groups} groups; it takes as many for each, from 1 to {MOST_ROWS}"
        )
    return qkv.shape[0] // groups


def _check_groups(groups: int, has_state: jax.Array, **numbers: jax.Array) -> None:
    for name, vector in numbers.items():
        check(name, vector, (groups,), jnp.int32)
    check("has_state", has_state, (groups,), jnp.bool_)


def _check_record(record: Record, recorded: Recorded, layout: QkvLayout, dtype: jax.typing.DTypeLike) -> None:
    requests, rows = record.keys.shape[0], record.rows
    for name in ("keys", "values", "gates"):
        declared = getattr(record_shapes(layout, requests, rows, dtype), name)
        check(f"record.{name}", getattr(record, name), declared.shape, declared.dtype)
    for name in ("live", "parity", "advance"):
        check(f"recorded.{name}", getattr(recorded, name), (requests,), jnp.int32)

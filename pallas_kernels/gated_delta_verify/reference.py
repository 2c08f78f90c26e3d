"""Verifying candidate rows of the delta rule on one state page a request: the definition.

The other design, a page for every candidate row, is `gated_delta_pages`: what this one must agree with, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_decode.reference import read_state, update_rows, write_state
from pallas_kernels.gated_delta_verify.record import Groups, Record

Rows = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
"""q, k `[G, T, Hk, dk]`, v `[G, T, Hv, dv]`, a and b `[G, T, Hv]`."""


def run_rows(
    state: jax.Array,
    rows: Rows,
    a_log: jax.Array,
    dt_bias: jax.Array,
    count: jax.Array,
    keep: Callable[[Any, jax.Array, jax.Array, jax.Array], Any] = lambda kept, *_: kept,
    kept: Any = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """The first `count` rows of every group, one after the other.

    Args:
        state: `[G, Hv, dv, dk]` float32.
        rows: see `Rows`.
        a_log, dt_bias: `[Hv]` float32.
        count: `[G]` int32.
        keep: (kept, row number, whether each group runs this row, its state) -> kept.
        kept: what `keep` starts with.

    Returns:
        The state, outputs `[G, T, Hv, dv]` float32 with zeros on rows that did not run, and what was kept.
    """

    def body(t: jax.Array, carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
        state, out, kept = carry
        q, k, v, a, b = (jax.lax.dynamic_index_in_dim(x, t, 1, keepdims=False) for x in rows)
        runs = t < count
        state, y = update_rows(runs, state, q, k, v, a, b, a_log, dt_bias)
        out = out.at[:, t].set(y)
        return state, out, keep(kept, t, runs, state)

    out = jnp.zeros(rows[2].shape, jnp.float32)
    return jax.lax.fori_loop(0, jnp.max(count, initial=0), body, (state, out, kept))


def candidate_rows(qkv: jax.Array, a: jax.Array, b: jax.Array, layout: QkvLayout, groups: int) -> Rows:
    """Packed rows `[G T, ...]` as `Rows`."""
    parts = (*layout.split(qkv), a, b)
    q, k, v, a, b = (x.reshape(groups, -1, *x.shape[1:]) for x in parts)
    return q, k, v, a, b


def replay(
    pool: jax.Array, record: Record, a_log: jax.Array, dt_bias: jax.Array, groups: Groups
) -> tuple[jax.Array, jax.Array]:
    """Replays recorded rows into the checkpoints.

    Returns:
        The new checkpoints `[G, Hv, dv, dk]`, float32 of what was stored, and the pool.
    """
    rows = (groups.replay[:, None] + jnp.arange(record.rows)[None, :]).reshape(-1)
    keys, values, raw = (
        x.reshape(-1, *x.shape[3:])[rows].reshape(-1, record.rows, *x.shape[3:])
        for x in (record.keys, record.values, record.gates)
    )
    # Whatever is not replayed may hold anything.
    recorded = keys, keys, values, raw[:, :, 0], raw[:, :, 1]
    state, _, _ = run_rows(read_state(pool, groups.source), recorded, a_log, dt_bias, groups.replayed)
    # Rounded once, here; the barrier keeps a compiler from taking the conversions there and back for nothing.
    stored = jax.lax.optimization_barrier(state.astype(pool.dtype))
    return stored.astype(jnp.float32), write_state(pool, groups.target, stored)


def gated_delta_verify(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    record: Record,
    groups: Groups,
) -> tuple[jax.Array, jax.Array, Record]:
    """Replays into the checkpoint, stores it, runs the candidate rows from there, and records them.

    Args:
        qkv: `[G T, 2 Hk dk + Hv dv]`, the convolution's output; rows t < count of a group are live.
        a, b: `[G T, Hv]` raw projections.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; returned updated (donate it).
        record: the layer's; returned updated (donate it).
        groups: where each group's state and rows are.

    Returns:
        Outputs `[G T, Hv, dv]` in qkv's dtype, zeros on rows that are not live; the pool; the record.
    """
    count = groups.count.shape[0]
    rows = candidate_rows(qkv, a, b, qkv_layout(qkv, pool), count)
    state, pool = replay(pool, record, a_log, dt_bias, groups)
    _, out, _ = run_rows(state, rows, a_log, dt_bias, groups.count)
    _, k, v, raw_a, raw_b = rows
    t = jnp.arange(k.shape[1], dtype=jnp.int32)
    end = record.keys.shape[0] * 2 * record.rows
    target = jnp.where(t[None, :] < groups.count[:, None], groups.record[:, None] + t[None, :], end)

    def put(array: jax.Array, new: jax.Array) -> jax.Array:
        # Rows that are dropped carry `out`, so that the write needs the replay's reads: where nothing orders a write
        # behind the reads, XLA copies the whole record first.
        dropped = out[:, :, 0, 0].reshape(*target.shape, *(1,) * (new.ndim - 2))
        live = (target < end).reshape(dropped.shape)
        new = jnp.where(live, new, dropped.astype(new.dtype))
        flat = array.reshape(-1, *array.shape[3:])
        return flat.at[target].set(new, mode="drop").reshape(array.shape)

    record = Record(put(record.keys, k), put(record.values, v), put(record.gates, jnp.stack([raw_a, raw_b], axis=2)))
    return out.reshape(-1, *out.shape[2:]).astype(qkv.dtype), pool, record


def gated_delta_pages(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    source: jax.Array,
    pages: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs candidate rows from slot `source` and stores the state after row t in slot `pages[:, t]`.

    Args:
        qkv, a, b, a_log, dt_bias, pool: as in `gated_delta_verify`.
        source: `[G]` int32, 0 reads zeros.
        pages: `[G, T]` int32.
        count: `[G]` int32, 0 for padding.

    Returns:
        Outputs `[G T, Hv, dv]` in qkv's dtype, zeros on rows that are not live; and the pool.
    """
    rows = candidate_rows(qkv, a, b, qkv_layout(qkv, pool), pages.shape[0])

    def store(pool: jax.Array, t: jax.Array, runs: jax.Array, state: jax.Array) -> jax.Array:
        slot = jax.lax.dynamic_index_in_dim(pages, t, 1, keepdims=False)
        return write_state(pool, jnp.where(runs, slot, 0), state)

    _, out, pool = run_rows(read_state(pool, source), rows, a_log, dt_bias, count, store, pool)
    return out.reshape(-1, *out.shape[2:]).astype(qkv.dtype), pool

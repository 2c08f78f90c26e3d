"""`verify_step`: a few candidate rows of every request in one step, of which any number may be accepted.

It takes the place of `decode_step` in a state that speculates; one row of a request is plain decoding. Rows that are
rejected cost nothing to undo: what they left in rings, records and KV pages lies where the next step writes before
it reads, and the recurrent states that they went through are not current (`slots`) or were never stored (`record`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from gdnjax.model.layers import head
from gdnjax.model.step import Gates, Qkv, Rule, attend_from, kv_places, run_over_state
from gdnjax.state.batch import VerifyBatch
from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params
from pallas_kernels.causal_conv import causal_conv_packed
from pallas_kernels.gated_delta_verify import Record, gated_delta_pages, gated_delta_verify
from pallas_kernels.segments import Segments


def verify_step(params: Params, state: State, batch: VerifyBatch) -> tuple[jax.Array, jax.Array, State]:
    """The candidate rows of every group's request, each after the ones before it.

    Until `gdnjax.state.commit_verified`, positions and current slots stay as they were, so in the `twin` layout a step
    that is not committed can simply be run again. In `in_place` it cannot: the step writes over what it read.

    Rows behind a request's `max_length` don't run, whatever `count` says; so `state.pending` is what did.

    Args:
        params: weights.
        state: the state (donate it), of a config with `speculate`.
        batch: the rows, T <= 1 + `speculate` of each group. Padding stores nothing.

    Returns:
        Logits `[G, T, V]` float32, the hidden after the final norm `[G, T, H]`, which mean nothing on rows that are
        not live, and the state with the step pending.

    Raises:
        ValueError: more rows than the config takes, or a state that does not speculate.
    """
    c, (groups, rows) = state.config, batch.tokens.shape
    if not c.speculate or rows > c.verify_rows:
        takes = f"1 to {c.verify_rows}" if c.speculate else "decode_step, or a config with speculate from 1 to 7"
        raise ValueError(f"{rows} rows of a request with speculate = {c.speculate}; it takes {takes}")
    owner = jnp.maximum(batch.request, 0)
    count = jnp.clip(batch.count, 0, jnp.minimum(rows, c.max_length - state.position[owner]))
    count = jnp.where(batch.request >= 0, count, 0)
    live, t = count > 0, jnp.arange(rows, dtype=jnp.int32)
    first = jnp.where(live, state.position[owner], 0)
    row_live = (t < count[:, None]).reshape(-1)
    row_request = jnp.repeat(owner, rows)
    position = jnp.where(row_live, (first[:, None] + t).reshape(-1), 0)
    segments = _segments(state, jnp.where(live, owner, c.max_requests), count, rows)
    ring_of_row = jnp.where(row_live, row_request, -1)

    def convolve(qkv: Qkv, weight: jax.Array, ring: jax.Array) -> tuple[jax.Array, jax.Array]:
        return causal_conv_packed(qkv, weight, ring, segments, ring_of_row, c.kernels)

    records = [] if state.record is None else list(state.record.layers)
    if state.record is None:
        rule = _on_slots(state, owner, count, rows)
    else:
        rule = _on_records(state, records, jnp.where(live, owner, -1), count)
    slot, _, length = kv_places(state, row_live, row_request, position)
    attend = attend_from(c, position, slot, state.page_table[owner], length)
    hidden, state = run_over_state(params, state, batch.tokens.reshape(-1), convolve, rule, attend)
    if state.record is not None:
        state = dataclasses.replace(state, record=dataclasses.replace(state.record, layers=tuple(records)))
    hidden = hidden.reshape(groups, rows, -1)
    return head(params, hidden), hidden, dataclasses.replace(state, pending=segments.length)


def _segments(state: State, place: jax.Array, count: jax.Array, rows: int) -> Segments:
    """Each request's rows: group g's are `count` from g T on. place: `[G]`, the request; out of range for padding."""
    groups, none = place.shape[0], jnp.zeros_like(state.position)
    return Segments(
        start=none.at[place].set(jnp.arange(groups, dtype=jnp.int32) * rows, mode="drop"),
        length=none.at[place].set(count, mode="drop"),
        position=state.position,
        slot=state.read_slot,
    )


def _on_slots(state: State, owner: jax.Array, count: jax.Array, rows: int) -> Rule:
    """From the current slot, into a slot for each row."""
    live, t = count > 0, jnp.arange(rows, dtype=jnp.int32)
    source = jnp.where(live, state.read_slot[owner], 0)
    targets = jnp.where(t < count[:, None], state.write_slot[owner][:, None] + t, 0)
    has_state, kernels = state.position[owner] > 0, state.config.kernels

    def rule(_: int, qkv: jax.Array, a: Qkv, b: Qkv, gates: Gates, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gated_delta_pages(qkv, a, b, *gates, pool, source, targets, has_state, count, kernels)

    return rule


def _on_records(state: State, records: list[Record], request: jax.Array, count: jax.Array) -> Rule:
    """From the checkpoint and what the last step recorded, into the next checkpoint and the other half of the record.

    records: by GDN layer; replaced as the layers run. request: `[G]`, -1 for padding.
    """
    assert state.record is not None
    owner, recorded, kernels = jnp.maximum(request, 0), state.record.recorded, state.config.kernels
    read, write = (jnp.where(request >= 0, slots[owner], 0) for slots in (state.read_slot, state.write_slot))
    has_state = state.position[owner] > 0  # or no checkpoint: the first step stores one, of zeros

    def rule(layer: int, qkv: jax.Array, a: Qkv, b: Qkv, gates: Gates, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pool, records[layer] = gated_delta_verify(
            qkv, a, b, *gates, pool, records[layer], recorded, request, read, write, has_state, count, kernels
        )
        return out, pool

    return rule

"""The records of speculating requests in the state: one recurrent page a request, and what rebuilds the rest.

With a record a request's current slot is a *checkpoint*: it lags behind by the rows that the last verify step ran
and the request accepted. `position` counts them, and the next step replays them. Whatever reads or writes a whole
state (a prefill, a fork, a snapshot, the end of speculation) calls `replay` first. `State.record` is None without
speculation, and then nothing here costs anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.state.pytree import Records, State, commit_counted
from gdnjax.weights.declaration import Params
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.gated_delta_decode.qkv import QkvLayout
from pallas_kernels.gated_delta_verify import Recorded, after_step, gated_delta_replay, record_shapes


def records_shapes(config: Config, rows: int) -> Records:
    """The records of `max_requests` requests as a pytree of `jax.ShapeDtypeStruct`.

    rows: T, the most candidate rows of a verify step: the row emitted last and its drafts.

    Raises:
        ValueError: rows outside of 1 to 8.
    """
    c = config
    layout = QkvLayout(c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    layer = record_shapes(layout, c.max_requests, rows, jnp.dtype(c.dtype))
    # Typed as what stands in its place.
    vector: Any = jax.ShapeDtypeStruct((c.max_requests,), jnp.dtype(jnp.int32))
    return Records((layer,) * len(c.gdn_layers), Recorded(vector, vector, vector))


def start_speculation(state: State, rows: int, device: Any = None) -> State:
    """Gives every request an empty record of `rows` rows, and rings in which rejected rows overwrite nothing that is
    read: conv width - 1 + `rows` columns. Live requests keep what they have.

    Raises:
        ValueError: rows outside of 1 to 8.
    """
    record = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=device), records_shapes(state.config, rows))
    columns = state.config.linear_conv_kernel_dim - 1 + rows
    return dataclasses.replace(state, record=record, conv=_resized(state, columns))


def stop_speculation(params: Params, state: State) -> State:
    """Replays, drops the records and takes the rings back to their plain width."""
    state = replay(params, state)
    return dataclasses.replace(state, record=None, conv=_resized(state, state.config.linear_conv_kernel_dim))


def replay(params: Params, state: State, requests: jax.Array | None = None) -> State:
    """Brings checkpoints up to their requests' positions, in place, and clears the records.

    Bit for bit what the next verify step would have done to them. A step that is pending is lost.

    Args:
        params: weights.
        state: the state (donate it). Without records it is returned as it is.
        requests: `[max_requests]` bool, whose; None is all.
    """
    record, c = state.record, state.config
    if record is None:
        return state
    wanted = jnp.ones(c.max_requests, bool) if requests is None else requests
    number = jnp.arange(c.max_requests, dtype=jnp.int32)
    lagging = wanted & (record.recorded.replayed > 0)
    slot, has_state = jnp.where(lagging, state.read_slot, 0), has_checkpoint(state)
    recurrent = list(state.recurrent)
    for i, layer in enumerate(c.gdn_layers):
        p = params["model"]["layers"][layer]["linear_attn"]
        recurrent[i] = gated_delta_replay(
            p["A_log"], p["dt_bias"], recurrent[i], record.layers[i], record.recorded, number, slot, slot, has_state,
            c.kernels,
        )  # fmt: skip
    cleared = jax.tree.map(lambda x: jnp.where(wanted, 0, x), record.recorded)
    return dataclasses.replace(state, recurrent=tuple(recurrent), record=dataclasses.replace(record, recorded=cleared))


def has_checkpoint(state: State) -> jax.Array:
    """`[max_requests]` bool, whether a request's current slot contains a token: what `gated_delta_verify` takes as
    `has_state`."""
    lag = 0 if state.record is None else state.record.recorded.replayed
    return state.position - lag > 0


def commit_verified(state: State, accepted: jax.Array) -> State:
    """Makes a verify step current: accepted rows count, slots change places, the step's rows are the record.

    Args:
        state: with a verify step pending: `pending` holds the rows that each request ran.
        accepted: `[max_requests]` int32, how many of them each request accepts, the row emitted last included.

    Raises:
        ValueError: a state without records.
    """
    if state.record is None:
        raise ValueError("the state has no records; start_speculation gives it some, commit is for plain steps")
    recorded = after_step(state.record.recorded, state.pending, accepted)
    record = dataclasses.replace(state.record, recorded=recorded)
    return dataclasses.replace(commit_counted(state, jnp.where(state.pending > 0, recorded.replayed, 0)), record=record)


def _resized(state: State, columns: int) -> tuple[jax.Array, ...]:
    """The rings with another number of columns: the last inputs of every request where they belong there."""
    requests = jnp.arange(state.config.max_requests, dtype=jnp.int32)

    def resize(ring: jax.Array) -> jax.Array:
        kept = min(columns, ring.shape[1])
        window = ring_window(ring, requests + 1, state.position, kept)
        column = (state.position[:, None] - kept + jnp.arange(kept)[None, :]) % columns
        new = jnp.zeros((ring.shape[0], columns, ring.shape[2]), ring.dtype)
        return new.at[requests[:, None] + 1, column].set(window)

    return tuple(map(resize, state.conv))

"""Replaying the records of speculating requests: what brings a checkpoint up to its request.

With a record a request's current slot is a *checkpoint*: it lags behind by the rows that the last verify step ran
and the request accepted. `position` counts them, and the next step replays them. Whatever reads or writes a whole
state (a prefill, a fork, a snapshot, the end of speculation) calls `replay` first.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params
from pallas_kernels.gated_delta_verify import gated_delta_replay


def replay(params: Params, state: State, requests: jax.Array | None = None) -> State:
    """Brings checkpoints up to their requests' positions, in place, and clears the records.

    Bit for bit what the next verify step would have done to them. In the `twin` layout a step that is pending stays
    so; `in_place` it has replayed already, and must be committed first.

    Args:
        params: weights.
        state: the state (donate it). Without records it is returned as it is.
        requests: `[G]` int32, whose, no two the same; -1 is padding. None is all.
    """
    record, c = state.record, state.config
    if record is None:
        return state
    number = jnp.arange(c.max_requests, dtype=jnp.int32) if requests is None else requests
    owner = jnp.maximum(number, 0)
    lagging = (number >= 0) & (record.recorded.replayed[owner] > 0)
    # Whoever has recorded rows has a checkpoint, of zeros if no other rows came before them: that step stored it.
    slot, has_state = jnp.where(lagging, state.read_slot[owner], 0), lagging
    recurrent = list(state.recurrent)
    for i, layer in enumerate(c.gdn_layers):
        p = params["model"]["layers"][layer]["linear_attn"]
        recurrent[i] = gated_delta_replay(
            p["A_log"], p["dt_bias"], recurrent[i], record.layers[i], record.recorded, number, slot, slot, has_state,
            c.kernels,
        )  # fmt: skip
    place = jnp.where(number >= 0, number, c.max_requests)
    live, advance = (x.at[place].set(0, mode="drop") for x in (record.recorded.live, record.recorded.advance))
    # The half that holds nothing now keeps its turn: the other one may hold the rows of a pending step.
    recorded = dataclasses.replace(record.recorded, live=live, advance=advance)
    return dataclasses.replace(state, recurrent=tuple(recurrent), record=dataclasses.replace(record, recorded=recorded))

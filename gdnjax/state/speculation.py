"""Speculation in the state: commits of verify steps, and switching it on and off while requests are live.

`init_state` of a config with `speculate` gives a state that speculates from the start.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.state.pytree import State, commit_counted, first_slots, state_shapes
from gdnjax.state.record import replay
from gdnjax.weights.declaration import Params
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.gated_delta_verify import after_step


def commit_verified(state: State, accepted: jax.Array) -> State:
    """Makes a verify step current: accepted rows count, and the next step starts behind them.

    Pure, and free of large copies. Requests that the step did not run stay as they are.

    Args:
        state: with a verify step pending: `pending` holds the rows that each request ran.
        accepted: `[max_requests]` int32, how many of them each request accepts, the row emitted last included. That
            one always counts: 0 and less are taken for 1, and more than ran for all that ran.

    Raises:
        ValueError: a state of a config that does not speculate.
    """
    if not state.config.speculate:
        raise ValueError("speculate = 0: the state takes plain steps, which gdnjax.state.commit makes current")
    counted = jnp.where(state.pending > 0, jnp.clip(accepted, 1, state.pending), 0)
    record = state.record
    if record is not None:
        record = dataclasses.replace(record, recorded=after_step(record.recorded, state.pending, counted))
    return dataclasses.replace(commit_counted(state, counted), record=record)


def start_speculation(
    state: State, speculate: int, speculative_state: Literal["record", "slots"] = "record", device: Any = None
) -> State:
    """Gives a state what its requests need to speculate: records or slots, and wider rings.

    Live requests keep what they have; a step that is not committed is lost.

    Args:
        state: one that does not speculate.
        speculate, speculative_state: the keys of the config, which the state's config has from then on.
        device: a device or sharding for what is new; None is the default device.

    Raises:
        ConfigError: drafts outside of 1 to 7, or arrays that would be too large.
        ValueError: a state that speculates already.
    """
    if state.config.speculate:
        raise ValueError(f"the state speculates already, speculate = {state.config.speculate}; stop_speculation first")
    config = state.config.replace(speculate=speculate, speculative_state=speculative_state)
    record = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=device), state_shapes(config).record)
    return dataclasses.replace(_laid_out(state, config, device), record=record)


def stop_speculation(params: Params, state: State) -> State:
    """Replays and drops the records, or drops the slots of drafts, and takes the rings back to their plain width.

    A step that is not committed is lost.
    """
    config = state.config.replace(speculate=0, speculative_state="record")
    return dataclasses.replace(_laid_out(replay(params, state), config), record=None)


def _laid_out(state: State, config: Config, device: Any = None) -> State:
    """What every request has, in slots and rings of another config's numbers."""
    requests = jnp.arange(config.max_requests, dtype=jnp.int32)

    def zeros(array: jax.Array, second: int, axis: int) -> jax.Array:
        shape = (*array.shape[:axis], second, *array.shape[axis + 1 :])
        return jnp.zeros(shape, array.dtype, device=device)

    def resized(ring: jax.Array) -> jax.Array:
        # The last inputs where they belong there.
        kept = min(config.ring_columns, ring.shape[1])
        window = ring_window(ring, requests + 1, state.position, kept)
        column = (state.position[:, None] - kept + jnp.arange(kept)[None, :]) % config.ring_columns
        return zeros(ring, config.ring_columns, 1).at[requests[:, None] + 1, column].set(window)

    recurrent, read, write = state.recurrent, state.read_slot, state.write_slot
    if config.slots != state.config.slots:
        new_read, new_write = (jax.device_put(slots, device) for slots in first_slots(config))
        recurrent = tuple(zeros(p, config.slots, 0).at[new_read].set(p[read]) for p in recurrent)
        read, write = new_read, new_write
    return dataclasses.replace(
        state,
        recurrent=recurrent,
        conv=tuple(map(resized, state.conv)),
        read_slot=read,
        write_slot=write,
        pending=jnp.zeros_like(state.pending),
        config=config,
    )

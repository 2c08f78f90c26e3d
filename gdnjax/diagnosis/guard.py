"""Guard rows: requests and KV pages that nobody gets, between those that somebody has.

A guarded state has twice as many requests and KV pages, and every other one is left out: requests 1, 3, 5... and pages
2, 4, 6... What is found by a request's number, its slots, its ring row, its record, then lies between what belongs to
nobody, and no step, kernel or page table has to know of it. What is nobody's holds the bits of one NaN, which no step
may change; slot 0, ring row 0 and page 0 are to stay zero.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.state.pytree import State

EVERY = 2
"""Of so many requests, and of so many pages, one is somebody's."""
POISON = {2: 0x7FD5, 4: 0x7FD5A5A5}
"""Bits of the guards by bytes of an element: a NaN, so that reading one shows too."""

KINDS = ("prefill", "decode", "verify", "draft")
"""Kinds of steps: what `check_guards` knows the operations of."""


class StrayWriteError(RuntimeError):
    """An operation has written a row that is not its own: the message names operation, layer and slot."""


class Watched(NamedTuple):
    """An array of the state and which of its rows are watched.

    * `layer`: the model's layer; None is the draft head. `row`: what a row is called.
    * `guards`: `[rows]` bool, rows that are nobody's. `reserved`: whether row 0 has to stay zero.
    """

    layer: int | None
    row: str
    guards: np.ndarray
    reserved: bool = True


def spaced(config: Config) -> Config:
    """The config of a guarded state, of which every other request and page is nobody's.

    Raises:
        ConfigError: twice as many pass a limit.
    """
    tokens = None if config.kv_tokens is None else EVERY * config.kv_tokens
    return config.replace(max_requests=EVERY * config.max_requests, kv_tokens=tokens)


@functools.partial(jax.jit, donate_argnames="state")
def guarded(state: State) -> State:
    """A fresh state of a `spaced` config with poisoned guards. Pages that requests have already are spaced out too."""
    arrays, tree = jax.tree.flatten(_arrays(state))
    for i, (array, watched) in enumerate(zip(arrays, _watched(state), strict=True)):
        bits = _bits(array)
        poison = jax.lax.bitcast_convert_type(jnp.array(POISON[array.dtype.itemsize], bits.dtype), array.dtype)
        mask = np.repeat(watched.guards, array.shape[0] // len(watched.guards))
        arrays[i] = jnp.where(mask.reshape(-1, *[1] * (array.ndim - 1)), poison, array)
    recurrent, conv, keys, values, layers = jax.tree.unflatten(tree, arrays)
    record = None if state.record is None else dataclasses.replace(state.record, layers=layers)
    table = jnp.where(state.page_table > 0, EVERY * (state.page_table - 1) + 1, 0)
    return dataclasses.replace(
        state, recurrent=recurrent, conv=conv, keys=keys, values=values, record=record, page_table=table
    )


def check_guards(state: State, step: int, what: str) -> None:
    """Waits for the device and looks at every guard.

    Args:
        state: a guarded one; it stays usable.
        step: number of the last step that has run.
        what: its kind, several joined by commas, or the call of the pool that has changed the state since.

    Raises:
        StrayWriteError: something has written a guard.
    """
    changed = jax.device_get(_changed(state))
    fields = [path[0].idx for path, _ in jax.tree_util.tree_flatten_with_path(_arrays(state))[0]]
    for field, watched, row in zip(fields, _watched(state), changed, strict=True):
        if row >= 0:
            known = [_operation(state, field, kind) for kind in what.split(", ") if kind in KINDS]
            by = " or ".join(dict.fromkeys(known)) or f"{what} of the pool"
            layer = "the draft head" if watched.layer is None else f"layer {watched.layer}"
            meaning = f"a guard behind {row - 1}, which nobody owns" if row else "which is reserved and has to be zero"
            raise StrayWriteError(f"step {step} ({what}): {by} wrote {watched.row} {row} of {layer}, {meaning}")


def _operation(state: State, field: int, kind: str) -> str:
    """What writes an array of the state in a step of some kind. `field`: its place in `_arrays`."""
    if field == 0:
        verify = "gated_delta_pages" if state.record is None else "gated_delta_verify"
        return verify if kind == "verify" else f"gated_delta_{kind}"
    if field == 1:
        return "causal_conv_decode" if kind == "decode" else "causal_conv_packed"
    return "gated_delta_verify" if field == 4 else "attention_prologue"


@jax.jit
def _changed(state: State) -> list[jax.Array]:
    """For each watched array the first row that is not as it was; -1 for none."""
    found = []
    for array, watched in zip(jax.tree.leaves(_arrays(state)), _watched(state), strict=True):
        rows = len(watched.guards)
        bits = _bits(array).reshape(rows, -1)
        wrong = watched.guards & jnp.any(bits != POISON[array.dtype.itemsize], axis=1)
        if watched.reserved:
            wrong |= (np.arange(rows) == 0) & jnp.any(bits != 0, axis=1)
        found.append(jnp.where(jnp.any(wrong), jnp.argmax(wrong), -1))
    return found


def _bits(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def _arrays(state: State) -> tuple[object, ...]:
    return state.recurrent, state.conv, state.keys, state.values, () if state.record is None else state.record.layers


def _watched(state: State) -> Iterator[Watched]:
    """In the order of the leaves of `_arrays`."""
    c = state.config
    nobody = np.arange(c.max_requests) % EVERY > 0
    # The slots of a step lie in order of the requests, as many for each, once or (twin) twice.
    halves = c.slots_per_request // c.step_slots
    slots = np.tile(np.repeat(nobody, c.step_slots), halves)
    pages = np.arange(1, 1 + c.kv_pages) % EVERY == 0
    caches = [*c.attention_layers, *[None] * c.draft_kv]
    yield from (Watched(layer, "recurrent slot", np.append(False, slots)) for layer in c.gdn_layers)
    yield from (Watched(layer, "ring row", np.append(False, nobody)) for layer in c.gdn_layers)
    yield from (Watched(layer, "page of keys", np.append(False, pages)) for layer in caches)
    yield from (Watched(layer, "page of values", np.append(False, pages)) for layer in caches)
    if state.record is not None:
        for layer, record in zip(c.gdn_layers, state.record.layers, strict=True):
            yield from (Watched(layer, "record", nobody, False) for _ in jax.tree.leaves(record))

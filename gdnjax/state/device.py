"""What the pool does on the device: clear, fork, snapshot, resume, and writes of pages and page tables.

Pure functions and their jitted forms (`run_*`), which donate what they change. Every one has one compiled
shape a config: request numbers, slots and pages are values. One request's slot is read and written with
dynamic slices, so that no pool is copied.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.state.pytree import Records, State, first_of_step, state_shapes

PAGES_PER_COPY = 8
"""Pages that one call of `copy_pages`, `read_pages` or `write_pages` moves; unused places hold page 0."""

Arrays = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Carried:
    """What a request carries besides its KV pages, without the other requests.

    * `recurrent`: per GDN layer `[Hv, dv, dk]`, the current slot.
    * `conv`: per GDN layer `[W, C]`, the ring as it stands; position p lives in column p mod W.
    """

    recurrent: Arrays
    conv: Arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SnapshotStore:
    """`Carried` of many moments: per GDN layer `[snapshots, Hv, dv, dk]` and `[snapshots, W, C]`."""

    recurrent: Arrays
    conv: Arrays


def snapshot_store(config: Config, count: int, device: Any = None) -> SnapshotStore:
    """A store of `count` snapshots, zeros; one array a layer, like the pool."""
    shapes = state_shapes(config)
    make = lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype, device=device)  # noqa: E731
    return SnapshotStore(tuple(map(make, shapes.recurrent)), tuple(map(make, shapes.conv)))


def snapshot_bytes(config: Config) -> int:
    """Bytes of one place in the store: a request's current slots and rings, the in-place share of its state."""
    shapes = state_shapes(config)
    return sum(math.prod(s.shape[1:]) * s.dtype.itemsize for s in (*shapes.recurrent, *shapes.conv))


def snapshot_places(config: Config) -> int:
    """Places of the store that `prefix_cache_bytes` pays for."""
    return config.prefix_cache_bytes // max(1, snapshot_bytes(config))


def _at(array: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)


def _put(array: jax.Array, value: jax.Array, index: jax.Array) -> jax.Array:
    # The barrier keeps a value that was read from `array` itself out of the fusion that writes it:
    # such a fusion cannot work in place.
    return jax.lax.dynamic_update_index_in_dim(array, jax.lax.optimization_barrier(value), index, 0)


def _cleared(state: State, request: jax.Array) -> Records | None:
    return None if state.record is None else state.record.cleared(request)


def carried(state: State, request: jax.Array) -> Carried:
    """The current slot and the ring of a request: what a fork, a snapshot and the prefix cache copy. Of a request that
    speculates the slot lags behind its position: replay first (`gdnjax.state.record`)."""
    slot = state.read_slot[request]
    return Carried(
        tuple(_at(pool, slot) for pool in state.recurrent), tuple(_at(ring, request + 1) for ring in state.conv)
    )


def place(state: State, request: jax.Array, moment: Carried, position: jax.Array, pages: jax.Array) -> State:
    """Gives a new request a carried state, its position and its pages, in one step: all of it, or nothing.

    pages: `[pages_per_request]` int32, the request's row of the page table.
    """
    slot = state.read_slot[request]
    return dataclasses.replace(
        state,
        recurrent=tuple(_put(p, x, slot) for p, x in zip(state.recurrent, moment.recurrent, strict=True)),
        conv=tuple(_put(ring, x, request + 1) for ring, x in zip(state.conv, moment.conv, strict=True)),
        position=state.position.at[request].set(position),
        page_table=state.page_table.at[request].set(pages),
        record=_cleared(state, request),
    )


def fork(state: State, source: jax.Array, target: jax.Array, pages: jax.Array) -> State:
    """Makes `target` what `source` is now: its current slot, ring and position; `pages` as in `place`."""
    return place(state, target, carried(state, source), state.position[source], pages)


def clear(state: State, request: jax.Array) -> State:
    """Zeroes all slots of a request and forgets its position, its pending step, its record and its pages."""
    zeros = lambda pool: jnp.zeros((state.config.step_slots, *pool.shape[1:]), pool.dtype)  # noqa: E731
    recurrent, read_slot = state.recurrent, state.read_slot
    for slot in (read_slot[request], state.write_slot[request]):
        first = first_of_step(state.config, slot)
        recurrent = tuple(jax.lax.dynamic_update_slice_in_dim(p, zeros(p), first, 0) for p in recurrent)
    if state.config.step_slots > 1:
        # The first of them: whoever has not been told how many rows counted knows that one.
        read_slot = read_slot.at[request].set(first_of_step(state.config, read_slot[request]))
    return dataclasses.replace(
        state,
        recurrent=recurrent,
        read_slot=read_slot,
        position=state.position.at[request].set(0),
        pending=state.pending.at[request].set(0),
        page_table=state.page_table.at[request].set(0),
        record=_cleared(state, request),
    )


def discard(state: State) -> State:
    """Drops the step that is not committed. Nothing is zeroed: the step can be run again (`twin` only)."""
    return dataclasses.replace(state, pending=jnp.zeros_like(state.pending))


def store(snapshots: SnapshotStore, state: State, request: jax.Array, index: jax.Array) -> SnapshotStore:
    """Writes what a request carries into place `index` of the store."""
    moment = carried(state, request)
    put = lambda many, one: _put(many, one, index)  # noqa: E731
    return SnapshotStore(
        tuple(map(put, snapshots.recurrent, moment.recurrent)), tuple(map(put, snapshots.conv, moment.conv))
    )


def resume(
    state: State,
    snapshots: SnapshotStore,
    index: jax.Array,
    request: jax.Array,
    position: jax.Array,
    pages: jax.Array,
) -> State:
    """Gives a request the state in place `index` of the store; the other arguments as in `place`."""
    at = lambda many: _at(many, index)  # noqa: E731
    moment = Carried(tuple(map(at, snapshots.recurrent)), tuple(map(at, snapshots.conv)))
    return place(state, request, moment, position, pages)


def write_table(table: jax.Array, entries: jax.Array) -> jax.Array:
    """Writes page numbers into the page table.

    It takes the table alone: a call with the whole state costs the host as much as a fifth of a decode step.

    Args:
        table: `[max_requests, pages_per_request]` int32, `State.page_table`.
        entries: `[E, 3]` int32 of (request, place in its row, page). A request below 0 is padding.
    """
    request = jnp.where(entries[:, 0] < 0, table.shape[0], entries[:, 0])
    return table.at[request, entries[:, 1]].set(entries[:, 2], mode="drop")


def _page(cache: jax.Array, page: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(cache, page * size, size)


def copy_pages(state: State, sources: jax.Array, targets: jax.Array) -> State:
    """Copies whole KV pages in every attention layer, one after the other.

    sources, targets: `[PAGES_PER_COPY]` int32; pairs of zeros copy the reserved page onto itself.
    """
    size = state.config.page_size

    def copied(cache: jax.Array) -> jax.Array:
        for i in range(PAGES_PER_COPY):
            value = jax.lax.optimization_barrier(_page(cache, sources[i], size))
            cache = jax.lax.dynamic_update_slice_in_dim(cache, value, targets[i] * size, 0)
        return cache

    return dataclasses.replace(state, keys=tuple(map(copied, state.keys)), values=tuple(map(copied, state.values)))


def read_pages(state: State, pages: jax.Array) -> tuple[Arrays, Arrays]:
    """Keys and values of some pages, per attention layer `[PAGES_PER_COPY * page_size, G, D]`."""
    size = state.config.page_size

    def taken(cache: jax.Array) -> jax.Array:
        return jnp.concatenate([_page(cache, pages[i], size) for i in range(PAGES_PER_COPY)])

    return tuple(map(taken, state.keys)), tuple(map(taken, state.values))


def write_pages(state: State, pages: jax.Array, keys: Arrays, values: Arrays) -> State:
    """The inverse of `read_pages`. Places with page 0 are not written."""
    size = state.config.page_size

    def written(cache: jax.Array, new: jax.Array) -> jax.Array:
        for i in range(PAGES_PER_COPY):
            piece = new[i * size : (i + 1) * size]
            kept = jax.lax.optimization_barrier(_page(cache, pages[i], size))
            piece = jnp.where(pages[i] > 0, piece, kept)
            cache = jax.lax.dynamic_update_slice_in_dim(cache, piece, pages[i] * size, 0)
        return cache

    return dataclasses.replace(
        state,
        keys=tuple(map(written, state.keys, keys)),
        values=tuple(map(written, state.values, values)),
    )


run_carried = jax.jit(carried)
run_read_pages = jax.jit(read_pages)
run_place = jax.jit(place, donate_argnames="state")
run_fork = jax.jit(fork, donate_argnames="state")
run_clear = jax.jit(clear, donate_argnames="state")
run_discard = jax.jit(discard, donate_argnames="state")
run_store = jax.jit(store, donate_argnames="snapshots")
run_resume = jax.jit(resume, donate_argnames="state")
run_write_table = jax.jit(write_table, donate_argnames="table")
run_copy_pages = jax.jit(copy_pages, donate_argnames="state")
run_write_pages = jax.jit(write_pages, donate_argnames="state")

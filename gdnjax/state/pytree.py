"""The state of all live requests, as one pytree of arrays: recurrent slots, rings, KV pages, positions.

One array a layer: a stacked array would be copied whole by every step that updates one layer of it, and
would pass 2^31 elements, where the kernels' 32-bit indices end. What belongs to a request is indexed by
its number, never by the row it has in a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.gated_delta_decode.qkv import QkvLayout
from pallas_kernels.gated_delta_verify import Record, Recorded, record_shapes

Slot = TypeVar("Slot", int, jax.Array)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records:
    """What speculating requests carry beside their checkpoints: see `gdnjax.state.record`.

    * `layers`: per GDN layer the recorded rows, by request.
    * `recorded`: what of them means something, the same for all layers.
    """

    layers: tuple[Record, ...]
    recorded: Recorded

    def cleared(self, request: jax.Array) -> Records:
        """With nothing recorded for one request."""
        clear = jax.tree.map(lambda x: x.at[request].set(0), self.recorded)
        return dataclasses.replace(self, recorded=clear)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """State of `config.max_requests` requests. Donate it to every step; never keep an old one.

    * `recurrent`: per GDN layer `[slots, Hv, dv, dk]`. Slot 0 is reserved: always zero, never written.
    * `conv`: per GDN layer the ring `[max_requests + 1, W, C]`, W = `config.ring_columns`; request r owns row r + 1.
    * `keys`, `values`: per attention layer `[(1 + kv_pages) * page_size, G, D]`; page 0 is reserved. With
      `config.draft_kv` the draft head's come last, in the same pages: what moves pages moves them too.
    * `read_slot`, `write_slot`: `[max_requests]`, the slot with the current state and the first of the
      `config.step_slots` slots that the next step writes. Equal in the `in_place` layout without `slots`.
    * `position`: `[max_requests]`, tokens that the current state contains. 0: the request has no state
      yet and reads as zero whatever its slot holds.
    * `pending`: `[max_requests]`, tokens of a step that has run and is not committed.
    * `page_table`: `[max_requests, pages_per_request]`, the KV pages of each request in order.
    * `record`: with `config.records`, or None. With it a current slot lags behind `position` by the rows that are
      still to be replayed.
    """

    recurrent: tuple[jax.Array, ...]
    conv: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    read_slot: jax.Array
    write_slot: jax.Array
    position: jax.Array
    pending: jax.Array
    page_table: jax.Array
    config: Config = dataclasses.field(metadata={"static": True})
    record: Records | None = None


def state_shapes(config: Config) -> State:
    """The state's shapes and dtypes, as a pytree of `jax.ShapeDtypeStruct`."""
    c, requests = config, config.max_requests
    activation = jnp.dtype(c.dtype)

    # Typed as what stands in its place: a pytree of structs has the state's structure, not its leaves.
    def struct(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    kv = struct(((1 + c.kv_pages) * c.page_size, c.num_key_value_heads, c.head_dim), activation)
    pool = struct((c.slots, c.linear_num_value_heads, c.linear_value_head_dim, c.linear_key_head_dim), c.state_dtype)
    ring = struct((requests + 1, c.ring_columns, c.conv_channels), activation)
    vector = struct((requests,), jnp.int32)
    caches = len(c.attention_layers) + c.draft_kv
    return State(
        recurrent=(pool,) * len(c.gdn_layers),
        conv=(ring,) * len(c.gdn_layers),
        keys=(kv,) * caches,
        values=(kv,) * caches,
        read_slot=vector,
        write_slot=vector,
        position=vector,
        pending=vector,
        page_table=struct((requests, c.pages_per_request), jnp.int32),
        config=c,
        record=_records_shapes(c, vector) if c.records else None,
    )


def _records_shapes(c: Config, vector: Any) -> Records:
    layout = QkvLayout(c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
    layer = record_shapes(layout, c.max_requests, c.verify_rows, jnp.dtype(c.dtype))
    return Records((layer,) * len(c.gdn_layers), Recorded(vector, vector, vector))


def init_state(config: Config, lengths: Sequence[int] | None = None, device: Any = None) -> State:
    """A state in which every request is empty and owns its slots and pages.

    Args:
        config: sizes and limits; kept in the state as a static field.
        lengths: tokens that each request may grow to, one entry for each of the first requests; the
            others get no pages. None: `max_length` for every request, or as many as `kv_tokens` holds.
        device: a device or sharding for all arrays; None is the default device.

    Raises:
        ValueError: more lengths than `max_requests`, a length over `max_length`, or more pages than
            the cache has.
    """
    table = _page_table(config, lengths)
    read, write = first_slots(config)
    # Each leaf is an array of its own: two donated leaves must not share one buffer.
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=device), state_shapes(config))
    return dataclasses.replace(
        zeros,
        read_slot=jax.device_put(read, device),
        write_slot=jax.device_put(write, device),
        page_table=jax.device_put(table, device),
    )


def first_slots(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """`read_slot` and `write_slot` before the first step, `[max_requests]` int32.

    Each half lies dense: a step over all requests reads one run of memory and writes another.
    """
    read = 1 + config.step_slots * np.arange(config.max_requests, dtype=np.int32)
    half = config.step_slots * config.max_requests if config.state_layout == "twin" else 0
    return read, read + np.int32(half)


def first_of_step(config: Config, slot: Slot) -> Slot:
    """The first of the `config.step_slots` slots that one step writes together, given any of them."""
    return slot if config.step_slots == 1 else slot - (slot - 1) % config.step_slots


def _page_table(config: Config, lengths: Sequence[int] | None) -> np.ndarray:
    table = np.zeros((config.max_requests, config.pages_per_request), np.int32)
    if lengths is None:
        whole = min(config.max_requests, config.kv_pages // config.pages_per_request)
        lengths = [config.max_length] * whole
        if not whole:
            raise ValueError(
                f"kv_tokens = {config.kv_tokens} holds no request of max_length = {config.max_length}; "
                "give init_state the lengths of your requests, raise kv_tokens or lower max_length"
            )
    if len(lengths) > config.max_requests:
        raise ValueError(f"{len(lengths)} lengths; it takes at most max_requests = {config.max_requests}")
    free = 1
    for request, length in enumerate(lengths):
        if not 0 <= length <= config.max_length:
            raise ValueError(f"lengths[{request}] = {length}; it takes 0 to max_length = {config.max_length}")
        pages = -(-length // config.page_size)
        table[request, :pages] = range(free, free + pages)
        free += pages
    if free - 1 > config.kv_pages:
        raise ValueError(
            f"lengths need {free - 1} KV pages of {config.page_size} tokens, the cache has {config.kv_pages}; "
            "raise kv_tokens or send fewer or shorter requests"
        )
    return table


def commit(state: State) -> State:
    """Makes the step that ran last current: its tokens count, and twin slots change places.

    Pure, and free of large copies: two small vectors are swapped. A commit with nothing pending changes
    nothing, so it is safe after a prefill, which updates the current slot and is current at once.

    Raises:
        ValueError: a state of a config that speculates.
    """
    if state.config.speculate:
        raise ValueError(
            f"speculate = {state.config.speculate}: not every row of a verify step need count; "
            "gdnjax.state.commit_verified takes how many do"
        )
    return commit_counted(state, state.pending)


def commit_counted(state: State, counted: jax.Array) -> State:
    """`commit` of a step of which not every token need count: `counted` of each request, `[max_requests]` int32,
    from 1 where a step ran, and 0 where none did."""
    ran, current = state.pending > 0, state.write_slot
    if state.config.step_slots > 1:
        current = current + counted - 1
    return dataclasses.replace(
        state,
        read_slot=jnp.where(ran, current, state.read_slot),
        write_slot=jnp.where(ran, first_of_step(state.config, state.read_slot), state.write_slot),
        position=state.position + counted,
        pending=jnp.zeros_like(state.pending),
    )


def conv_window(state: State, layer: int, request: int) -> jax.Array:
    """The last K inputs of a GDN layer's convolution (K its width), oldest first, `[C, K]` as Hugging Face keeps them.

    `layer` counts GDN layers (0 is the first of them). Of a committed state: a step that is pending may
    have written an input over the oldest column.
    """
    row, position = jnp.asarray([request + 1]), state.position[request][None]
    return ring_window(state.conv[layer], row, position, state.config.linear_conv_kernel_dim)[0].T


def recurrent_state(state: State, layer: int, request: int) -> jax.Array:
    """A request's current recurrent state in one GDN layer, `[Hv, dv, dk]`; zeros before its first token.

    Of a request with rows to replay it is the checkpoint: see `gdnjax.state.record.replay`.
    """
    current = state.recurrent[layer][state.read_slot[request]]
    return jnp.where(state.position[request] > 0, current, jnp.zeros((), current.dtype))


def cached_kv(state: State, layer: int, request: int) -> tuple[jax.Array, jax.Array]:
    """A request's cached keys (after norm and rope) and values, `[tokens, G, D]`; not for use in jit.

    `layer` counts attention layers; the draft head's are the last, and lack the newest token until it is drafted from.
    """
    size = state.config.page_size
    slots = (np.asarray(state.page_table[request])[:, None] * size + np.arange(size)).reshape(-1)
    slots = slots[: int(state.position[request])]
    return state.keys[layer][slots], state.values[layer][slots]

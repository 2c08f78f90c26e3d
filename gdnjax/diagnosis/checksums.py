"""Checksums of what belongs to each request, made on the device: a few numbers instead of the arrays.

A checksum is a sum modulo 2^32 of one number an element, each mixed from the element's bits and its place in the
request's own array. Such a sum is exact in any order, so equal values give equal checksums on any device, in any
slot, ring row, page or batch row; other values give the same one by chance, one time in 2^32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from gdnjax.state.pytree import State
from pallas_kernels.causal_conv.reference import ring_window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Checksums:
    """Of every request, live or not: `[max_requests]` int32, or by layer `[max_requests, layers]` uint32.

    * `position`: tokens that the request contains. `pending`: rows of a step that is not committed.
    * `behind`: tokens by which its state lags behind the position, because a record holds them; 0 without a record.
    * `state`: by GDN layer the current recurrent state, that is, as of token `position` - `behind`.
    * `window`: by GDN layer the inputs that the next convolution reads, oldest first. Not the whole ring: a step that
      is not committed has written over the column before them, and speculation has more columns.
    * `record`: by GDN layer the `behind` recorded rows that the next step replays; None without a record.
    * `keys`, `values`: by attention layer those of the newest token.
    """

    position: jax.Array
    pending: jax.Array
    behind: jax.Array
    state: jax.Array
    window: jax.Array
    record: jax.Array | None
    keys: jax.Array
    values: jax.Array


@jax.jit
def checksums(state: State) -> Checksums:
    """The checksums of a state, which stays usable."""
    # Bits from the beginning: what moves or chooses floats may change a NaN's.
    state = jax.tree.map(_bits, state)
    c, position = state.config, state.position
    requests = jnp.arange(c.max_requests, dtype=jnp.int32)
    behind, record = jnp.zeros_like(position), None
    if state.record is not None:
        half, behind = state.record.recorded.parity, state.record.recorded.replayed
        record = _by_layer(
            requests,
            (
                _digest(jnp.concatenate([_rows(part[requests, half]) for part in jax.tree.leaves(layer)], -1), behind)
                for layer in state.record.layers
            ),
        )
    # A state of no tokens is zero, whatever its slot holds.
    begun = (position > behind)[:, None]
    states = _by_layer(requests, (_digest(pool[state.read_slot][:, None]) for pool in state.recurrent))
    last = jnp.maximum(position - 1, 0)
    place = state.page_table[requests, last // c.page_size] * c.page_size + last % c.page_size
    taps = c.linear_conv_kernel_dim - 1
    attention = range(len(c.attention_layers))  # without the draft head's, which lack the newest token
    return Checksums(
        position=position,
        pending=state.pending,
        behind=behind,
        state=jnp.where(begun, states, 0),
        window=_by_layer(requests, (_digest(ring_window(r, requests + 1, position, taps)) for r in state.conv)),
        record=record,
        keys=_by_layer(requests, (_digest(state.keys[layer][place]) for layer in attention)),
        values=_by_layer(requests, (_digest(state.values[layer][place]) for layer in attention)),
    )


def _by_layer(requests: jax.Array, sums: Iterable[jax.Array]) -> jax.Array:
    columns = list(sums)
    return jnp.stack(columns, axis=1) if columns else jnp.zeros((requests.shape[0], 0), jnp.uint32)


def _rows(array: jax.Array) -> jax.Array:
    return array.reshape(*array.shape[:2], -1)


def _bits(array: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")


def _digest(bits: jax.Array, count: jax.Array | None = None) -> jax.Array:
    """`[max_requests, rows, ...]` -> `[max_requests]` uint32, of the first `count` rows of each request or of all."""
    bits = _rows(bits).astype(jnp.uint32)
    places = jnp.arange(bits[0].size, dtype=jnp.uint32).reshape(bits.shape[1:])
    mixed = _mix(_mix(places) ^ bits)
    if count is not None:
        mixed = jnp.where(jnp.arange(bits.shape[1])[:, None] < count[:, None, None], mixed, 0)
    return jnp.sum(mixed, axis=(1, 2), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    # The last step of MurmurHash3: one to one, and every bit of x changes half of the others.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)

"""The record: what a speculating request carries beside its checkpoint, so that one state page is enough.

A checkpoint is a recurrent state that lags behind the request: the rows that the last step's drafts made, and
of which the request has accepted the first few, are not in it. The record holds what rebuilds them, the inputs
of the rule as they were: convolved k and v, raw a and b. (q only reads a state.) The next step replays the
accepted ones with the same arithmetic, so nothing that was solved or decayed is ever stored.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode.qkv import QkvLayout

MOST_ROWS = 8
"""Most candidate rows of a request: the row emitted last and seven drafts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Record:
    """Recorded rows of one layer, by request, in the activation dtype.

    A request has two halves of T rows: a step reads one and writes the other, so that it can be run again.

    * `keys`: `[requests, 2, T, Hk, dk]`. `values`: `[requests, 2, T, Hv, dv]`. Both after the convolution.
    * `gates`: `[requests, 2, T, 2, Hv]`, the raw projections a, then b.
    """

    keys: jax.Array
    values: jax.Array
    gates: jax.Array

    @property
    def rows(self) -> int:
        """T, the most rows that a step can record."""
        return self.keys.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recorded:
    """What of the records means something: `[requests]` int32, the same for all layers.

    * `live`: rows that the request's last step recorded.
    * `parity`: the half (0 or 1) that holds them.
    * `advance`: how many of them the request has accepted: what its next step replays. Outside of 0 to `live` it
      counts as the nearer end.
    """

    live: jax.Array
    parity: jax.Array
    advance: jax.Array

    @property
    def replayed(self) -> jax.Array:
        """Rows that the next step replays, `[requests]`."""
        return jnp.clip(self.advance, 0, self.live)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """Where each group's state and rows are, `[G]` int32: what a step computes once for all layers.

    * `source`: slot that is read, 0 for zeros. `target`: slot that is written, 0 for padding.
    * `replay`, `replayed`: first record row (counting through all requests and halves) and number of the rows that
      are replayed.
    * `record`, `count`: first record row and number of the rows that are run and recorded.
    """

    source: jax.Array
    target: jax.Array
    replay: jax.Array
    replayed: jax.Array
    record: jax.Array
    count: jax.Array


def record_shapes(layout: QkvLayout, requests: int, rows: int, dtype: jax.typing.DTypeLike) -> Record:
    """A layer's record as a pytree of `jax.ShapeDtypeStruct`.

    Raises:
        ValueError: rows outside of 1 to 8.
    """
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"rows = {rows}; a record takes 1 to {MOST_ROWS}: the row emitted last and its drafts")
    half = (requests, 2, rows)

    # Typed as what stands in its place.
    def struct(*shape: int) -> jax.Array:
        return jax.ShapeDtypeStruct((*half, *shape), jnp.dtype(dtype))  # type: ignore[return-value]

    return Record(
        keys=struct(layout.key_heads, layout.key_dim),
        values=struct(layout.value_heads, layout.value_dim),
        gates=struct(2, layout.value_heads),
    )


def locate(
    recorded: Recorded,
    request: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
    count: jax.Array,
    record_rows: int,
    most: int,
) -> Groups:
    """Where each group's state and rows are; see `gated_delta_verify` for the arguments.

    record_rows: rows of a half. most: rows of a group.
    """
    live = (write_slot > 0) & (request >= 0)
    owner = jnp.clip(request, 0, recorded.live.shape[0] - 1)
    halves = 2 * owner + recorded.parity[owner]
    return Groups(
        source=jnp.where(live & has_state, read_slot, 0),
        target=jnp.where(live, write_slot, 0),
        replay=halves * record_rows,
        replayed=jnp.where(live, recorded.replayed[owner], 0),
        record=(4 * owner + 1 - halves) * record_rows,
        count=jnp.where(live, jnp.clip(count, 0, most), 0),
    )


def after_step(recorded: Recorded, ran: jax.Array, advance: jax.Array) -> Recorded:
    """What is recorded once a step has become current.

    Args:
        ran: `[requests]` int32, rows of each request that the step ran; 0 leaves a request as it was.
        advance: `[requests]` int32, how many of these the request has accepted, the first one included.
    """
    stepped = ran > 0
    return Recorded(
        live=jnp.where(stepped, ran, recorded.live),
        parity=jnp.where(stepped, 1 - recorded.parity, recorded.parity),
        advance=jnp.where(stepped, advance, recorded.advance),
    )

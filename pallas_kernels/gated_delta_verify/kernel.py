"""Verifying candidate rows on one state page: the decode kernel's strips, with loops over rows around its update.

A program owns a strip of one head of one request, and everything that follows from it: it replays what the record
says, stores the checkpoint, and runs the new rows without storing a state. What it writes to the record is the half
that nobody reads. Rows that wait for each other are latency, which only other programs hide: hence one strip a
program, however many decode takes.

**Every row goes through `gated_delta_decode.kernel.update_strip` in a loop's body, with decode's tile.** Sums of
one order and the same contraction of products and sums are what makes the bits the same as those of decoding
and of a page for every candidate row.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.kernel import Pieces, Tile, prepare_token, read_pieces, update_strip
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_verify.record import Groups, Record
from pallas_kernels.triton_backend import launch, load, store

SOURCE, TARGET, REPLAY, REPLAYED, RECORD, COUNT = range(6)
"""Columns of the table of groups."""

Inputs = tuple[Pieces, Pieces, jax.Array, jax.Array, jax.Array]
"""q, k, v, a and b of one row, as `prepare_token` and `update_strip` take them."""
Weights = tuple[jax.Array, jax.Array]
"""A head's A_log and dt_bias."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for.

    * `strip`, `piece`: those of a tile, as they fit.
    * `rows`: of a group. `record_rows`: of a record's half.
    * `a`, `b`: their first columns in packed rows.
    """

    layout: QkvLayout
    strip: int
    piece: int
    rows: int = 0
    record_rows: int = 0
    a: int = 0
    b: int = 0


@dataclasses.dataclass(frozen=True)
class Place:
    """What one program works on: a strip of V, from row `start`, of one head, for one group of rows."""

    sizes: Sizes
    start: jax.Array
    head: jax.Array
    group: jax.Array

    def of_slot(self, pool: Any, slot: jax.Array) -> list[Any]:
        """The strip in a slot, in pieces of K."""
        s, rows = self.sizes, pl.ds(self.start, self.sizes.strip)
        return [pool.at[slot, self.head, rows, pl.ds(x, s.piece)] for x in range(0, s.layout.key_dim, s.piece)]

    def load(self, pool: Any, slot: jax.Array) -> Pieces:
        """The strip in float32; zeros for slot 0 whatever it holds."""
        tile = (self.sizes.strip, self.sizes.piece)
        asked, zeros = jnp.broadcast_to(slot > 0, tile), jnp.zeros(tile, pool.dtype)
        stored = [load(ref, mask=asked, other=zeros) for ref in self.of_slot(pool, slot)]
        return tuple(x.astype(jnp.float32) for x in stored)

    def store(self, pool: Any, slot: jax.Array, state: Pieces) -> Pieces:
        """Stores the strip, but not in slot 0; returns what was stored, in float32."""
        stored = [x.astype(pool.dtype) for x in state]

        @pl.when(slot > 0)
        def _() -> None:
            for ref, x in zip(self.of_slot(pool, slot), stored, strict=True):
                store(ref, x, eviction_policy="evict_first")

        return tuple(x.astype(jnp.float32) for x in stored)

    def key(self, rows: Any, row: jax.Array, first: jax.Array) -> Pieces:
        """q or k: columns from `first` on of a row, for every row of the strip."""
        return read_pieces(rows, row, first, self.sizes.layout.key_dim, self.sizes.strip, self.sizes.piece)


def here(sizes: Sizes) -> Place:
    """This program's place on the grid."""
    return Place(sizes, pl.program_id(0) * sizes.strip, pl.program_id(1), pl.program_id(2))


def run_rows(
    state: Pieces,
    count: jax.Array,
    read: Callable[[jax.Array], Inputs],
    weights: Weights,
    done: Callable[[jax.Array, Pieces, jax.Array], None],
) -> Pieces:
    """Rows 0 to `count` of a group on one strip, one after the other.

    A row's inputs are asked for while the one before is worked on: `read` gets numbers up to `count`.
    """

    def body(t: jax.Array, carry: tuple[Pieces, Inputs]) -> tuple[Pieces, Inputs]:
        state, inputs = carry
        ahead = read(t + 1)
        q, k, v, a, b = inputs
        state, y = update_strip(state, prepare_token(q, k, a, b, *weights), v)
        done(t, state, y)
        return state, ahead

    state, _ = jax.lax.fori_loop(0, count, body, (state, read(jnp.int32(0))))
    return state


def replay_strip(place: Place, table: Any, record: tuple[Any, Any, Any], state: Pieces, weights: Weights) -> Pieces:
    """Replays a group's accepted rows."""
    (keys, values, gates), layout, head = record, place.sizes.layout, place.head
    first, last = table[place.group, REPLAY], place.sizes.record_rows - 1
    v_columns = pl.ds(head * layout.value_dim + place.start, place.sizes.strip)

    def read(t: jax.Array) -> Inputs:
        row = first + jnp.minimum(t, last)
        k = place.key(keys, row, layout.q(head))
        # A state does not depend on q: what is read with it here is dropped.
        return k, k, values[row, v_columns], gates[row, head], gates[row, layout.value_heads + head]

    return run_rows(state, table[place.group, REPLAYED], read, weights, lambda *_: None)


def run_strip(
    place: Place,
    inputs: tuple[Any, Any, Any],
    out: Any,
    count: jax.Array,
    state: Pieces,
    weights: Weights,
    keep: Callable[[jax.Array, Pieces], None] = lambda *_: None,
) -> None:
    """Runs a group's new rows and writes their outputs, zeros from row `count` on. `keep` gets each row's number and
    state."""
    (qkv, a, b), s, head = inputs, place.sizes, place.head
    v_columns, first = pl.ds(s.layout.v(head) + place.start, s.strip), place.group * s.rows

    def read(t: jax.Array) -> Inputs:
        row = first + jnp.minimum(t, s.rows - 1)
        q, k = (place.key(qkv, row, column) for column in (s.layout.q(head), s.layout.k(head)))
        return q, k, qkv[row, v_columns], a[row, s.a + head], b[row, s.b + head]

    def write(t: jax.Array, y: jax.Array) -> None:
        out[first + t, head, pl.ds(place.start, s.strip)] = y.astype(out.dtype)

    def done(t: jax.Array, state: Pieces, y: jax.Array) -> None:
        write(t, y)
        keep(t, state)

    run_rows(state, count, read, weights, done)
    jax.lax.fori_loop(count, s.rows, lambda t, _: write(t, jnp.zeros((s.strip,), jnp.float32)), None)


def record_strip(place: Place, table: Any, inputs: tuple[Any, Any, Any], record: tuple[Any, Any, Any]) -> None:
    """Writes the program's share of a group's new rows into the record: v of its strip, and what a head's, or a key
    head's, first program writes for all."""
    (qkv, a, b), (keys, values, gates) = inputs, record
    s, layout, head, start = place.sizes, place.sizes.layout, place.head, place.start
    count, source, target = table[place.group, COUNT], place.group * s.rows, table[place.group, RECORD]

    def copy(old: Any, old_column: Any, new: Any, new_column: Any, width: int) -> None:
        # All loads before the first store: none of them waits for another.
        masks = [jnp.broadcast_to(t < count, (width,)) for t in range(s.rows)]
        asked = [old.at[source + t, pl.ds(old_column, width)] for t in range(s.rows)]
        zeros = jnp.zeros((width,), old.dtype)
        found = [load(ref, mask=mask, other=zeros) for ref, mask in zip(asked, masks, strict=True)]
        for t, (mask, x) in enumerate(zip(masks, found, strict=True)):
            store(new.at[target + t, pl.ds(new_column, width)], x, mask=mask)

    copy(qkv, layout.v(head) + start, values, head * layout.value_dim + start, s.strip)

    @pl.when(start == 0)
    def _() -> None:
        copy(a, s.a + head, gates, head, 1)
        copy(b, s.b + head, gates, layout.value_heads + head, 1)

    @pl.when((start == 0) & (head % (layout.value_heads // layout.key_heads) == 0))
    def _() -> None:
        copy(qkv, layout.k(head), keys, layout.q(head), layout.key_dim)


def _verify(
    table: Any,
    qkv: Any,
    a: Any,
    b: Any,
    a_log: Any,
    dt_bias: Any,
    _pool: Any,
    _keys: Any,
    _values: Any,
    _gates: Any,
    out: Any,
    pool: Any,
    keys: Any,
    values: Any,
    gates: Any,
    *,
    sizes: Sizes,
) -> None:
    place = here(sizes)
    source, target, count = (table[place.group, x] for x in (SOURCE, TARGET, COUNT))
    inputs, record, weights = (qkv, a, b), (keys, values, gates), (a_log[place.head], dt_bias[place.head])
    state = place.load(pool, source)
    record_strip(place, table, inputs, record)
    state = replay_strip(place, table, record, state, weights)
    # Rounded once, after the last replayed row; what follows starts from what is stored.
    state = place.store(pool, target, state)
    run_strip(place, inputs, out, count, state, weights)


def _replay(
    table: Any, a_log: Any, dt_bias: Any, keys: Any, values: Any, gates: Any, _: Any, pool: Any, *, sizes: Sizes
) -> None:
    place = here(sizes)
    state = place.load(pool, table[place.group, SOURCE])
    state = replay_strip(place, table, (keys, values, gates), state, (a_log[place.head], dt_bias[place.head]))
    place.store(pool, table[place.group, TARGET], state)


def cut(tile: Tile, pool: jax.Array) -> tuple[int, int]:
    """A tile's strip and piece, halved until they divide what they cut."""
    return math.gcd(tile.strip, pool.shape[2]), math.gcd(tile.piece, pool.shape[3])


def group_table(groups: Groups) -> jax.Array:
    """`[G, 6]` int32, which programs read their numbers from."""
    order = (groups.source, groups.target, groups.replay, groups.replayed, groups.record, groups.count)
    return jnp.stack(order, axis=1)


def flat(record: Record) -> list[jax.Array]:
    """A record's arrays as rows: all requests, both halves, all rows of a half."""
    rows = math.prod(record.keys.shape[:3])
    return [x.reshape(rows, -1) for x in (record.keys, record.values, record.gates)]


def gated_delta_verify(
    qkv: jax.Array,
    a: Columns,
    b: Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    record: Record,
    groups: Groups,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, Record]:
    """See the reference; dk must be a power of two."""
    count, (_, heads, dv, dk) = groups.count.shape[0], pool.shape
    rows = qkv.shape[0] // count
    sizes = Sizes(qkv_layout(qkv, pool), *cut(tile, pool), rows, record.rows, a.start, b.start)
    out = jax.ShapeDtypeStruct((qkv.shape[0], heads, dv), qkv.dtype)
    arrays = [pool, *flat(record)]
    out, pool, *rows_out = launch(
        functools.partial(_verify, sizes=sizes),
        [group_table(groups), qkv, a.array, b.array, a_log, dt_bias, *arrays],
        name="gated_delta_verify",
        grid=(dv // sizes.strip, heads, count),
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)],
        warps=tile.warps,
        aliases={6: 1, 7: 2, 8: 3, 9: 4},
        cost=pl.CostEstimate(
            flops=7 * (rows + record.rows) * count * heads * dv * dk,
            transcendentals=5 * (rows + record.rows) * count * heads,
            bytes_accessed=2 * count * heads * dv * dk * pool.dtype.itemsize
            + (3 * qkv.size + out.size) * qkv.dtype.itemsize,
        ),
        interpret=interpret,
    )
    parts = (record.keys, record.values, record.gates)
    return out, pool, Record(*(new.reshape(old.shape) for new, old in zip(rows_out, parts, strict=True)))


def gated_delta_replay(
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    record: Record,
    groups: Groups,
    tile: Tile,
    interpret: bool,
) -> jax.Array:
    """See the reference's `replay`; the bits are those of `gated_delta_verify`. Returns the pool."""
    count, (_, heads, dv, dk) = groups.count.shape[0], pool.shape
    layout = QkvLayout(record.keys.shape[3], heads, dk, dv)
    sizes = Sizes(layout, *cut(tile, pool), record_rows=record.rows)
    (pool,) = launch(
        functools.partial(_replay, sizes=sizes),
        [group_table(groups), a_log, dt_bias, *flat(record), pool],
        name="gated_delta_replay",
        grid=(dv // sizes.strip, heads, count),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        warps=tile.warps,
        aliases={6: 0},
        cost=pl.CostEstimate(
            flops=7 * record.rows * count * heads * dv * dk,
            transcendentals=5 * record.rows * count * heads,
            bytes_accessed=2 * count * heads * dv * dk * pool.dtype.itemsize,
        ),
        interpret=interpret,
    )
    return pool

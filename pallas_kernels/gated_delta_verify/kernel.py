"""Verifying candidate rows on one state page: the decode kernel's strips, with loops over rows around its update.

A program owns some strips of one head of one request, and everything that follows from them: it replays what the
record says, stores the checkpoint, and runs the new rows without storing a state. What it writes to the record is the
half that nobody reads. Normalizing a row's q and k costs more than a strip's update: a program does it once for all of
its strips, which also hide each other's waiting.

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

FEW, MANY = 8, 16
"""Rows of V of one program. What a token brings is worked out once for all of them; but the more they are, the longer a
token waits for the one before it, where programs are too few to hide that."""
MANY_ROWS = 16384
"""Rows of V in all, of all heads and groups, from which on programs take `MANY`."""

SOURCE, TARGET, REPLAY, REPLAYED, RECORD, COUNT = range(6)
"""Columns of the table of groups."""

Strips = tuple[Pieces, ...]
"""A program's strips of the state."""
Inputs = tuple[Pieces, Pieces, tuple[jax.Array, ...], jax.Array, jax.Array]
"""q, k, v by strip, a and b of one row, as `prepare_token` and `update_strip` take them."""
Weights = tuple[jax.Array, jax.Array]
"""A head's A_log and dt_bias."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a kernel is compiled for.

    * `strip`, `piece`: those of a tile, as they fit. `strips`: of one program.
    * `rows`: of a group. `record_rows`: of a record's half.
    * `a`, `b`: their first columns in packed rows.
    """

    layout: QkvLayout
    strip: int
    piece: int
    strips: int
    rows: int = 0
    record_rows: int = 0
    a: int = 0
    b: int = 0

    @property
    def width(self) -> int:
        """Rows of V of one program."""
        return self.strip * self.strips


@dataclasses.dataclass(frozen=True)
class Place:
    """What one program works on: strips of V, from row `start`, of one head, for one group of rows."""

    sizes: Sizes
    start: jax.Array
    head: jax.Array
    group: jax.Array

    def spans(self) -> list[Any]:
        """The rows of V of each strip."""
        return [pl.ds(self.start + n * self.sizes.strip, self.sizes.strip) for n in range(self.sizes.strips)]

    def of_slot(self, pool: Any, slot: jax.Array) -> list[list[Any]]:
        """The strips in a slot, each in pieces of K."""
        s = self.sizes
        columns = [pl.ds(x, s.piece) for x in range(0, s.layout.key_dim, s.piece)]
        return [[pool.at[slot, self.head, rows, x] for x in columns] for rows in self.spans()]

    def load(self, pool: Any, slot: jax.Array) -> Strips:
        """The strips in float32; zeros for slot 0 whatever it holds."""
        tile = (self.sizes.strip, self.sizes.piece)
        asked, zeros = jnp.broadcast_to(slot > 0, tile), jnp.zeros(tile, pool.dtype)
        stored = [[load(ref, mask=asked, other=zeros) for ref in refs] for refs in self.of_slot(pool, slot)]
        return tuple(tuple(x.astype(jnp.float32) for x in pieces) for pieces in stored)

    def store(self, pool: Any, slot: jax.Array, state: Strips) -> Strips:
        """Stores the strips, but not in slot 0; returns what was stored, in float32."""
        stored = [[x.astype(pool.dtype) for x in pieces] for pieces in state]

        @pl.when(slot > 0)
        def _() -> None:
            for refs, pieces in zip(self.of_slot(pool, slot), stored, strict=True):
                for ref, x in zip(refs, pieces, strict=True):
                    store(ref, x, eviction_policy="evict_first")

        return tuple(tuple(x.astype(jnp.float32) for x in pieces) for pieces in stored)

    def key(self, rows: Any, row: jax.Array, first: jax.Array) -> Pieces:
        """q or k: columns from `first` on of a row, for every row of the strip."""
        return read_pieces(rows, row, first, self.sizes.layout.key_dim, self.sizes.strip, self.sizes.piece)

    def values(self, rows: Any, row: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
        """v of a row by strip; `first`: column of the head's."""
        s = self.sizes
        return tuple(rows[row, pl.ds(first + self.start + n * s.strip, s.strip)] for n in range(s.strips))


def here(sizes: Sizes) -> Place:
    """This program's place on the grid."""
    return Place(sizes, pl.program_id(0) * sizes.width, pl.program_id(1), pl.program_id(2))


def run_rows(
    state: Strips,
    count: jax.Array,
    read: Callable[[jax.Array], Inputs],
    weights: Weights,
    done: Callable[[jax.Array, Strips, list[jax.Array]], None],
) -> Strips:
    """Rows 0 to `count` of a group on a program's strips, one after the other.

    A row's inputs are asked for while the one before is worked on: `read` gets numbers up to `count`. What no state
    enters is worked out once for all strips.
    """

    def body(t: jax.Array, carry: tuple[Strips, Inputs]) -> tuple[Strips, Inputs]:
        state, inputs = carry
        ahead = read(t + 1)
        q, k, values, a, b = inputs
        token = prepare_token(q, k, a, b, *weights)
        stepped = [update_strip(pieces, token, v) for pieces, v in zip(state, values, strict=True)]
        state = tuple(pieces for pieces, _ in stepped)
        done(t, state, [y for _, y in stepped])
        return state, ahead

    state, _ = jax.lax.fori_loop(0, count, body, (state, read(jnp.int32(0))))
    return state


def replay_strip(place: Place, table: Any, record: tuple[Any, Any, Any], state: Strips, weights: Weights) -> Strips:
    """Replays a group's accepted rows."""
    (keys, values, gates), layout, head = record, place.sizes.layout, place.head
    first, last = table[place.group, REPLAY], place.sizes.record_rows - 1

    def read(t: jax.Array) -> Inputs:
        row = first + jnp.minimum(t, last)
        k = place.key(keys, row, layout.q(head))
        v = place.values(values, row, head * layout.value_dim)
        # A state does not depend on q: what is read with it here is dropped.
        return k, k, v, gates[row, head], gates[row, layout.value_heads + head]

    return run_rows(state, table[place.group, REPLAYED], read, weights, lambda *_: None)


def run_strip(
    place: Place,
    inputs: tuple[Any, Any, Any],
    out: Any,
    count: jax.Array,
    state: Strips,
    weights: Weights,
    keep: Callable[[jax.Array, Strips], None] = lambda *_: None,
) -> None:
    """Runs a group's new rows and writes their outputs, zeros from row `count` on. `keep` gets each row's number and
    state."""
    (qkv, a, b), s, head = inputs, place.sizes, place.head
    first = place.group * s.rows

    def read(t: jax.Array) -> Inputs:
        row = first + jnp.minimum(t, s.rows - 1)
        q, k = (place.key(qkv, row, column) for column in (s.layout.q(head), s.layout.k(head)))
        return q, k, place.values(qkv, row, s.layout.v(head)), a[row, s.a + head], b[row, s.b + head]

    def done(t: jax.Array, state: Strips, outputs: list[jax.Array]) -> None:
        for rows_of_v, y in zip(place.spans(), outputs, strict=True):
            out[first + t, head, rows_of_v] = y.astype(out.dtype)
        keep(t, state)

    def silent(t: jax.Array, _: None) -> None:
        out[first + t, head, pl.ds(place.start, s.width)] = jnp.zeros((s.width,), out.dtype)

    run_rows(state, count, read, weights, done)
    jax.lax.fori_loop(count, s.rows, silent, None)


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

    copy(qkv, layout.v(head) + start, values, head * layout.value_dim + start, s.width)

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


def cut(tile: Tile, pool: jax.Array, groups: int) -> tuple[int, int, int]:
    """Strip, piece and strips of a program: a tile's strip and piece, halved until they divide what they cut. Bits do
    not depend on how many strips a program has."""
    _, heads, dv, dk = pool.shape
    strip, piece = math.gcd(tile.strip, dv), math.gcd(tile.piece, dk)
    rows = MANY if groups * heads * dv >= MANY_ROWS else FEW
    return strip, piece, math.gcd(max(1, rows // strip), dv // strip)


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
    sizes = Sizes(qkv_layout(qkv, pool), *cut(tile, pool, count), rows, record.rows, a.start, b.start)
    out = jax.ShapeDtypeStruct((qkv.shape[0], heads, dv), qkv.dtype)
    arrays = [pool, *flat(record)]
    out, pool, *rows_out = launch(
        functools.partial(_verify, sizes=sizes),
        [group_table(groups), qkv, a.array, b.array, a_log, dt_bias, *arrays],
        name="gated_delta_verify",
        grid=(dv // sizes.width, heads, count),
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
    sizes = Sizes(layout, *cut(tile, pool, count), record_rows=record.rows)
    (pool,) = launch(
        functools.partial(_replay, sizes=sizes),
        [group_table(groups), a_log, dt_bias, *flat(record), pool],
        name="gated_delta_replay",
        grid=(dv // sizes.width, heads, count),
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

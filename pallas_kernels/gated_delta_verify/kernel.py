"""Verifying candidate rows on one state page: the decode kernel's strips, with loops over rows around its update.

A program owns its strips of one head of one request, and everything that follows from them: it replays what the
record says, stores the checkpoint, and runs the new rows without storing a state. What it writes to the record is
the half that nobody reads.

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
from pallas_kernels.gated_delta_decode.kernel import Pieces, Tile, read_pieces, update_strip
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_verify.record import Groups, Record
from pallas_kernels.triton_backend import launch, load, store

SOURCE, TARGET, REPLAY, REPLAYED, RECORD, COUNT = range(6)
"""Columns of the table of groups."""

Inputs = tuple[Pieces, Pieces, jax.Array, jax.Array, jax.Array]
"""q, k, v, a and b of one row, as `update_strip` takes them."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """A tile as it fits a pool: see `Tile`."""

    strip: int
    strips: int
    piece: int

    @property
    def block(self) -> int:
        """Rows of V of one program."""
        return self.strip * self.strips


def cut(tile: Tile, pool: jax.Array) -> Cut:
    """The sizes of a tile, halved until they divide what they cut."""
    dv, dk = pool.shape[2:]
    strip = math.gcd(tile.strip, dv)
    return Cut(strip, math.gcd(tile.strips, dv // strip), math.gcd(tile.piece, dk))


def ask_strip(pool: Any, source: jax.Array, head: jax.Array, rows_of_v: Any, layout: QkvLayout, cut: Cut) -> Pieces:
    """A strip of a slot, as it is stored; zeros for slot 0 whatever it holds."""
    tile = (cut.strip, cut.piece)
    asked, zeros = jnp.broadcast_to(source > 0, tile), jnp.zeros(tile, pool.dtype)
    return tuple(load(pool.at[source, head, rows_of_v, x], mask=asked, other=zeros) for x in columns(layout, cut))


def store_strip(
    pool: Any, target: jax.Array, head: jax.Array, rows_of_v: Any, state: Pieces, layout: QkvLayout, cut: Cut
) -> None:
    """The counterpart of `ask_strip`; stores nothing in slot 0."""

    @pl.when(target > 0)
    def _() -> None:
        for x, piece in zip(columns(layout, cut), state, strict=True):
            store(pool.at[target, head, rows_of_v, x], piece, eviction_policy="evict_first")


def columns(layout: QkvLayout, cut: Cut) -> list[Any]:
    """The pieces of K."""
    return [pl.ds(start, cut.piece) for start in range(0, layout.key_dim, cut.piece)]


def run_rows(
    state: Pieces,
    count: jax.Array,
    read: Callable[[jax.Array], Inputs],
    weights: tuple[jax.Array, jax.Array],
    done: Callable[[jax.Array, Pieces, jax.Array], None],
) -> Pieces:
    """Rows 0 to `count` of a group on one strip, one after the other.

    A row's inputs are asked for while the one before is worked on: `read` gets numbers up to `count`.
    """

    def body(t: jax.Array, carry: tuple[Pieces, Inputs]) -> tuple[Pieces, Inputs]:
        state, inputs = carry
        ahead = read(t + 1)
        state, y = update_strip(state, *inputs, *weights)
        done(t, state, y)
        return state, ahead

    state, _ = jax.lax.fori_loop(0, count, body, (state, read(jnp.int32(0))))
    return state


def replay_strip(
    record: tuple[Any, Any, Any],
    table: Any,
    group: jax.Array,
    head: jax.Array,
    start: jax.Array,
    state: Pieces,
    weights: tuple[jax.Array, jax.Array],
    layout: QkvLayout,
    cut: Cut,
    record_rows: int,
) -> Pieces:
    """Replays a group's accepted rows into a strip that starts at row `start` of V."""
    keys, values, gates = record
    first, last = table[group, REPLAY], record_rows - 1

    def read(t: jax.Array) -> Inputs:
        row = first + jnp.minimum(t, last)
        k = read_pieces(keys, row, layout.q(head), layout.key_dim, cut.strip, cut.piece)
        v = values[row, pl.ds(head * layout.value_dim + start, cut.strip)]
        # A state does not depend on q: what is read with it here is dropped.
        return k, k, v, gates[row, head], gates[row, layout.value_heads + head]

    return run_rows(state, table[group, REPLAYED], read, weights, lambda *_: None)


def run_strip(
    inputs: tuple[Any, Any, Any],
    out: Any,
    gate_columns: tuple[int, int],
    group: jax.Array,
    count: jax.Array,
    head: jax.Array,
    start: jax.Array,
    state: Pieces,
    weights: tuple[jax.Array, jax.Array],
    layout: QkvLayout,
    cut: Cut,
    rows: int,
    keep: Callable[[jax.Array, Pieces], None] = lambda *_: None,
) -> None:
    """Runs a group's new rows on a strip that starts at row `start` of V, and writes their outputs.

    `keep` gets each row's number and state.
    """
    qkv, a, b = inputs
    a_column, b_column = gate_columns

    def read(t: jax.Array) -> Inputs:
        row = group * rows + jnp.minimum(t, rows - 1)
        q, k = (
            read_pieces(qkv, row, first, layout.key_dim, cut.strip, cut.piece)
            for first in (layout.q(head), layout.k(head))
        )
        v = qkv[row, pl.ds(layout.v(head) + start, cut.strip)]
        return q, k, v, a[row, a_column + head], b[row, b_column + head]

    def done(t: jax.Array, state: Pieces, y: jax.Array) -> None:
        out[group * rows + t, head, pl.ds(start, cut.strip)] = y.astype(out.dtype)
        keep(t, state)

    run_rows(state, count, read, weights, done)


def zero_dead_rows(
    out: Any, group: jax.Array, count: jax.Array, head: jax.Array, first: jax.Array, cut: Cut, rows: int
) -> None:
    """Zeros on a group's rows from `count` on: all of them, for padding."""

    def body(t: jax.Array, _: None) -> None:
        out[group * rows + t, head, pl.ds(first, cut.block)] = jnp.zeros((cut.block,), out.dtype)

    jax.lax.fori_loop(count, rows, body, None)


def record_rows_of(
    inputs: tuple[Any, Any, Any],
    record: tuple[Any, Any, Any],
    gate_columns: tuple[int, int],
    table: Any,
    group: jax.Array,
    head: jax.Array,
    first: jax.Array,
    layout: QkvLayout,
    cut: Cut,
    rows: int,
) -> None:
    """Writes the program's share of a group's new rows into the record: v of its strips, and what a head's, or a
    key head's, first program writes for all."""
    (qkv, a, b), (keys, values, gates) = inputs, record
    a_column, b_column = gate_columns
    count, source, target = table[group, COUNT], group * rows, table[group, RECORD]

    def copy(old: Any, old_column: Any, new: Any, new_column: Any, width: int) -> None:
        # All loads before the first store: none of them waits for another.
        mask = [jnp.broadcast_to(t < count, (width,)) for t in range(rows)]
        asked = [old.at[source + t, pl.ds(old_column, width)] for t in range(rows)]
        zeros = jnp.zeros((width,), old.dtype)
        found = [load(ref, mask=live, other=zeros) for ref, live in zip(asked, mask, strict=True)]
        for t in range(rows):
            store(new.at[target + t, pl.ds(new_column, width)], found[t], mask=mask[t])

    copy(qkv, layout.v(head) + first, values, head * layout.value_dim + first, cut.block)

    @pl.when(first == 0)
    def _() -> None:
        copy(a, a_column + head, gates, head, 1)
        copy(b, b_column + head, gates, layout.value_heads + head, 1)

    @pl.when((first == 0) & (head % (layout.value_heads // layout.key_heads) == 0))
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
    layout: QkvLayout,
    gate_columns: tuple[int, int],
    cut: Cut,
    rows: int,
    record_rows: int,
) -> None:
    first, head, group = pl.program_id(0) * cut.block, pl.program_id(1), pl.program_id(2)
    source, target, count = (table[group, x] for x in (SOURCE, TARGET, COUNT))
    inputs, record, weights = (qkv, a, b), (keys, values, gates), (a_log[head], dt_bias[head])
    starts = [first + number * cut.strip for number in range(cut.strips)]
    upcoming = ask_strip(pool, source, head, pl.ds(starts[0], cut.strip), layout, cut)
    record_rows_of(inputs, record, gate_columns, table, group, head, first, layout, cut, rows)
    for number, start in enumerate(starts):
        state = tuple(x.astype(jnp.float32) for x in upcoming)
        if number + 1 < cut.strips:
            upcoming = ask_strip(pool, source, head, pl.ds(starts[number + 1], cut.strip), layout, cut)
        state = replay_strip(record, table, group, head, start, state, weights, layout, cut, record_rows)
        # Rounded once, after the last replayed row; what follows starts from what is stored.
        stored = tuple(x.astype(pool.dtype) for x in state)
        store_strip(pool, target, head, pl.ds(start, cut.strip), stored, layout, cut)
        state = tuple(x.astype(jnp.float32) for x in stored)
        run_strip(inputs, out, gate_columns, group, count, head, start, state, weights, layout, cut, rows)
    zero_dead_rows(out, group, count, head, first, cut, rows)


def _replay(
    table: Any,
    a_log: Any,
    dt_bias: Any,
    keys: Any,
    values: Any,
    gates: Any,
    _: Any,
    pool: Any,
    *,
    layout: QkvLayout,
    cut: Cut,
    record_rows: int,
) -> None:
    first, head, group = pl.program_id(0) * cut.block, pl.program_id(1), pl.program_id(2)
    source, target = table[group, SOURCE], table[group, TARGET]
    record, weights = (keys, values, gates), (a_log[head], dt_bias[head])
    for number in range(cut.strips):
        start = first + number * cut.strip
        rows_of_v = pl.ds(start, cut.strip)
        state = tuple(x.astype(jnp.float32) for x in ask_strip(pool, source, head, rows_of_v, layout, cut))
        state = replay_strip(record, table, group, head, start, state, weights, layout, cut, record_rows)
        stored = tuple(x.astype(pool.dtype) for x in state)
        store_strip(pool, target, head, rows_of_v, stored, layout, cut)


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
    sizes = cut(tile, pool)
    out = jax.ShapeDtypeStruct((qkv.shape[0], heads, dv), qkv.dtype)
    arrays = [pool, *flat(record)]
    rows = qkv.shape[0] // count
    kernel = functools.partial(
        _verify,
        layout=qkv_layout(qkv, pool),
        gate_columns=(a.start, b.start),
        cut=sizes,
        rows=rows,
        record_rows=record.rows,
    )
    out, pool, *rows_out = launch(
        kernel,
        [group_table(groups), qkv, a.array, b.array, a_log, dt_bias, *arrays],
        name="gated_delta_verify",
        grid=(dv // sizes.block, heads, count),
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
    sizes = cut(tile, pool)
    (pool,) = launch(
        functools.partial(
            _replay,
            layout=QkvLayout(record.keys.shape[3], heads, dk, dv),
            cut=sizes,
            record_rows=record.rows,
        ),
        [group_table(groups), a_log, dt_bias, *flat(record), pool],
        name="gated_delta_replay",
        grid=(dv // sizes.block, heads, count),
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

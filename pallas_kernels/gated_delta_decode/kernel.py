"""The gated delta rule for one token a row, in strips of V.

Rows of V don't depend on each other, so a head's state `[dv, dk]` is cut into strips: a program reads its
strips of the slot `read_slot`, updates them and writes them to the slot `write_slot` of the same pool.
Nothing else differs between updating in place and writing a second slot, so both give the same bits.

The step is memory traffic and nothing else, hence: programs that run at the same time lie side by side in
memory (strips vary fastest, then heads, then rows); a strip is asked for before the one ahead of it is worked
on; every access to it is 16 bytes wide along K; and it comes in pieces of K narrow enough that a warp holds
several rows of V side by side. A sum over K then adds pieces first and crosses few lanes after that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode.qkv import QkvLayout, qkv_layout
from pallas_kernels.gated_delta_decode.reference import L2_EPS, gates
from pallas_kernels.triton_backend import Warps, launch, load, store

Pieces = tuple[jax.Array, ...]
"""Arrays `[strip, piece]` that side by side make `[strip, dk]`."""


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a head's state is cut and run. A sum's order depends on it: paths that must agree bit for bit
    use one tile. Sizes are powers of two, and halved until they divide what they cut.

    * `strip`: rows of V that are updated together.
    * `strips`: strips of one program, one after the other.
    * `piece`: columns of K of one piece.
    * `warps`: warps of one program.
    """

    strip: int
    strips: int
    piece: int
    warps: Warps


DEFAULT_TILE = Tile(strip=4, strips=2, piece=64, warps=Warps(wave64=1, wave32=1))


def read_pieces(ref: Any, token: Any, first: Any, dk: int, strip: int, piece: int) -> Pieces:
    """Columns `first` to `first + dk` of row `token`, in pieces, the same in every row of the strip.

    Each row of V has its own copy, so that what it does with it involves no other row.
    """
    columns = jax.lax.broadcasted_iota(jnp.int32, (strip, piece), 1)
    return tuple(load(ref.at[token, first + start + columns]) for start in range(0, dk, piece))


def _row_sums(pieces: list[jax.Array]) -> jax.Array:
    """Sums over K, `[strip]`: across the pieces first."""
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return jnp.sum(total, axis=1)


def _inverse_norm(pieces: list[jax.Array]) -> jax.Array:
    return jax.lax.rsqrt(_row_sums([x * x for x in pieces]) + L2_EPS)


@dataclasses.dataclass(frozen=True)
class Token:
    """What a token brings to every strip of a head: q (scaled) and k, normalized, and the gates."""

    q: list[jax.Array]
    k: list[jax.Array]
    decay: jax.Array
    beta: jax.Array


def prepare_token(q: Pieces, k: Pieces, a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> Token:
    """The part of the rule that no state enters, all in float32.

    Args:
        q, k: `[strip, dk]`, see `read_pieces`, after the convolution, activation dtype.
        a, b: the head's raw projections, scalars. a_log, dt_bias: the head's weights, float32 scalars.
    """
    g, beta = gates(a, b, a_log, dt_bias)
    queries, keys = ([x.astype(jnp.float32) for x in pieces] for pieces in (q, k))
    q_scale = (_inverse_norm(queries) * sum(x.shape[1] for x in q) ** -0.5)[:, None]
    k_scale = _inverse_norm(keys)[:, None]
    return Token([x * q_scale for x in queries], [x * k_scale for x in keys], jnp.exp(g), beta)


def update_strip(state: Pieces, token: Token, v: jax.Array) -> tuple[Pieces, jax.Array]:
    """One token of the rule on one strip: what every kernel that must agree runs, inside a loop's body.

    Args:
        state: `[strip, dk]` float32. v: `[strip]`, after the convolution, activation dtype.

    Returns:
        The next state, and the output `[strip]` float32.
    """
    decayed = [s * token.decay for s in state]
    memory = _row_sums([s * x for s, x in zip(decayed, token.k, strict=True)])
    delta = ((v.astype(jnp.float32) - memory) * token.beta)[:, None]
    state = tuple(s + delta * x for s, x in zip(decayed, token.k, strict=True))
    return state, _row_sums([s * x for s, x in zip(state, token.q, strict=True)])


def _decode(
    qkv: Any,
    a: Any,
    b: Any,
    a_log: Any,
    dt_bias: Any,
    sources: Any,
    targets: Any,
    _: Any,
    out: Any,
    pool: Any,
    *,
    layout: QkvLayout,
    a_column: int,
    b_column: int,
    strip: int,
    strips: int,
    piece: int,
) -> None:
    first, head, row = pl.program_id(0) * (strip * strips), pl.program_id(1), pl.program_id(2)
    source, target = sources[row], targets[row]
    pieces = [pl.ds(start, piece) for start in range(0, layout.key_dim, piece)]
    # Of slot 0 nothing is asked for: zero whatever a slot holds, NaN included.
    tile = (strip, piece)
    asked, zeros = jnp.broadcast_to(source > 0, tile), jnp.zeros(tile, pool.dtype)

    def ask(rows_of_v: Any) -> Pieces:
        return tuple(load(pool.at[source, head, rows_of_v, x], mask=asked, other=zeros) for x in pieces)

    # The state first, and all loads but the later strips' before the first use of one.
    spans = [pl.ds(first + number * strip, strip) for number in range(strips)]
    upcoming = ask(spans[0])
    q = read_pieces(qkv, row, layout.q(head), layout.key_dim, *tile)
    k = read_pieces(qkv, row, layout.k(head), layout.key_dim, *tile)
    token = prepare_token(q, k, a[row, a_column + head], b[row, b_column + head], a_log[head], dt_bias[head])
    values = [qkv[row, pl.ds(layout.v(head) + first + number * strip, strip)] for number in range(strips)]
    for number, (rows_of_v, v) in enumerate(zip(spans, values, strict=True)):
        state = tuple(x.astype(jnp.float32) for x in upcoming)
        if number + 1 < strips:
            upcoming = ask(spans[number + 1])

        def step(_: jax.Array, state: Pieces, rows_of_v: Any = rows_of_v, v: jax.Array = v) -> Pieces:
            state, y = update_strip(state, token, v)
            out[row, head, rows_of_v] = y.astype(out.dtype)
            return state

        # Of one token or, for padding, none: a loop whose length is known only at run time compiles its body as
        # one of several tokens does, where the update of a single token could be fused with what surrounds it.
        state = jax.lax.fori_loop(0, (target > 0).astype(jnp.int32), step, state)

        @pl.when(target > 0)
        def _(state: Pieces = state, rows_of_v: Any = rows_of_v) -> None:
            # A step touches a slot once: what it writes is not worth keeping in cache.
            for columns, x in zip(pieces, state, strict=True):
                store(pool.at[target, head, rows_of_v, columns], x.astype(pool.dtype), eviction_policy="evict_first")

    # Once, at the end: the compiler then makes one path of all that a live row does.
    @pl.when(target <= 0)
    def _() -> None:
        out[row, head, pl.ds(first, strip * strips)] = jnp.zeros((strip * strips,), out.dtype)


def gated_delta_decode(
    qkv: jax.Array,
    a: Columns,
    b: Columns,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
    tile: Tile,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See the reference; dk must be a power of two. Padding rows output zeros."""
    rows, (_, heads, dv, dk) = qkv.shape[0], pool.shape
    out = jax.ShapeDtypeStruct((rows, heads, dv), qkv.dtype)
    strip = math.gcd(tile.strip, dv)
    strips = math.gcd(tile.strips, dv // strip)
    # The same for all layers, so that a step computes it once.
    source = jnp.where(has_state, read_slot, 0)
    state_bytes = 2 * rows * heads * dv * dk * pool.dtype.itemsize
    kernel = functools.partial(
        _decode,
        layout=qkv_layout(qkv, pool),
        a_column=a.start,
        b_column=b.start,
        strip=strip,
        strips=strips,
        piece=math.gcd(tile.piece, dk),
    )
    out, pool = launch(
        kernel,
        [qkv, a.array, b.array, a_log, dt_bias, source, write_slot, pool],
        name="gated_delta_decode",
        grid=(dv // (strip * strips), heads, rows),
        out_shape=[out, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        warps=tile.warps,
        aliases={7: 1},
        cost=pl.CostEstimate(
            flops=7 * rows * heads * dv * dk,
            transcendentals=5 * rows * heads,
            bytes_accessed=state_bytes + (qkv.size + out.size) * qkv.dtype.itemsize + a.nbytes + b.nbytes,
        ),
        interpret=interpret,
    )
    return out, pool

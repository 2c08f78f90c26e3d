"""The gated delta rule for one token a row, in strips of V.

Rows of V don't depend on each other, so a head's state `[dv, dk]` is cut into strips, each one program: it
reads its strip of the slot `read_slot`, updates it and writes it to the slot `write_slot` of the same pool.
Nothing else differs between updating in place and writing a second slot, so both give the same bits.

The step is memory traffic and nothing else, hence: programs that run at the same time lie side by side in
memory (strips vary fastest, then heads, then rows), the state is asked for before anything else, every access
to it is 16 bytes wide along K, and no reduction crosses a warp as long as a warp holds whole rows of V.
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
from pallas_kernels.gated_delta_decode.reference import delta_update, gates, normalize_qk
from pallas_kernels.triton_backend import Warps, launch, load, store


@dataclasses.dataclass(frozen=True)
class Tile:
    """How a head's state is cut and run. A sum's order depends on it: paths that must agree bit for bit
    use one tile.

    * `strip`: rows of V of one program, a power of two (halved until it divides dv).
    * `warps`: warps of one program.
    * `evict_first`: mark the state as not worth keeping in cache; every step touches it once.
    """

    strip: int
    warps: Warps
    evict_first: bool = True


DEFAULT_TILE = Tile(strip=8, warps=Warps(wave64=1, wave32=1))


def update_strip(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of the rule on one strip: what every kernel that must agree runs, inside a loop's body.

    Args:
        state: `[strip, dk]` float32.
        q, k: `[dk]` and v: `[strip]`, after the convolution, activation dtype.
        a, b: the head's raw projections, scalars. a_log, dt_bias: the head's weights, float32 scalars.

    Returns:
        The next state, and the output `[strip]` float32.
    """
    g, beta = gates(a, b, a_log, dt_bias)
    q, k = normalize_qk(q, k)
    return delta_update(state, q, k, v.astype(jnp.float32), g, beta)


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
    eviction: str | None,
) -> None:
    first, head, row = pl.program_id(0) * strip, pl.program_id(1), pl.program_id(2)
    rows_of_v = pl.ds(first, strip)
    source, target = sources[row], targets[row]
    # Asked for first, and of slot 0 not at all: zero whatever a slot holds, NaN included.
    tile = (strip, pool.shape[3])
    state = load(
        pool.at[source, head, rows_of_v, :],
        mask=jnp.broadcast_to(source > 0, tile),
        other=jnp.zeros(tile, pool.dtype),
        eviction_policy=eviction,
    )

    def step(i: jax.Array, state: jax.Array) -> jax.Array:
        token = row + i
        # All loads before the first use of one.
        q = qkv[token, pl.ds(layout.q(head), layout.key_dim)]
        k = qkv[token, pl.ds(layout.k(head), layout.key_dim)]
        v = qkv[token, pl.ds(layout.v(head) + first, strip)]
        raw = a[token, a_column + head], b[token, b_column + head]
        state, y = update_strip(state, q, k, v, *raw, a_log[head], dt_bias[head])
        out[token, head, rows_of_v] = y.astype(out.dtype)
        return state

    # Of one token or, for padding, none: a loop whose length is known only at run time compiles its body as
    # one of several tokens does, where the update of a single token could be fused with what surrounds it.
    state = jax.lax.fori_loop(0, (target > 0).astype(jnp.int32), step, state.astype(jnp.float32))

    @pl.when(target > 0)
    def _() -> None:
        store(pool.at[target, head, rows_of_v, :], state.astype(pool.dtype), eviction_policy=eviction)

    @pl.when(target <= 0)
    def _() -> None:
        out[row, head, rows_of_v] = jnp.zeros((strip,), out.dtype)


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
    # The same for all layers, so that a step computes it once.
    source = jnp.where(has_state, read_slot, 0)
    state_bytes = 2 * rows * heads * dv * dk * pool.dtype.itemsize
    kernel = functools.partial(
        _decode,
        layout=qkv_layout(qkv, pool),
        a_column=a.start,
        b_column=b.start,
        strip=strip,
        eviction="evict_first" if tile.evict_first else None,
    )
    out, pool = launch(
        kernel,
        [qkv, a.array, b.array, a_log, dt_bias, source, write_slot, pool],
        name="gated_delta_decode",
        grid=(dv // strip, heads, rows),
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

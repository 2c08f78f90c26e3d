"""The attention prologue in one launch, and its two halves as launches of their own.

One program takes one head of one row. All three kernels call the same two functions, `_norm_and_turn` and
`_store`, so that fused and unfused give the same bits. The rotary part is read in halves, the rest in
pieces that are powers of two, because blocks have no other sizes: for D = 256 and 64 rotary dimensions
32, 32, 64 and 128.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.triton_backend import Warps, launch

WARPS = Warps(wave64=1, wave32=1)

Read = Callable[[int, int], jax.Array]
"""(offset, size) -> that piece of a head."""
Write = Callable[[int, int, jax.Array], None]
"""(offset, size, float32 piece)."""


def _norm_and_turn(read: Read, write: Write, weight: Any, cos: jax.Array, sin: jax.Array, dim: int, eps: float) -> None:
    """Zero-centred norm of one head, then rope on its first 2 * cos.shape[0] dimensions, all in float32.

    `weight` is the norm's weight, a ref or an array `[D]`.
    """
    head = read(0, dim).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(head * head) / dim + eps)

    def normed(offset: int, size: int) -> jax.Array:
        piece = read(offset, size).astype(jnp.float32) * scale
        return piece * (1.0 + weight[pl.ds(offset, size)].astype(jnp.float32))

    half = cos.shape[0]
    first, second = normed(0, half), normed(half, half)
    write(0, half, first * cos - second * sin)
    write(half, half, second * cos + first * sin)
    offset = 2 * half
    while offset < dim:  # offset is a power of two, and so is what lies between it and its double
        write(offset, offset, normed(offset, offset))
        offset *= 2


def _store(cache: Any, slot: jax.Array, group: jax.Array, offset: int, size: int, piece: jax.Array) -> None:
    """One piece of a head into a cache `[kv_slots, G, D]`; the caller has checked the slot."""
    cache[slot, group, pl.ds(offset, size)] = piece.astype(cache.dtype)


def _writes(slot: jax.Array, cache: Any) -> jax.Array:
    return (slot >= 0) & (slot < cache.shape[0])


def _reader(ref: Any, row: jax.Array, column: Any) -> Read:
    return lambda offset, size: ref[row, pl.ds(column + offset, size)]


def _fused(*refs: Any, heads: int, groups: int, dim: int, eps: float) -> None:
    *projections, q_weight, k_weight, cos, sin, slots, _, _, q_out, gate_out, keys, values = refs
    size = groups * dim
    if len(projections) == 1:
        q_ref = k_ref = v_ref = projections[0]
        k_start, v_start = 2 * heads * dim, 2 * heads * dim + size
    else:
        q_ref, k_ref, v_ref = projections
        k_start = v_start = 0
    row, head = pl.program_id(0), pl.program_id(1)

    @pl.when(head < heads)
    def _() -> None:
        def write(offset: int, size: int, piece: jax.Array) -> None:
            q_out[row, head, pl.ds(offset, size)] = piece.astype(q_out.dtype)

        column = head * (2 * dim)
        _norm_and_turn(_reader(q_ref, row, column), write, q_weight, cos[row, :], sin[row, :], dim, eps)
        gate_out[row, head, :] = q_ref[row, pl.ds(column + dim, dim)]

    slot = slots[row]

    @pl.when((head >= heads) & _writes(slot, keys))
    def _() -> None:
        group = head - heads

        def write(offset: int, size: int, piece: jax.Array) -> None:
            # Rounded as k is outside the cache, whatever the cache's dtype.
            _store(keys, slot, group, offset, size, piece.astype(k_ref.dtype))

        read = _reader(k_ref, row, k_start + group * dim)
        _norm_and_turn(read, write, k_weight, cos[row, :], sin[row, :], dim, eps)
        _store(values, slot, group, 0, dim, v_ref[row, pl.ds(v_start + group * dim, dim)])


def _norm_and_rope(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, q_out: Any, k_out: Any, *, heads: int, eps: float
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)

    def turn(source: Any, target: Any, weight: Any, head: jax.Array) -> None:
        def write(offset: int, size: int, piece: jax.Array) -> None:
            target[row, head, pl.ds(offset, size)] = piece.astype(target.dtype)

        def read(offset: int, size: int) -> jax.Array:
            return source[row, head, pl.ds(offset, size)]

        _norm_and_turn(read, write, weight, cos[row, :], sin[row, :], source.shape[-1], eps)

    pl.when(head < heads)(lambda: turn(q, q_out, q_weight, head))
    pl.when(head >= heads)(lambda: turn(k, k_out, k_weight, head - heads))


def _write_kv(k: Any, v: Any, slots: Any, _: Any, __: Any, keys: Any, values: Any) -> None:
    row, group = pl.program_id(0), pl.program_id(1)
    slot = slots[row]

    @pl.when(_writes(slot, keys))
    def _() -> None:
        _store(keys, slot, group, 0, k.shape[-1], k[row, group, :])
        _store(values, slot, group, 0, v.shape[-1], v[row, group, :])


def attention_prologue(
    projections: Sequence[jax.Array],
    q_weight: jax.Array,
    k_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """See the reference; D and rotary_dim must be powers of two."""
    rows, (groups, dim) = projections[0].shape[0], keys.shape[1:]
    heads = count_heads(projections, groups, dim)
    out = jax.ShapeDtypeStruct((rows, heads, dim), projections[0].dtype)
    count = len(projections)
    q, gate, keys, values = launch(
        functools.partial(_fused, heads=heads, groups=groups, dim=dim, eps=eps),
        [*projections, q_weight, k_weight, cos, sin, slot, keys, values],
        name="attention_prologue",
        grid=(rows, heads + groups),
        out_shape=[out, out, _struct(keys), _struct(values)],
        warps=WARPS,
        aliases={count + 5: 2, count + 6: 3},
        cost=_cost(rows, heads + groups, dim, 4 * (heads + groups) * dim * out.dtype.itemsize),
        interpret=interpret,
    )
    return q, gate, keys, values


def norm_and_rope(
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """See the reference, with one leading axis: q `[R, A, D]`, k `[R, G, D]`, cos and sin `[R, rotary_dim / 2]`."""
    rows, heads, dim = q.shape
    every = heads + k.shape[1]
    q, k = launch(
        functools.partial(_norm_and_rope, heads=heads, eps=eps),
        [q, k, q_weight, k_weight, cos, sin],
        name="norm_and_rope",
        grid=(rows, every),
        out_shape=[_struct(q), _struct(k)],
        warps=WARPS,
        cost=_cost(rows, every, dim, 2 * every * dim * q.dtype.itemsize),
        interpret=interpret,
    )
    return q, k


def write_kv(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """See the reference; D must be a power of two."""
    rows, groups, _ = k.shape
    keys, values = launch(
        _write_kv,
        [k, v, slot, keys, values],
        name="write_kv",
        grid=(rows, groups),
        out_shape=[_struct(keys), _struct(values)],
        warps=WARPS,
        aliases={3: 0, 4: 1},
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * k.size * k.dtype.itemsize),
        interpret=interpret,
    )
    return keys, values


def count_heads(projections: Sequence[jax.Array], groups: int, dim: int) -> int:
    """Query heads A that the projections' widths hold."""
    width = projections[0].shape[1]
    return (width // dim - (2 * groups if len(projections) == 1 else 0)) // 2


def _struct(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _cost(rows: int, heads: int, dim: int, row_bytes: int) -> pl.CostEstimate:
    return pl.CostEstimate(flops=8 * rows * heads * dim, transcendentals=rows * heads, bytes_accessed=rows * row_bytes)

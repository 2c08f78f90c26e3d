"""Per-head q and k norm, partial rope, and the write of k and v into the paged cache.

Everything is float32 until q and k are rounded once. `attention_prologue` is the whole of it in one
operation; `norm_and_rope` and `write_kv` are its two halves.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(theta: float, rotary_dim: int) -> np.ndarray:
    """theta^(-2 j / rotary_dim) for j < rotary_dim / 2, float32 `[rotary_dim / 2]`."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    return (1.0 / np.power(theta, exponents)).astype(np.float32)


def rope_table(
    position: jax.Array, theta: float, rotary_dim: int, mrope_section: tuple[int, int, int] | None = None
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, float32 `[..., rotary_dim / 2]`.

    Args:
        position: `[...]` int32 for text, or `[3, ...]` (time, height, width) with `mrope_section`.
        mrope_section: frequencies that each of the three rows owns; the rows interleave: frequency j
            takes the height row if j mod 3 = 1 and j < 3 section[1], the width row if j mod 3 = 2 and
            j < 3 section[2], else the time row. None: `position` has one row.
    """
    frequencies = jnp.asarray(inverse_frequencies(theta, rotary_dim))
    if mrope_section is None:
        angles = position[..., None].astype(jnp.float32) * frequencies
    else:
        j = np.arange(rotary_dim // 2)
        row = np.where((j % 3 == 1) & (j < 3 * mrope_section[1]), 1, 0)
        row = np.where((j % 3 == 2) & (j < 3 * mrope_section[2]), 2, row)
        angles = jnp.moveaxis(position[row], 0, -1).astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def normalize_heads(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Zero-centred RMS norm of every head, x `[..., D]`, left in float32."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * (1.0 + weight.astype(jnp.float32))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns the first 2 * cos.shape[-1] dimensions of every head; the others pass through.

    x: `[..., heads, D]` float32; cos, sin: `[..., rotary_dim / 2]`. Pairs are (i, i + rotary_dim / 2).
    """
    half = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def norm_and_rope(
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """q `[..., A, D]` and k `[..., G, D]`, normed per head and turned, rounded once to their dtype."""
    turned_q = rotate(normalize_heads(q, q_weight, eps), cos, sin)
    turned_k = rotate(normalize_heads(k, k_weight, eps), cos, sin)
    return turned_q.astype(q.dtype), turned_k.astype(k.dtype)


def write_kv(
    keys: jax.Array, values: jax.Array, k: jax.Array, v: jax.Array, slot: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """k, v `[R, G, D]` into the flat caches `[kv_slots, G, D]` at slot = page * page_size + offset.

    slot: `[R]` int32; -1 stores nothing. Donate the caches.
    """
    target = jnp.where(slot >= 0, slot, keys.shape[0])
    return keys.at[target].set(k, mode="drop"), values.at[target].set(v, mode="drop")


def split_heads(projections: Sequence[jax.Array], groups: int, dim: int) -> tuple[jax.Array, ...]:
    """Projections (see `attention_prologue`) -> q, gate `[R, A, D]` and k, v `[R, G, D]`."""
    size = groups * dim
    if len(projections) == 1:
        row = projections[0]
        q_gate, k, v = row[:, : -2 * size], row[:, -2 * size : -size], row[:, -size:]
    else:
        q_gate, k, v = projections
    rows = q_gate.shape[0]
    # q and gate alternate per head, not in halves of the whole row
    q_gate = q_gate.reshape(rows, -1, 2, dim)
    return q_gate[:, :, 0], q_gate[:, :, 1], k.reshape(rows, groups, dim), v.reshape(rows, groups, dim)


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
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """From an attention layer's projections to what its attention reads.

    Args:
        projections: either one array `[R, (2 A + 2 G) D]`, a row being [q and gate alternating per head,
            k, v], or three, `[R, 2 A D]`, `[R, G D]` and `[R, G D]`. The number of query heads A follows
            from the width.
        q_weight, k_weight: `[D]`, of the zero-centred norms.
        cos, sin: `[R, rotary_dim / 2]` float32, see `rope_table`.
        slot: `[R]` int32, the row's place in the caches; -1 stores nothing.
        keys, values: `[kv_slots, G, D]` (donate them).
        eps: added to the mean square.

    Returns:
        q `[R, A, D]` after norm and rope, gate `[R, A, D]` as projected, and the caches.
    """
    q, gate, k, v = split_heads(projections, *keys.shape[1:])
    q, k = norm_and_rope(q, k, q_weight, k_weight, cos, sin, eps)
    return q, gate, *write_kv(keys, values, k, v, slot)

"""The gated delta rule for one token a row, and the functions every form of the rule shares.

Source of the formulas: Yang et al., Gated Delta Networks (arXiv:2412.06464), in the form Qwen3.5 uses:
per value head the state S (dv x dk here, V before K) follows, in this order,

    S <- exp(g) S                    decay
    m  = S k                         what the memory says for this key
    S <- S + (beta (v - m)) k^T      write
    o  = S q                         read, the current token included
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gated_delta_decode.qkv import qkv_layout

L2_EPS = 1e-6
"""Added to the sum of squares inside the root; no configuration changes it."""


def gates(a: jax.Array, b: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log decay g = -exp(A_log) softplus(a + dt_bias) <= 0 and write strength beta = sigmoid(b).

    Args:
        a, b: `[..., Hv]`, any float dtype, as projected.
        a_log, dt_bias: `[Hv]` float32.

    Returns:
        g and beta, `[..., Hv]` float32 (beta is never rounded to the activation dtype: it drifts).
    """
    g = -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)
    return g, jax.nn.sigmoid(b.astype(jnp.float32))


def l2norm(x: jax.Array) -> jax.Array:
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def normalize_qk(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """q and k l2-normalised, q divided by sqrt(dk) after that; `[..., dk]` float32."""
    return l2norm(q) * q.shape[-1] ** -0.5, l2norm(k)


def delta_update(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of the rule.

    Args:
        state: `[..., dv, dk]` float32.
        q, k: `[..., dk]` float32, normalised.
        v: `[..., dv]` float32.
        g, beta: `[...]` float32.

    Returns:
        The next state and the output `[..., dv]`, float32.
    """
    state = state * jnp.exp(g)[..., None, None]
    memory = jnp.sum(state * k[..., None, :], axis=-1)
    delta = (v - memory) * beta[..., None]
    state = state + delta[..., :, None] * k[..., None, :]
    return state, jnp.sum(state * q[..., None, :], axis=-1)


def update_rows(
    live: jax.Array,
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token a row from a convolution's output and raw gates: what every path runs that must agree.

    A branch that is known only at run time: fused with what surrounds it, the same arithmetic would round
    differently here and there. (Compilers for the CPU fuse across an optimization barrier.)

    Args:
        live: `[R]` bool; rows that are not live keep their state, and their output is zero.
        state: `[R, Hv, dv, dk]` float32.
        q, k: `[R, Hk, dk]`, v: `[R, Hv, dv]`, a, b: `[R, Hv]`, activation dtype.
        a_log, dt_bias: `[Hv]` float32.

    Returns:
        The next state and the output `[R, Hv, dv]`, float32.
    """

    def run(state: jax.Array, *row: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v, a, b = row
        g, beta = gates(a, b, a_log, dt_bias)
        q, k = (jnp.repeat(x, v.shape[1] // k.shape[1], axis=1) for x in normalize_qk(q, k))
        return delta_update(state, q, k, v.astype(jnp.float32), g, beta)

    def skip(state: jax.Array, *row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return state, jnp.zeros(row[2].shape, jnp.float32)

    after, out = jax.lax.cond(jnp.any(live), run, skip, state, q, k, v, a, b)
    mine = live[:, None, None]
    return jnp.where(mine[..., None], after, state), jnp.where(mine, out, 0.0)


def read_state(pool: jax.Array, source: jax.Array) -> jax.Array:
    """Slots as float32 `[G, Hv, dv, dk]`; zeros for slot 0 whatever it holds."""
    return jnp.where((source > 0)[:, None, None, None], pool[source].astype(jnp.float32), 0.0)


def write_state(pool: jax.Array, target: jax.Array, state: jax.Array) -> jax.Array:
    """Stores `[G, Hv, dv, dk]` but for target 0."""
    return pool.at[jnp.where(target > 0, target, pool.shape[0])].set(state.astype(pool.dtype), mode="drop")


def gated_delta_decode(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    a_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    read_slot: jax.Array,
    write_slot: jax.Array,
    has_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The rule for one token a row, from slot `read_slot` to slot `write_slot` of the same pool.

    Args:
        qkv: `[R, 2 Hk dk + Hv dv]`, the convolution's output: all q, all k, all v.
        a, b: `[R, Hv]` raw projections.
        a_log, dt_bias: `[Hv]` float32.
        pool: `[slots, Hv, dv, dk]`, float32 or bfloat16; returned updated (donate it).
        read_slot, write_slot: `[R]` int32. Slot 0 marks a padding row: it reads zeros, stores nothing.
        has_state: `[R]` bool; a row without state reads as zero whatever its slot holds.

    Returns:
        Outputs `[R, Hv, dv]` in qkv's dtype, and the pool.
    """
    state = read_state(pool, jnp.where(has_state, read_slot, 0))
    state, out = update_rows(write_slot > 0, state, *qkv_layout(qkv, pool).split(qkv), a, b, a_log, dt_bias)
    return out.astype(qkv.dtype), write_state(pool, write_slot, state)

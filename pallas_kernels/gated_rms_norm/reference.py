"""RMS norms: zero-centred (all text norms) and gated (behind the delta rule)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * (1 + weight) over the last axis, in float32, rounded once to x's dtype."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight * silu(gate) over the last axis: the norm comes before the gate, and its
    weight is plain. float32 inside, rounded once to x's dtype.

    x: `[..., heads, dv]`. gate: `[..., heads * dv]`, as projected. weight: `[dv]`.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y * weight.astype(jnp.float32) * jax.nn.silu(gate.reshape(x.shape).astype(jnp.float32))
    return y.astype(x.dtype)

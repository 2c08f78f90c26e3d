"""The gated norm, by its kernel or by its reference. (The zero-centred norm is fused where it is needed.)"""

from __future__ import annotations

import jax

from pallas_kernels.columns import Columns, as_columns
from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.gated_rms_norm import kernel, reference


def gated_rms_norm(
    x: jax.Array,
    gate: jax.Array | Columns,
    weight: jax.Array,
    eps: float,
    implementation: Implementation | None = None,
) -> jax.Array:
    """x / rms(x) * weight * silu(gate) over the last axis, in float32, rounded once to x's dtype.

    Args:
        x: `[..., heads, dv]`.
        gate: `[..., heads * dv]` as projected, an array or columns of packed rows.
        weight: `[dv]`, plain (1 is neutral).
        eps: added to the mean square.
        implementation: see `Implementation`.

    Raises:
        ValueError: shapes that do not fit together.
    """
    gate = as_columns(gate)
    dim = x.shape[-1]
    if x.ndim < 2 or gate.shape != (*x.shape[:-2], x.shape[-2] * dim) or weight.shape != (dim,):
        raise ValueError(
            f"x has shape {x.shape}, gate {gate.shape} and weight {weight.shape}; "
            "they take [..., heads, dv], [..., heads * dv] and [dv]"
        )
    unsupported = None if power_of_two(dim) else f"head dimension {dim} is no power of two"
    chosen = choose("gated_rms_norm", implementation, unsupported)
    if chosen == "reference" or x.size == 0:
        return reference.gated_rms_norm(x, gate.value(), weight, eps)
    return kernel.gated_rms_norm(x, gate, weight, eps, interpret=chosen == "interpret")

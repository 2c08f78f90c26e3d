"""The attention prologue and its two halves, each by its kernel or by its reference."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.attention_prologue import kernel, reference
from pallas_kernels.debug import check_values, place_faults
from pallas_kernels.dispatch import Implementation, choose, power_of_two


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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Per-head norms, partial rope and KV write, from the projections of R rows, in one launch.

    Give the packed product as it is: a slice of it would be copied for the kernel.

    Args:
        projections: either one array `[R, (2 A + 2 G) D]`, a row being [q and gate alternating per head,
            k, v], or three, `[R, 2 A D]`, `[R, G D]` and `[R, G D]`. The number of query heads A follows
            from the width.
        q_weight, k_weight: `[D]`, of the zero-centred norms (1 + w).
        cos, sin: `[R, rotary_dim / 2]` float32.
        slot: `[R]` int32, the row's place in the caches; -1 stores nothing. No two rows share one.
        keys, values: `[kv_slots, G, D]`, updated in place if donated.
        eps: added to the mean square.
        implementation: see `Implementation`.

    Returns:
        q `[R, A, D]` after norm and rope, gate `[R, A, D]` as projected, and the caches.

    Raises:
        ValueError: shapes or dtypes that do not fit together; at debug level 2 (`pallas_kernels.debug`) also slots
            out of range or shared.
    """
    groups, dim = _check_caches(keys, values)
    if len(projections) not in (1, 3):
        raise ValueError(f"projections has {len(projections)} arrays; it takes one packed or three: q and gate, k, v")
    widths = [p.shape[-1] for p in projections]
    rows = projections[0].shape[0]
    heads = kernel.count_heads(projections, groups, dim)
    taken = [2 * heads * dim, groups * dim, groups * dim]
    if heads < 1 or widths != (taken if len(projections) == 3 else [sum(taken)]):
        raise ValueError(
            f"projections are {widths} wide; with caches of G = {groups} heads and D = {dim} they take "
            f"(2 A + {2 * groups}) * {dim} packed, or 2 A * {dim}, {groups * dim} and {groups * dim}"
        )
    for name, array in zip(("packed",) if len(projections) == 1 else ("q_gate", "k", "v"), projections, strict=True):
        _check(f"projections ({name})", array, (rows, array.shape[-1]), projections[0].dtype)
    _check_norms(q_weight, k_weight, cos, sin, rows, dim)
    _check("slot", slot, (rows,), jnp.int32)
    check_values("attention_prologue", place_faults("slot", 0, keys.shape[0]), slot)
    arguments = (projections, q_weight, k_weight, cos, sin, slot, keys, values, eps)
    chosen = choose("attention_prologue", implementation, _unsupported(dim, 2 * cos.shape[-1]))
    if chosen == "reference":
        return reference.attention_prologue(*arguments)
    return kernel.attention_prologue(*arguments, interpret=chosen == "interpret")


def norm_and_rope(
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The prologue's first half: q `[R, A, D]` and k `[R, G, D]`, normed per head, turned, rounded once.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    rows, dim = q.shape[0], q.shape[-1]
    _check("q", q, (rows, q.shape[1], dim), q.dtype)
    _check("k", k, (rows, k.shape[1], dim), q.dtype)
    _check_norms(q_weight, k_weight, cos, sin, rows, dim)
    chosen = choose("norm_and_rope", implementation, _unsupported(dim, 2 * cos.shape[-1]))
    if chosen == "reference":
        return reference.norm_and_rope(q, k, q_weight, k_weight, cos, sin, eps)
    return kernel.norm_and_rope(q, k, q_weight, k_weight, cos, sin, eps, interpret=chosen == "interpret")


def write_kv(
    keys: jax.Array,
    values: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot: jax.Array,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The prologue's second half: k, v `[R, G, D]` into the caches `[kv_slots, G, D]`; slot -1 stores nothing.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    groups, dim = _check_caches(keys, values)
    rows = k.shape[0]
    _check("k", k, (rows, groups, dim), k.dtype)
    _check("v", v, (rows, groups, dim), k.dtype)
    _check("slot", slot, (rows,), jnp.int32)
    check_values("write_kv", place_faults("slot", 0, keys.shape[0]), slot)
    unsupported = None if power_of_two(dim) else f"head dimension {dim} is no power of two"
    chosen = choose("write_kv", implementation, unsupported)
    if chosen == "reference":
        return reference.write_kv(keys, values, k, v, slot)
    return kernel.write_kv(keys, values, k, v, slot, interpret=chosen == "interpret")


def _unsupported(dim: int, rotary_dim: int) -> str | None:
    for name, size in (("head dimension", dim), ("rotary dimensions", rotary_dim)):
        if not power_of_two(size):
            return f"{name} {size} is no power of two"
    return None


def _check(name: str, array: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes {jnp.dtype(dtype)}{list(shape)}")


def _check_caches(keys: jax.Array, values: jax.Array) -> tuple[int, int]:
    if keys.ndim != 3:
        raise ValueError(f"keys has shape {keys.shape}; it takes [kv_slots, G, D]")
    _check("values", values, keys.shape, keys.dtype)
    return keys.shape[1], keys.shape[2]


def _check_norms(q_weight: jax.Array, k_weight: jax.Array, cos: jax.Array, sin: jax.Array, rows: int, dim: int) -> None:
    _check("q_weight", q_weight, (dim,), q_weight.dtype)
    _check("k_weight", k_weight, (dim,), k_weight.dtype)
    if cos.ndim != 2 or not 1 <= cos.shape[1] <= dim // 2:
        raise ValueError(f"cos has shape {cos.shape}; it takes [{rows}, rotary_dim / 2] with rotary_dim up to {dim}")
    for name, table in (("cos", cos), ("sin", sin)):
        _check(name, table, (rows, cos.shape[1]), jnp.float32)

"""Paged attention for one token a row, by its kernels or by its reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.debug import check_values, page_faults
from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.paged_attention import kernel, reference


def paged_attention_decode(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    page_size: int,
    gate: jax.Array | None = None,
    attention_pin: int = 4096,
    attention_segment: int = 256,
    implementation: Implementation | None = None,
) -> jax.Array:
    """One token a row over the keys of its request, in two launches: segments, then combine and gate.

    A row's output has the same bits in any batch and with a page table of any width.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`.
        pages: `[R, P]` int32, the row's page table; unused entries point at page 0.
        length: `[R]` int32, keys that the row sees, its own included; 0 for padding (output 0).
        page_size: tokens a page.
        gate: `[R, A, D]`; the output is multiplied by its sigmoid. None: no gate.
        attention_pin, attention_segment: every row is cut into attention_pin / attention_segment segments,
            however many keys it has or could have. At attention_pin keys a segment has attention_segment;
            shorter rows take narrower or fewer segments, longer ones wider.
        implementation: see `Implementation`.

    Returns:
        `[R, A, D]`: float32 without a gate; with one rounded once, to the gate's dtype.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit together; at debug level 2 (`pallas_kernels.debug`)
            also more keys than pages, and pages that the cache does not have.
    """
    if q.ndim != 3 or keys.ndim != 3 or pages.ndim != 2:
        raise ValueError(
            f"q, keys and pages have shapes {q.shape}, {keys.shape} and {pages.shape}; they take [R, A, D], "
            "[kv_slots, G, D] and [R, P]"
        )
    (rows, heads, dim), groups = q.shape, keys.shape[1]
    if heads % groups or keys.shape[2] != dim or values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(
            f"q{list(q.shape)} takes keys and values of one dtype and shape [kv_slots, a divisor of {heads}, {dim}]; "
            f"got {keys.dtype}{list(keys.shape)} and {values.dtype}{list(values.shape)}"
        )
    for name, array, shape in (("pages", pages, (rows, pages.shape[1])), ("length", length, (rows,))):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes int32{list(shape)}")
    if gate is not None and gate.shape != q.shape:
        raise ValueError(f"gate has shape {gate.shape}; it takes q's, {q.shape}")
    if page_size < 1:
        raise ValueError(f"page_size = {page_size}; it takes an integer >= 1")
    if attention_segment < 1 or attention_pin < 1 or attention_pin % attention_segment:
        raise ValueError(
            f"attention_pin = {attention_pin}, attention_segment = {attention_segment}; attention_pin takes a "
            "positive multiple of attention_segment"
        )
    check_values("paged_attention_decode", page_faults(page_size, keys.shape[0]), pages, length)
    arguments = (q, keys, values, pages, length, page_size, gate, attention_pin, attention_segment)
    unsupported = _unsupported(q, keys, page_size, attention_pin // attention_segment)
    chosen = choose("paged_attention_decode", implementation, unsupported)
    if chosen == "reference":
        return reference.paged_attention_segmented(*arguments)
    return kernel.paged_attention_decode(*arguments, interpret=chosen == "interpret")


def _unsupported(q: jax.Array, keys: jax.Array, page_size: int, segments: int) -> str | None:
    dim = q.shape[-1]
    if not power_of_two(dim) or dim < 16:
        return f"head dimension {dim} is no power of two from 16 on"
    if not power_of_two(page_size):
        return f"page_size {page_size} is no power of two"
    if not power_of_two(segments):
        return f"attention_pin / attention_segment = {segments} is no power of two"
    for name, array in (("q", q), ("KV cache", keys)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {array.dtype}, neither float32 nor bfloat16"
    return None

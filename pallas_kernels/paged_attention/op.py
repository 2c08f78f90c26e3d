"""Paged attention for rows with a number of keys each and for packed rows, by kernels or by references."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.debug import check_values, page_faults, segment_faults
from pallas_kernels.dispatch import Implementation, choose, power_of_two
from pallas_kernels.paged_attention import kernel, packed, reference
from pallas_kernels.segments import Segments


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

    Rows of one request share its page table and what is read of its keys: pages has a divisor of R entries, for as
    many rows each, which follow each other. Without rows that share, it has R.

    A row's output has the same bits in any batch and with a page table of any width. Rows of its request leave them
    as they are too, as far as one matrix product of more rows has the bits of one of fewer; but values that are not
    finite, of a key that another row of its request sees, reach it.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`.
        pages: `[N, P]` int32, N requests' page tables, each of the R / N rows that follow those of the one before;
            unused entries point at page 0.
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
    _check_arrays(q, keys, values, pages, page_size, gate)
    rows = q.shape[0]
    tables = pages.shape[0]
    if tables == 0 or rows % tables:
        raise ValueError(
            f"pages is {pages.dtype}{list(pages.shape)}; it takes int32{[rows, pages.shape[1]]}, or fewer page tables: "
            f"a divisor of {rows}, the number of rows"
        )
    _check_int32(pages=(pages, pages.shape), length=(length, (rows,)))
    if attention_segment < 1 or attention_pin < 1 or attention_pin % attention_segment:
        raise ValueError(
            f"attention_pin = {attention_pin}, attention_segment = {attention_segment}; attention_pin takes a "
            "positive multiple of attention_segment"
        )
    each = jnp.repeat(pages, rows // tables, axis=0)
    check_values("paged_attention_decode", page_faults(page_size, keys.shape[0]), each, length)
    arguments = (q, keys, values, pages, length, page_size, gate, attention_pin, attention_segment)
    segments = attention_pin // attention_segment
    unsupported = _unsupported(q, keys, page_size)
    if unsupported is None and not power_of_two(segments):
        unsupported = f"attention_pin / attention_segment = {segments} is no power of two"
    chosen = choose("paged_attention_decode", implementation, unsupported)
    if chosen == "reference":
        return reference.paged_attention_segmented(*arguments)
    return kernel.paged_attention_decode(*arguments, interpret=chosen == "interpret")


def paged_attention_packed(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    segments: Segments,
    page_size: int,
    gate: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Packed rows of many requests, each over the keys of its request up to its own position, in one launch.

    A row's output has the same bits whatever other requests are in the call and however wide the page table is.

    Args:
        q: `[R, A, D]`. keys, values: `[kv_slots, G, D]`, with the rows' own keys already written.
        page_table: `[segments, P]` int32; unused entries point at page 0.
        segments: which rows belong together, and their positions.
        page_size: tokens a page.
        gate: `[R, A, D]`; the output is multiplied by its sigmoid. None: no gate.
        implementation: see `Implementation`.

    Returns:
        `[R, A, D]`: float32 without a gate; with one rounded once, to the gate's dtype. Zeros on rows of no
        segment.

    Raises:
        ValueError: shapes, dtypes or numbers that do not fit together; at debug level 2 (`pallas_kernels.debug`)
            also segments that overlap, more keys than pages, and pages that the cache does not have.
    """
    _check_arrays(q, keys, values, page_table, page_size, gate)
    vectors = {f"segments.{name}": getattr(segments, name) for name in ("start", "length", "position")}
    count = segments.start.shape[0] if segments.start.ndim else 0
    _check_int32(page_table=(page_table, (count, page_table.shape[1])))
    _check_int32(**{name: (vector, (count,)) for name, vector in vectors.items()})
    check_values("paged_attention_packed", segment_faults(q.shape[0]), segments.start, segments.length)
    ends = jnp.where(segments.length > 0, segments.position + segments.length, 0)
    check_values("paged_attention_packed", page_faults(page_size, keys.shape[0]), page_table, ends)
    unsupported = _unsupported(q, keys, page_size)
    most = packed.tile_for(q, keys).queries
    if unsupported is None and q.shape[1] > most * keys.shape[1]:
        unsupported = f"{q.shape[1]} heads over {keys.shape[1]} KV heads are more than {most} for each"
    chosen = choose("paged_attention_packed", implementation, unsupported)
    arguments = (q, keys, values, page_table, segments, page_size, gate)
    if chosen == "reference" or q.shape[0] == 0 or count == 0:
        return reference.paged_attention_packed(*arguments)
    return packed.paged_attention_packed(*arguments, interpret=chosen == "interpret")


def _check_arrays(
    q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, page_size: int, gate: jax.Array | None
) -> None:
    if q.ndim != 3 or keys.ndim != 3 or pages.ndim != 2:
        raise ValueError(
            f"q, keys and pages have shapes {q.shape}, {keys.shape} and {pages.shape}; they take [R, A, D], "
            "[kv_slots, G, D] and [R, P]"
        )
    (_, heads, dim), groups = q.shape, keys.shape[1]
    if heads % groups or keys.shape[2] != dim or values.shape != keys.shape or values.dtype != keys.dtype:
        raise ValueError(
            f"q{list(q.shape)} takes keys and values of one dtype and shape [kv_slots, a divisor of {heads}, {dim}]; "
            f"got {keys.dtype}{list(keys.shape)} and {values.dtype}{list(values.shape)}"
        )
    if gate is not None and gate.shape != q.shape:
        raise ValueError(f"gate has shape {gate.shape}; it takes q's, {q.shape}")
    if page_size < 1:
        raise ValueError(f"page_size = {page_size}; it takes an integer >= 1")


def _check_int32(**vectors: tuple[jax.Array, tuple[int, ...]]) -> None:
    for name, (array, shape) in vectors.items():
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes int32{list(shape)}")


def _unsupported(q: jax.Array, keys: jax.Array, page_size: int) -> str | None:
    dim = q.shape[-1]
    if not power_of_two(dim) or dim < 16:
        return f"head dimension {dim} is no power of two from 16 on"
    if not power_of_two(page_size):
        return f"page_size {page_size} is no power of two"
    for name, array in (("q", q), ("KV cache", keys)):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            return f"{name} is {array.dtype}, neither float32 nor bfloat16"
    return None

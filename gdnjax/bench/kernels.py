"""Every decode kernel against the bytes it must move, as a fraction of a copy's bandwidth in the same run, and the
attention of a prefill also against its operations, as a fraction of a large product's rate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.bench.timing import copy_bandwidth, product_rate, time_kernels
from gdnjax.config import Config
from pallas_kernels.attention_prologue import attention_prologue
from pallas_kernels.attention_prologue import shapes as prologue_shapes
from pallas_kernels.causal_conv import causal_conv_decode
from pallas_kernels.causal_conv import shapes as conv_shapes
from pallas_kernels.gated_delta_decode import DEFAULT_TILE, Tile, gated_delta_decode
from pallas_kernels.gated_delta_decode import shapes as delta_shapes
from pallas_kernels.gated_rms_norm import gated_rms_norm
from pallas_kernels.gated_rms_norm import shapes as norm_shapes
from pallas_kernels.paged_attention import paged_attention_decode, paged_attention_packed
from pallas_kernels.paged_attention import shapes as attention_shapes
from pallas_kernels.triton_backend import Warps

KEYS = 4096
"""Keys that every row of the attention benchmark sees."""
WINDOWS = ((256, 0), (1024, 0), (1024, KEYS))
"""(rows, tokens before them) of the prefill windows that are timed: one request's."""
WORKING_SET = 2**28
"""Bytes that a rotation over copies of the operands should pass, so that no cache holds them."""

TILES = tuple(
    Tile(strip, strips, piece, Warps(1, 1)) for strip in (4, 8, 16) for strips in (1, 2, 4) for piece in (32, 64, 128)
)
"""What `sweep_tiles` tries."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size: bytes it must move, how to call it on copy number i of its operands, and operations
    where they bound it too.

    `call` takes a copy's mutable and constant operands and returns (mutable operands, output).
    """

    kernel: str
    rows: int
    moved: int
    make: Callable[[jax.Array], tuple[Any, Any]]
    call: Callable[[Any, Any], tuple[Any, Any]]
    operations: int = 0


def cases(config: Config, rows: int, tile: Tile = DEFAULT_TILE) -> Iterator[Case]:
    """All decode kernels at a config's sizes."""
    c, dtype = config, jnp.dtype(config.dtype)
    delta = delta_shapes.Shape(
        "", c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    # A server's rows are in the order of their slots; shuffled, they show what that order is worth.
    order = np.arange(1, rows + 1, dtype=np.int32)
    shuffled = np.random.default_rng(0).permutation(order)
    for note, read, write in (("", order, order), (" twin", order, rows + order), (" shuffled", shuffled, shuffled)):

        def make_delta(key: jax.Array, twin: bool = note == " twin") -> tuple[Any, Any]:
            arguments = delta_shapes.arguments(delta, rows, key, dtype, twin=twin)
            return arguments[5], arguments[:5]

        # Slots are constants here, the same for all copies, as they are the same for all layers of a step.
        def call_delta(pool: Any, inputs: Any, read: np.ndarray = read, write: np.ndarray = write) -> tuple[Any, Any]:
            qkv, a, b, a_log, dt_bias = inputs
            slots = jnp.asarray(read), jnp.asarray(write), jnp.ones(rows, bool)
            out, pool = gated_delta_decode(qkv, a, b, a_log, dt_bias, pool, *slots, tile=tile)
            return pool, out

        moved = delta_shapes.bytes_moved(delta, rows, dtype)
        yield Case("gated_delta_decode" + note, rows, moved, make_delta, call_delta)

    conv = conv_shapes.Shape(
        "", delta.layout.width, delta.projected, c.linear_conv_kernel_dim, c.linear_conv_kernel_dim
    )

    def make_conv(key: jax.Array) -> tuple[Any, Any]:
        x, weight, ring, ring_row, position = conv_shapes.arguments(conv, rows, key, dtype)
        return ring, (x, weight, ring_row, position)

    def call_conv(ring: Any, rest: Any) -> tuple[Any, Any]:
        x, weight, ring_row, position = rest
        out, ring = causal_conv_decode(x, weight, ring, ring_row, position)
        return ring, out

    yield Case("causal_conv_decode", rows, conv_shapes.bytes_moved(conv, rows, dtype), make_conv, call_conv)

    norm = norm_shapes.Shape("", delta.value_heads, delta.value_dim, delta.layout.width, delta.projected)

    def make_norm(key: jax.Array) -> tuple[Any, Any]:
        return (), norm_shapes.arguments(norm, rows, key, dtype)

    def call_norm(_: Any, rest: Any) -> tuple[Any, Any]:
        x, gate, weight = rest
        return (), gated_rms_norm(x, gate, weight, config.rms_norm_eps)

    yield Case("gated_rms_norm", rows, norm_shapes.bytes_moved(norm, rows, dtype), make_norm, call_norm)

    prologue = prologue_shapes.Shape(
        "", c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rotary_dim, c.rope_theta
    )

    def make_prologue(key: jax.Array) -> tuple[Any, Any]:
        *rest, keys, values = prologue_shapes.arguments(prologue, rows, key, dtype)
        return (keys, values), rest

    def call_prologue(caches: Any, rest: Any) -> tuple[Any, Any]:
        packed, q_norm, k_norm, cos, sin, slot = rest
        q, gate, keys, values = attention_prologue(
            [packed], q_norm, k_norm, cos, sin, slot, *caches, eps=config.rms_norm_eps
        )
        return (keys, values), (q, gate)

    moved = prologue_shapes.bytes_moved(prologue, rows, dtype)
    yield Case("attention_prologue", rows, moved, make_prologue, call_prologue)

    attention = attention_shapes.Shape("", c.num_attention_heads, c.num_key_value_heads, c.head_dim)

    def make_attention(key: jax.Array) -> tuple[Any, Any]:
        return (), attention_shapes.arguments(attention, rows, key, KEYS, c.page_size, dtype)

    def call_attention(_: Any, rest: Any) -> tuple[Any, Any]:
        q, keys, values, pages, length, gate = rest
        return (), paged_attention_decode(
            q, keys, values, pages, length, c.page_size, gate, c.attention_pin, c.attention_segment
        )

    moved = attention_shapes.bytes_moved(attention, rows, KEYS, dtype)
    yield Case(f"paged_attention {KEYS} keys", rows, moved, make_attention, call_attention)


def window_cases(config: Config) -> Iterator[Case]:
    """Attention of prefill windows at a config's sizes."""
    c, dtype = config, jnp.dtype(config.dtype)
    shape = attention_shapes.Shape("", c.num_attention_heads, c.num_key_value_heads, c.head_dim)
    for rows, position in WINDOWS:

        def make(key: jax.Array, rows: int = rows, position: int = position) -> tuple[Any, Any]:
            return (), attention_shapes.packed_arguments(shape, [rows], key, position, c.page_size, dtype)

        def call(_: Any, rest: Any) -> tuple[Any, Any]:
            q, keys, values, table, segments, gate = rest
            return (), paged_attention_packed(q, keys, values, table, segments, c.page_size, gate)

        moved = attention_shapes.packed_bytes_moved(shape, [rows], position, dtype)
        operations = attention_shapes.packed_flops(shape, [rows], position)
        yield Case(f"paged_attention_packed {position + rows} keys", rows, moved, make, call, operations)


def time_case(case: Case, bandwidth: float, rate: float | None = None) -> dict[str, Any]:
    """Microseconds of one call, over copies of the operands in turn; and its fractions of a copy and of a product,
    which has `rate` operations a second."""
    copies = max(2, min(48, math.ceil(WORKING_SET / case.moved)))
    operands = [case.make(key) for key in jax.random.split(jax.random.key(0), copies)]
    mutable, constant = zip(*operands, strict=True)

    def step(mutable: Any, constant: Any) -> tuple[Any, Any]:
        results = [case.call(m, k) for m, k in zip(mutable, constant, strict=True)]
        mutable, outputs = zip(*results, strict=True)
        return mutable, outputs

    timing = time_kernels(step, mutable, constant, calls=copies)
    of_product = {} if rate is None else {"of_product": round(case.operations / timing.seconds / rate, 3)}
    return {
        "kernel": case.kernel,
        "rows": case.rows,
        "bytes": case.moved,
        "us": round(timing.seconds * 1e6, 3),
        "spread": round(timing.spread, 4),
        "of_copy": round(case.moved / timing.seconds / bandwidth, 3),
        **of_product,
    }


def bench_kernels(config: Config, rows: tuple[int, ...]) -> dict[str, Any]:
    """All decode kernels at all batch sizes, and the attention of prefill windows.

    Returns:
        `device`, `jax`, `copy_bytes_per_second`, `product_operations_per_second`, and `cells` with `kernel`,
        `rows`, `bytes`, `us`, `spread` (half the range over the median), `of_copy` (bytes over time over the
        copy's bandwidth) and for windows `of_product` (operations over time over the product's rate).
    """
    bandwidth, rate = copy_bandwidth(), product_rate()
    cells = [time_case(case, bandwidth) for count in rows for case in cases(config, count)]
    cells += [time_case(case, bandwidth, rate) for case in window_cases(config)]
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_second": round(bandwidth),
        "product_operations_per_second": round(rate),
        "cells": cells,
    }


def sweep_tiles(config: Config, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """The delta rule with every tile: how its default was chosen."""
    bandwidth = copy_bandwidth()
    cells = []
    for count in rows:
        for tile in TILES:
            case = next(cases(config, count, tile))
            cells.append({**dataclasses.asdict(tile), **time_case(case, bandwidth)})
    return cells

"""Every decode kernel against the bytes it must move, as a fraction of a copy's bandwidth in the same run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.bench.timing import copy_bandwidth, time_loop
from gdnjax.config import Config
from pallas_kernels.attention_prologue import attention_prologue
from pallas_kernels.attention_prologue import shapes as prologue_shapes
from pallas_kernels.causal_conv import causal_conv_decode
from pallas_kernels.causal_conv import shapes as conv_shapes
from pallas_kernels.gated_delta_decode import DEFAULT_TILE, Tile, gated_delta_decode
from pallas_kernels.gated_delta_decode import shapes as delta_shapes
from pallas_kernels.gated_rms_norm import gated_rms_norm
from pallas_kernels.gated_rms_norm import shapes as norm_shapes
from pallas_kernels.paged_attention import paged_attention_decode
from pallas_kernels.paged_attention import shapes as attention_shapes
from pallas_kernels.triton_backend import Warps

KEYS = 4096
"""Keys that every row of the attention benchmark sees."""
WORKING_SET = 2**28
"""Bytes that a rotation over copies of the operands should pass, so that no cache holds them."""
LEAST_CALLS = 16
"""Calls in one turn of the loop: a turn costs some 10 us of its own, which they share."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one size: what it moves, and how to call it on copy number i of its operands.

    `call` takes a copy's mutable and constant operands and returns (mutable operands, output).
    """

    kernel: str
    rows: int
    moved: int
    make: Callable[[jax.Array], tuple[Any, Any]]
    call: Callable[[Any, Any], tuple[Any, Any]]


def cases(config: Config, rows: int, tile: Tile = DEFAULT_TILE) -> Iterator[Case]:
    """All decode kernels at a config's sizes."""
    c, dtype = config, jnp.dtype(config.dtype)
    delta = delta_shapes.Shape(
        "", c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    )
    for twin in (False, True):

        def make_delta(key: jax.Array, twin: bool = twin) -> tuple[Any, Any]:
            a = delta_shapes.arguments(delta, rows, key, dtype, twin=twin)
            return a[5], (a[:5], a[6:])

        def call_delta(pool: Any, rest: Any) -> tuple[Any, Any]:
            (qkv, a, b, a_log, dt_bias), (read, write, live) = rest
            out, pool = gated_delta_decode(qkv, a, b, a_log, dt_bias, pool, read, write, live, tile=tile)
            return pool, out

        name = "gated_delta_decode" + (" twin" if twin else "")
        yield Case(name, rows, delta_shapes.bytes_moved(delta, rows, dtype), make_delta, call_delta)

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


def time_case(case: Case, bandwidth: float) -> dict[str, Any]:
    """Microseconds of one call, over copies of the operands in turn; and its fraction of a copy."""
    copies = max(2, min(48, math.ceil(WORKING_SET / case.moved)))
    operands = [case.make(key) for key in jax.random.split(jax.random.key(0), copies)]
    mutable, constant = zip(*operands, strict=True)
    outs = tuple(
        jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(case.call, m, k)[1]) for m, k in operands
    )

    rounds = -(-LEAST_CALLS // copies)

    # Outputs are carried along, unread: no call can be dropped, and none costs a kernel beside its own.
    def body(carry: Any, constant: Any) -> Any:
        for _ in range(rounds):
            results = [case.call(m, k) for m, k in zip(carry[0], constant, strict=True)]
            carry = tuple(zip(*results, strict=True))
        return carry

    timing = time_loop(body, (mutable, outs), constant, calls=copies * rounds)
    return {
        "kernel": case.kernel,
        "rows": case.rows,
        "bytes": case.moved,
        "us": round(timing.seconds * 1e6, 3),
        "spread": round(timing.spread, 4),
        "of_copy": round(case.moved / timing.seconds / bandwidth, 3),
    }


def bench_kernels(config: Config, rows: tuple[int, ...]) -> dict[str, Any]:
    """All decode kernels at all batch sizes.

    Returns:
        `device`, `jax`, `copy_bytes_per_second`, and `cells` with `kernel`, `rows`, `bytes`, `us`, `spread`
        (half the range over the median) and `of_copy` (bytes over time over the copy's bandwidth).
    """
    bandwidth = copy_bandwidth()
    cells = [time_case(case, bandwidth) for count in rows for case in cases(config, count)]
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "copy_bytes_per_second": round(bandwidth),
        "cells": cells,
    }


def sweep_tiles(config: Config, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """The delta rule with every tile: how its default was chosen."""
    bandwidth = copy_bandwidth()
    cells = []
    for count in rows:
        for strip in (8, 16, 32, 64, 128):
            for warps in (1, 2, 4, 8):
                tile = Tile(strip, Warps(warps, warps))
                case = next(cases(config, count, tile))
                cells.append({"strip": strip, "warps": warps, **time_case(case, bandwidth)})
    return cells

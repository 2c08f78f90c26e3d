"""The traffic of one decode step's recurrent state, without and with the rule's arithmetic.

A published study found that writing the slot that was just read costs more than writing another one on
one kind of device. This repeats it on the device at hand: read only, write only, in place and twin, over
the pools of several layers in turn, so that no cache holds them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gdnjax.bench.timing import Timing, copy_bandwidth, time_kernels
from gdnjax.config import Config
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.triton_backend import Warps, launch, pl

Mode = Literal["read", "write", "in_place", "twin"]
MODES: tuple[Mode, ...] = ("read", "write", "in_place", "twin")
STRIP = 16
TWIN_MARGIN = 0.03
"""Twin is recommended where it is faster than in place by more than this share."""


def _kernel(slots_ref: Any, _: Any, sum_ref: Any, pool_ref: Any, *, mode: Mode) -> None:
    row, head, strip = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    read, write = slots_ref[row, 0], slots_ref[row, 1]
    rows = pl.ds(strip * STRIP, STRIP)
    tile = jnp.ones((STRIP, pool_ref.shape[3]), jnp.float32)
    if mode != "write":
        tile = pool_ref[read, head, rows, :] + 1.0
    if mode == "read":
        sum_ref[row, head, rows] = jnp.sum(tile, axis=1)
    else:
        pool_ref[write, head, rows, :] = tile


def move(pool: jax.Array, slots: jax.Array, mode: Mode, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Moves one state a row: pool `[slots, Hv, dv, dk]` float32, slots `[R, 2]` (read, write)."""
    rows, heads, dv = slots.shape[0], pool.shape[1], pool.shape[2]
    sums = jax.ShapeDtypeStruct((rows, heads, dv), jnp.float32)
    sums, pool = launch(
        functools.partial(_kernel, mode=mode),
        [slots, pool],
        name=f"traffic_{mode}",
        grid=(rows, heads, dv // STRIP),
        out_shape=[sums, jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        warps=Warps(1, 1),
        aliases={1: 1},
        interpret=interpret,
    )
    return sums, pool


def slot_pairs(rows: int, twin: bool) -> jax.Array:
    """`[rows, 2]` read and write slots of a pool with two slots a request, as `init_state` hands them out."""
    read = 1 + jnp.arange(rows, dtype=jnp.int32)
    return jnp.stack([read, rows + read if twin else read], axis=1)


def study(config: Config, rows: tuple[int, ...] = (1, 16, 32, 64), layers: int | None = None) -> dict[str, Any]:
    """Microseconds of each mode, alone and with the rule, and the layout they speak for.

    Args:
        config: sizes of a GDN layer.
        rows: batch sizes.
        layers: pools to rotate over; None is the config's number of GDN layers.

    Returns:
        `copy_bytes_per_second`, `recommended_layout`, `cells`: per number of rows the microseconds and
        spreads by mode (`read`, `write`, `in_place`, `twin`, `rule_in_place`, `rule_twin`), and the
        fraction of copy bandwidth of each; and `floor_us` of an empty kernel.
    """
    layers = layers or len(config.gdn_layers)
    bandwidth = copy_bandwidth()
    cells = []
    for count in rows:
        state_bytes = 4 * count * config.value_channels * config.linear_key_head_dim
        timings = {mode: _time_mode(config, count, layers, mode) for mode in MODES}
        timings |= {f"rule_{m}": _time_rule(config, count, layers, m == "twin") for m in ("in_place", "twin")}
        cells.append(
            {
                "rows": count,
                "us": {name: round(t.seconds * 1e6, 3) for name, t in timings.items()},
                "spread": {name: round(t.spread, 4) for name, t in timings.items()},
                "of_copy": {
                    name: round(state_bytes * (1 if name in ("read", "write") else 2) / t.seconds / bandwidth, 3)
                    for name, t in timings.items()
                },
            }
        )
    largest = cells[-1]["us"]
    gain = 1 - largest["rule_twin"] / largest["rule_in_place"]
    return {
        "device": jax.devices()[0].device_kind,
        "copy_bytes_per_second": round(bandwidth),
        "layers": layers,
        "floor_us": round(_time_empty(layers).seconds * 1e6, 3),
        "cells": cells,
        "twin_gain": round(gain, 4),
        "recommended_layout": "twin" if gain > TWIN_MARGIN else "in_place",
    }


def _pools(config: Config, rows: int, layers: int) -> tuple[jax.Array, ...]:
    shape = (1 + 2 * rows, config.linear_num_value_heads, config.linear_value_head_dim, config.linear_key_head_dim)
    keys = jax.random.split(jax.random.key(0), layers)
    return tuple(jax.random.normal(key, shape, jnp.float32) for key in keys)


def _time_mode(config: Config, rows: int, layers: int, mode: Mode) -> Timing:
    slots = slot_pairs(rows, mode == "twin")

    def step(pools: Any, slots: jax.Array) -> Any:
        sums, pools = zip(*[move(pool, slots, mode) for pool in pools], strict=True)
        return pools, sums

    return time_kernels(step, _pools(config, rows, layers), slots, calls=layers)


def _time_rule(config: Config, rows: int, layers: int, twin: bool) -> Timing:
    c, slots = config, slot_pairs(rows, twin)
    keys = jax.random.split(jax.random.key(1), 3)
    heads = c.linear_num_value_heads
    widths = (c.conv_channels, heads, heads)
    qkv, a, b = (jax.random.normal(key, (rows, w), jnp.dtype(c.dtype)) for key, w in zip(keys, widths, strict=True))
    zeros = jnp.zeros(heads, jnp.float32)
    live = jnp.ones(rows, bool)

    def step(pools: Any, constants: Any) -> Any:
        (qkv, a, b, weight), (read, write), live = constants

        def one(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
            return gated_delta_decode(qkv, a, b, weight, weight, pool, read, write, live)

        outs, pools = zip(*map(one, pools), strict=True)
        return pools, outs

    constants = ((qkv, a, b, zeros), (slots[:, 0], slots[:, 1]), live)
    return time_kernels(step, _pools(config, rows, layers), constants, calls=layers)


def _time_empty(layers: int) -> Timing:
    def step(x: jax.Array, _: Any) -> tuple[jax.Array, Any]:
        for _ in range(layers):
            (x,) = launch(
                lambda x_ref, y_ref: y_ref.__setitem__(0, x_ref[0]),
                [x],
                name="empty",
                grid=(1,),
                out_shape=[jax.ShapeDtypeStruct((1,), jnp.float32)],
                warps=Warps(1, 1),
            )
        return x, ()

    return time_kernels(step, jnp.zeros(1, jnp.float32), calls=layers)

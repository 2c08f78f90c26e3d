"""Every operation under `jit` and `shard_map` over heads, on two devices, against the same operation whole.

A program for a process of its own: the number of a CPU's devices is fixed when JAX starts. It prints how many arrays
it has compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_prologue import attention_prologue
from pallas_kernels.attention_prologue import shapes as prologue_shapes
from pallas_kernels.causal_conv import causal_conv_decode
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_decode import shapes as delta_shapes
from pallas_kernels.gated_delta_prefill import gated_delta_prefill
from pallas_kernels.gated_delta_prefill import shapes as prefill_shapes
from pallas_kernels.gated_rms_norm import gated_rms_norm
from pallas_kernels.paged_attention import paged_attention_decode
from pallas_kernels.paged_attention import shapes as attention_shapes
from pallas_kernels.segments import Segments

ROWS = 3
COLUMNS, HEADS, WHOLE = P(None, "heads"), P("heads"), P()
DELTA = delta_shapes.Shape("two ratios", 2, 4, 32, 16)
"""Key heads, value heads and their dimensions: every device gets one key head with its two value heads."""


def halves(packed: jax.Array, widths: list[int]) -> jax.Array:
    """Columns that come in parts, each of all heads -> first every part's first half, then the second ones: what
    splitting the columns in two must give the two devices."""
    parts = np.split(np.asarray(packed), np.cumsum(widths)[:-1], axis=1)
    return jnp.concatenate([half for device in (0, 1) for x in parts for half in [np.split(x, 2, axis=1)[device]]], 1)


def compare(op: Callable[..., Any], whole: tuple[Any, ...], split: tuple[Any, ...], inputs: Any, outputs: Any) -> int:
    """Runs an operation whole and over two devices: sharded as asked, and equal up to rounding.

    Half as many heads is another program, whose sums a compiler may order otherwise.
    """
    mesh = Mesh(np.array(jax.devices()), ("heads",))
    expected = jax.jit(op)(*whole)
    found = jax.jit(jax.shard_map(op, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False))(*split)
    for one, two in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        error = np.abs(np.asarray(one) - np.asarray(two)).max()
        assert error <= 1e-5 * np.abs(np.asarray(one)).max(), (op, error)
        assert two.addressable_shards[0].data.size * 2 == two.size, "not split"
    return len(jax.tree.leaves(found))


def delta(implementation: Implementation) -> int:
    """The rule: one token a row, and packed rows."""
    qkv, a, b, a_log, dt_bias, pool, *slots = delta_shapes.arguments(
        DELTA, ROWS, jax.random.key(0), jnp.float32, spare=2
    )
    a, b = (x.array[:, x.start : x.start + x.width] for x in (a, b))
    widths = [2 * 32, 2 * 32, 4 * 16]

    def decode(*arguments: Any) -> Any:
        return gated_delta_decode(*arguments, implementation=implementation)

    rest = (a, b, a_log, dt_bias, pool, *slots)
    state = (COLUMNS, COLUMNS, COLUMNS, HEADS, HEADS, P(None, "heads"))
    compared = compare(
        decode, (qkv, *rest), (halves(qkv, widths), *rest), (*state, WHOLE, WHOLE, WHOLE), (COLUMNS, COLUMNS)
    )

    def prefill(qkv: Any, a: Any, b: Any, a_log: Any, dt_bias: Any, pool: Any, segments: Segments) -> Any:
        return gated_delta_prefill(qkv, a, b, a_log, dt_bias, pool, segments, implementation=implementation)

    qkv, a, b, *rest = prefill_shapes.packed_arguments(DELTA, [5, 66], jax.random.key(1), jnp.float32)
    rest = [*(x.array[:, x.start : x.start + x.width] for x in (a, b)), *rest]
    return compared + compare(prefill, (qkv, *rest), (halves(qkv, widths), *rest), (*state, WHOLE), (COLUMNS, COLUMNS))


def conv_and_norm(implementation: Implementation) -> int:
    """What works on channels, or on heads, alone."""
    keys = jax.random.split(jax.random.key(2), 5)
    x, ring = jax.random.normal(keys[0], (ROWS, 256)), jax.random.normal(keys[1], (ROWS + 1, 4, 256))
    weight = jax.random.normal(keys[2], (256, 1, 4))
    row, position = jnp.arange(1, ROWS + 1), jnp.arange(ROWS)

    def conv(*arguments: Any) -> Any:
        return causal_conv_decode(*arguments, implementation=implementation)

    arguments = (x, weight, ring, row, position)
    last = P(None, None, "heads")
    compared = compare(conv, arguments, arguments, (COLUMNS, HEADS, last, WHOLE, WHOLE), (COLUMNS, last))

    def norm(x: Any, gate: Any, weight: Any) -> Any:
        return gated_rms_norm(x, gate, weight, 1e-6, implementation=implementation)

    arguments = (jax.random.normal(keys[3], (ROWS, 4, 16)), jax.random.normal(keys[4], (ROWS, 4 * 16)), jnp.ones(16))
    return compared + compare(norm, arguments, arguments, (COLUMNS, COLUMNS, WHOLE), COLUMNS)


def attention(implementation: Implementation) -> int:
    """The prologue and attention over pages: every device gets one KV head with its two query heads."""
    shape = prologue_shapes.Shape("", 4, 2, dim=32, rotary_dim=16)
    packed, *rest = prologue_shapes.arguments(shape, ROWS, jax.random.key(3), jnp.float32)

    def prologue(packed: Any, *rest: Any) -> Any:
        return attention_prologue([packed], *rest, eps=1e-6, implementation=implementation)

    widths = [2 * 4 * 32, 2 * 32, 2 * 32]
    compared = compare(
        prologue,
        (packed, *rest),
        (halves(packed, widths), *rest),
        (COLUMNS, *[WHOLE] * 5, COLUMNS, COLUMNS),
        (COLUMNS,) * 4,
    )
    q, keys, values, pages, length, gate = attention_shapes.arguments(
        attention_shapes.Shape("", 4, 2, dim=32), ROWS, jax.random.key(4), 40, 16, jnp.float32
    )

    def attend(q: Any, keys: Any, values: Any, pages: Any, length: Any, gate: Any) -> Any:
        return paged_attention_decode(q, keys, values, pages, length, 16, gate, 64, 16, implementation)

    arguments = (q, keys, values, pages, length, gate)
    return compared + compare(attend, arguments, arguments, (COLUMNS, COLUMNS, COLUMNS, WHOLE, WHOLE, COLUMNS), COLUMNS)


if __name__ == "__main__":
    both: tuple[Implementation, ...] = ("reference", "interpret")
    print(sum(check(name) for name in both for check in (delta, conv_and_norm, attention)))

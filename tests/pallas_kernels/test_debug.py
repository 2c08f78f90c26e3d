"""Debug level 2: values that shapes can't show are refused, by every operation that takes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import debug
from pallas_kernels.attention_prologue import attention_prologue, write_kv
from pallas_kernels.attention_prologue import shapes as prologue_shapes
from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_decode import shapes as decode_shapes
from pallas_kernels.gated_delta_prefill import gated_delta_prefill
from pallas_kernels.paged_attention import paged_attention_decode
from pallas_kernels.segments import Segments

KEY = jax.random.key(0)
RULE = decode_shapes.Shape("", 1, 2, 16, 16)


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def rule(read: jax.Array, write: jax.Array):
    # A pool of 5 slots, two rows.
    *inputs, live = decode_shapes.arguments(RULE, 2, KEY, jnp.float32, twin=True)
    return gated_delta_decode(*inputs[:6], read, write, live)


def conv(ring_row: jax.Array):
    x, weight, ring = jnp.ones((2, 8)), jnp.ones((8, 1, 4)), jnp.zeros((3, 4, 8))
    return causal_conv_decode(x, weight, ring, ring_row, ints(0, 0))


def conv_packed(start: jax.Array, length: jax.Array):
    x, weight, ring = jnp.ones((6, 8)), jnp.ones((8, 1, 4)), jnp.zeros((3, 4, 8))
    segments = Segments(start, length, ints(0, 0), ints(1, 2))
    return causal_conv_packed(x, weight, ring, segments, ints(0, 0, 0, 1, 1, 1))


def prefill(start: jax.Array, length: jax.Array, slot: jax.Array):
    qkv, a = jnp.ones((6, RULE.layout.width)), jnp.ones((6, 2))
    segments = Segments(start, length, ints(0, 0), slot)
    return gated_delta_prefill(qkv, a, a, jnp.zeros(2), jnp.zeros(2), jnp.zeros((3, 2, 16, 16)), segments)


def prologue(slot: jax.Array):
    shape = prologue_shapes.Shape("", 2, 1, 16, 4)
    packed, q_norm, k_norm, cos, sin, _, keys, values = prologue_shapes.arguments(shape, 2, KEY, jnp.float32)
    return attention_prologue([packed], q_norm, k_norm, cos, sin, slot, keys, values, 1e-6)


def kv(slot: jax.Array):
    return write_kv(jnp.zeros((5, 1, 16)), jnp.zeros((5, 1, 16)), jnp.ones((2, 1, 16)), jnp.ones((2, 1, 16)), slot)


def attention(pages: jax.Array, length: jax.Array):
    cache = jnp.zeros((16, 1, 16))
    return paged_attention_decode(jnp.ones((2, 2, 16)), cache, cache, pages, length, 4)


PAGES = jnp.array([[1, 2], [3, 0]], jnp.int32)
GOOD = [
    (debug.slot_faults(5), [1, 3], [2, 3]),
    (debug.slot_faults(5), [0, 1, 0], [0, 2, 0]),
    (debug.place_faults("ring_row", 1, 3), [2, 1]),
    (debug.place_faults("ring_row", 1, 3), [0, 0]),
    (debug.place_faults("slot", 0, 5), [4, -1, -1]),
    (debug.segment_faults(6), [3, 0], [3, 3]),
    (debug.segment_faults(6, 3), [0, 9], [6, 0], [2, 2]),
    (debug.segment_faults(6, 3), [0, 3], [3, 3], [0, 0]),
    (debug.page_faults(4, 16), [[1, 2], [3, 0]], [8, 4]),
]
BAD = [
    (rule, (ints(1, 3), ints(2, 5)), "gated_delta_decode: write_slot[1] = 5; it takes 0 to 4"),
    (rule, (ints(-1, 3), ints(2, 4)), "gated_delta_decode: read_slot[0] = -1; it takes 0 to 4"),
    (rule, (ints(1, 3), ints(2, 2)), "write_slot[0] = write_slot[1] = 2; every row takes one of its own"),
    (rule, (ints(1, 2), ints(2, 3)), "read_slot[1] = 2 is write_slot[0]; a row's read slot may only be its own"),
    (conv, (ints(1, 1),), "causal_conv_decode: ring_row[0] = ring_row[1] = 1"),
    (conv, (ints(1, 3),), "causal_conv_decode: ring_row[1] = 3; it takes 0 to 2"),
    (conv_packed, (ints(0, 2), ints(3, 3)), "causal_conv_packed: segment 1 has start 2 and length 3"),
    (conv_packed, (ints(0, 4), ints(3, 3)), "segments take rows 0 to 5, none of them twice"),
    (prefill, (ints(0, 3), ints(3, -1), ints(1, 2)), "segment 1 has start 3 and length -1"),
    (prefill, (ints(0, 3), ints(3, 3), ints(1, 1)), "segments.slot[0] = segments.slot[1] = 1"),
    (prefill, (ints(0, 3), ints(3, 3), ints(1, 3)), "segments.slot[1] = 3; it takes 0 to 2"),
    (prologue, (ints(2, 2),), "attention_prologue: slot[0] = slot[1] = 2"),
    (prologue, (ints(-2, 1),), "attention_prologue: slot[0] = -2; it takes -1 to 4"),
    (kv, (ints(5, 1),), "write_kv: slot[0] = 5; it takes -1 to 4"),
    (attention, (PAGES, ints(9, 1)), "paged_attention_decode: length[0] = 9; it takes 0 to 8"),
    (attention, (PAGES, ints(1, 5)), "pages[1][1] = 0; it takes 1 to 3"),
]


@pytest.fixture
def debug_mode(monkeypatch):
    monkeypatch.setenv("GDNJAX_DEBUG", "2")


@pytest.mark.parametrize("case", GOOD)
def test_good_values_pass(case):
    find, *arrays = case
    assert find(*map(np.array, arrays)) is None


@pytest.mark.parametrize(("operation", "arguments", "message"), BAD)
def test_bad_values_are_refused(debug_mode, operation, arguments, message):
    with pytest.raises(ValueError) as error:
        operation(*arguments)
    assert message in str(error.value)


def test_inside_jit_the_error_comes_with_the_result(debug_mode):
    run = jax.jit(rule)
    jax.block_until_ready(run(ints(1, 3), ints(2, 4)))
    with pytest.raises(Exception, match=r"read_slot\[1\] = 2 is write_slot\[0\]"):
        jax.block_until_ready(run(ints(1, 2), ints(2, 3)))
        jax.effects_barrier()


def test_below_level_2_no_value_is_looked_at(monkeypatch):
    monkeypatch.setenv("GDNJAX_DEBUG", "1")
    debug.check_values("op", lambda _: pytest.fail("a value was looked at"), ints(1))
    # A function of its own: what JAX has traced of `rule` at level 2 stays as it was.
    jaxpr = str(jax.make_jaxpr(lambda *slots: rule(*slots))(ints(1, 1), ints(1, 1)))
    assert "callback" not in jaxpr

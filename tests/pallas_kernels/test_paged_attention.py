"""Grouped-query attention over whole sequences and for one token a row, by reference and kernels, against float64;
and the bits that a row's cutting fixes."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention_decode, reference, shapes
from pallas_kernels.paged_attention.reference import (
    BLOCK,
    apply_gate,
    causal_attention,
    cut,
)
from tests.helpers import assert_close, assert_same_bits
from tests.pallas_kernels.attention import (
    ATTENTION,
    KERNEL,
    SPLIT,
    assert_attends,
    attention_float64,
    both,
    random_cache,
)

# Four segments of 64 keys at the pinned length: short rows leave some empty, long ones widen them.
SEGMENTS = {"attention_pin": 256, "attention_segment": 64}
segmented = jax.jit(
    paged_attention_decode, static_argnames=("page_size", "implementation", "attention_pin", "attention_segment")
)
whole = jax.jit(reference.paged_attention_decode, static_argnames="page_size")


def decode(*arguments: Any, implementation: str = KERNEL, **options: Any) -> jax.Array:
    """Decode attention by name; `whole` is the reference without segments."""
    if implementation == "whole":
        return whole(*arguments, **options)
    return segmented(*arguments, implementation=implementation, **(SEGMENTS | options))


@pytest.mark.parametrize(("heads", "groups", "dim"), [(2, 2, 8), (4, 2, 12), (3, 1, 20), (8, 2, 32)])
def test_whole_sequences(heads: int, groups: int, dim: int) -> None:
    rng = np.random.default_rng(heads)
    q = rng.normal(size=(2, 21, heads, dim)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 21, groups, dim)).astype(np.float32)
    out = causal_attention(q, k, v)
    assert out.dtype == jnp.float32
    for b in range(2):
        assert_close(out[b], attention_float64(q[b], k[b], v[b]), ATTENTION)


@pytest.mark.parametrize("implementation", ["whole", "reference", KERNEL])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "page_size"), [(2, 2, 16, 16), (3, 1, 20, 4), (6, 2, 64, 4), (8, 2, 32, 64)]
)
def test_decode(heads: int, groups: int, dim: int, page_size: int, implementation: str) -> None:
    rng = np.random.default_rng(page_size)
    lengths = [1, 33, 90, 64]
    keys, values, page_table, tokens = random_cache(rng, lengths, page_size, groups, dim)
    q = rng.normal(size=(6, heads, dim)).astype(np.float32)
    # rows in another order than requests, rows 1 and 4 are padding
    request, length = np.array([2, 0, 0, 3, 0, 1]), np.array([90, 0, 1, 64, 0, 33], np.int32)
    out = decode(q, keys, values, page_table[request], length, page_size=page_size, implementation=implementation)
    assert out.dtype == jnp.float32
    for row, r in enumerate(request):
        if length[row]:
            assert_close(out[row], attention_float64(q[row : row + 1], *tokens[r])[0], ATTENTION, f"row {row}")
        else:
            assert_same_bits(out[row], np.zeros((heads, dim), np.float32), f"padding row {row}")


@pytest.mark.parametrize("implementation", ["whole", "reference", KERNEL])
def test_decode_row_does_not_depend_on_its_batch(implementation: str) -> None:
    rng = np.random.default_rng(3)
    length = np.array([13, 5, 120, 9, 1, 2, 70, 8], np.int32)
    keys, values, page_table, _ = random_cache(rng, list(length), 16, 2, 16)
    q = rng.normal(size=(8, 6, 16)).astype(np.float32)
    attend = functools.partial(decode, page_size=16, implementation=implementation)
    together = attend(q, keys, values, page_table, length)
    for row in range(8):
        alone = attend(q, keys, values, page_table, np.where(np.arange(8) == row, length, 0))
        assert_same_bits(alone[row], together[row], f"row {row}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_capacity(dtype: str) -> None:
    """Alone, among 8 and among 64 rows; with a page table as narrow as can be and with one four times as wide."""
    rng = np.random.default_rng(4)
    length = np.array([150, 1, 64, 0, 33, 149, 7, 96], np.int32)
    keys, values, page_table, _ = random_cache(rng, list(length), 32, 2, 16)
    q, keys, values = (jnp.asarray(x, dtype) for x in (rng.normal(size=(8, 4, 16)), keys, values))
    attend = functools.partial(decode, keys=keys, values=values, page_size=32)
    eight = attend(q=q, pages=page_table, length=length)
    alone = attend(q=q[:1], pages=page_table[:1], length=length[:1])
    assert_same_bits(alone[0], eight[0], "alone")
    crowd = np.tile(np.arange(8), 8)
    sixty_four = attend(q=q[crowd], pages=page_table[crowd], length=length[crowd])
    for copy in range(8):
        assert_same_bits(sixty_four[8 * copy : 8 * copy + 8], eight, f"among 64, copy {copy}")
    wide = np.pad(page_table, ((0, 0), (0, 15)))
    assert_same_bits(attend(q=q, pages=wide, length=length), eight, "in a wide page table")


def test_page_size_does_not_change_a_bit() -> None:
    """Pages smaller and larger than a block are looked up in different ways."""
    rng = np.random.default_rng(5)
    k, v = rng.normal(size=(2, 128, 2, 32)).astype(np.float32)
    q, length = rng.normal(size=(1, 4, 32)).astype(np.float32), np.array([117], np.int32)
    results = []
    for page_size in (16, 32, 128):
        order = rng.permutation(128 // page_size)
        keys, values = np.empty_like(k), np.empty_like(v)
        for page, place in enumerate(order):
            target, source = (slice(n * page_size, (n + 1) * page_size) for n in (place, page))
            keys[target], values[target] = k[source], v[source]
        results.append(decode(q, keys, values, order[None].astype(np.int32), length, page_size=page_size))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@both
@pytest.mark.parametrize(("name", "dtype"), [("9B", "float32"), ("27B", "bfloat16"), ("397B", "bfloat16")])
def test_real_sizes(name: str, dtype: str, implementation: Implementation) -> None:
    """Against float64: rows shorter than the pinned length, one longer by a block and a key."""
    (shape,) = (shape for shape in shapes.SHAPES if shape.name == name)
    q, keys, values, pages, length, gate = shapes.arguments(
        shape, 2, jax.random.key(0, impl="unsafe_rbg"), 256 + BLOCK + 1, 64, dtype
    )
    length = length.at[1].set(70)
    arguments = (q, keys, values, pages, length)
    out = decode(*arguments, page_size=64, implementation=implementation)
    gated = decode(*arguments, page_size=64, gate=gate, implementation=implementation)
    slots = np.asarray(pages)[..., None] * 64 + np.arange(64)
    exact = np.stack(
        [
            attention_float64(q[r : r + 1], *(np.asarray(x, np.float64)[slots[r].ravel()[:n]] for x in (keys, values)))[
                0
            ]
            for r, n in enumerate(np.asarray(length))
        ]
    )
    tolerance = SPLIT if dtype == "bfloat16" and implementation != "reference" else ATTENTION
    assert_attends(out, gated, gate, exact, tolerance)


@both
def test_weights_keep_more_than_bfloat16(implementation: Implementation) -> None:
    """Values of one sign, so that what rounded weights lose would add up."""
    rng = np.random.default_rng(6)
    q, keys, values = (jnp.asarray(rng.normal(size=(64, 1, 16)), jnp.bfloat16) for _ in range(3))
    values = 100 + values  # their steps are half a unit
    out = decode(
        q[:1], keys, values, np.zeros((1, 1), np.int32), np.array([3]), page_size=64, implementation=implementation
    )
    exact = attention_float64(*(np.asarray(x, np.float64) for x in (q[:1], keys[:3], values[:3])))
    assert_close(out, exact, 100 * SPLIT)


@both
def test_mixed_dtypes(implementation: Implementation) -> None:
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(40, 2, 16)).astype(np.float32) for _ in range(3))
    k, v = jnp.asarray(k, jnp.bfloat16), jnp.asarray(v, jnp.bfloat16)
    pages = np.arange(3, dtype=np.int32)[None]
    exact = attention_float64(q[:1], k, v)
    pad = ((0, 8), (0, 0), (0, 0))
    out = decode(
        q[:1], jnp.pad(k, pad), jnp.pad(v, pad), pages, np.array([40]), page_size=16, implementation=implementation
    )
    assert_close(out, exact, ATTENTION)


@given(segments=st.sampled_from([1, 2, 16, 64]), length=st.integers(0, 300_000))
def test_cutting(segments: int, length: int) -> None:
    """Every block belongs to one segment; the widths are the least that do."""
    blocks, width = (int(n) for n in cut(jnp.int32(length), segments))
    assert (blocks - 1) * BLOCK < length <= blocks * BLOCK or (length == blocks == 0)
    owned = [range(s * width, min((s + 1) * width, blocks)) for s in range(segments)]
    assert [block for segment in owned for block in segment] == list(range(blocks))
    assert (width - 1) * segments < blocks or (blocks == width == 0)
    if length == 4096:
        assert width * BLOCK * segments == 4096


def test_the_launch_does_not_depend_on_the_capacity() -> None:
    def grids(table: int) -> list[tuple[int, ...]]:
        arguments = jax.eval_shape(lambda: shapes.arguments(shapes.SHAPES[0], 3, jax.random.key(0), table * 64, 64))
        q, keys, values, pages, length, gate = arguments
        traced = jax.make_jaxpr(functools.partial(paged_attention_decode, page_size=64, implementation="interpret"))
        equations = traced(q, keys, values, pages, length, gate=gate).eqns
        return [e.params["grid_mapping"].grid for e in equations if e.primitive.name == "pallas_call"]

    # rows x KV heads and 4096 / 256 segments; rows x query heads
    assert grids(1) == grids(1000) == [(6, 16), (3, 8)]


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths: list[int], dtype: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys, values, page_table, _ = random_cache(rng, [*lengths, 200], 16, 2, 16)
    q, gate = rng.normal(size=(2, 3, 6, 16))
    q, gate, keys, values = (jnp.asarray(x, dtype) for x in (q, gate, keys, values))
    arguments = (q, keys, values, page_table[:3], np.asarray(lengths, np.int32), 16)
    out, exact = decode(*arguments), whole(*arguments)
    assert_close(out, exact, ATTENTION if dtype == "float32" else SPLIT)
    assert_close(decode(*arguments, implementation="reference"), exact, ATTENTION, "reference")
    gated = decode(*arguments, gate=gate)
    assert gated.dtype == gate.dtype
    assert_close(gated, apply_gate(out, gate), 2.0**-8 if dtype == "bfloat16" else 1e-6, "gate")


def test_sizes_without_a_kernel_run_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(8)
    keys, values, page_table, _ = random_cache(rng, [30, 50], 24, 1, 16)
    arguments = (rng.normal(size=(2, 2, 16)).astype(np.float32), keys, values, page_table, np.array([30, 50], np.int32))
    dispatch._say_once.cache_clear()
    for reason, options in (
        ("page_size 24 is no power of two", {"page_size": 24}),
        ("attention_pin / attention_segment = 3 is no power of two", {"page_size": 8, "attention_pin": 192}),
    ):
        with caplog.at_level(logging.WARNING, "pallas_kernels"):
            found = decode(*arguments, **options)
        assert reason in caplog.text
        assert_same_bits(found, decode(*arguments, implementation="reference", **options))


def test_what_does_not_fit_is_refused() -> None:
    f32 = lambda *shape: jnp.zeros(shape)  # noqa: E731
    good = {"q": f32(2, 4, 16), "keys": f32(64, 2, 16), "values": f32(64, 2, 16), "page_size": 16}
    good |= {"pages": jnp.zeros((2, 3), jnp.int32), "length": jnp.zeros(2, jnp.int32)}

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            paged_attention_decode(**(good | changes))

    refused("q, keys and pages have shapes", q=f32(4, 16))
    refused("takes keys and values", keys=f32(64, 3, 16), values=f32(64, 3, 16))
    refused("takes keys and values", values=f32(64, 2, 16).astype(jnp.bfloat16))
    refused(r"pages is int32\[3, 3\]; it takes int32\[2, 3\]", pages=jnp.zeros((3, 3), jnp.int32))
    refused("length is float32", length=f32(2))
    refused("gate has shape", gate=f32(2, 2, 16))
    refused("page_size = 0", page_size=0)
    refused("attention_segment = 96", attention_segment=96)


def test_bfloat16_cache() -> None:
    rng = np.random.default_rng(0)
    keys, values, page_table, tokens = random_cache(rng, [33], 16, 1, 16)
    half = lambda x: jnp.asarray(x, jnp.bfloat16)  # noqa: E731
    q = half(rng.normal(size=(1, 4, 16)))
    out = whole(q, half(keys), half(values), page_table, np.array([33], np.int32), page_size=16)
    assert out.dtype == jnp.float32
    rounded = [np.asarray(half(x), np.float64) for x in tokens[0]]
    # softmax and its sums stay float32: only the inputs are rounded
    assert_close(out, attention_float64(np.asarray(q, np.float64), *rounded), ATTENTION)

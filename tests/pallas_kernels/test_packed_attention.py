"""Attention of packed rows over pages, by reference and kernel, against float64; and the bits that only a row's own
request decides."""

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
from pallas_kernels.paged_attention import paged_attention_packed, shapes
from pallas_kernels.segments import Segments
from tests.helpers import assert_close, assert_same_bits
from tests.pallas_kernels.attention import ATTENTION, KERNEL, SPLIT, assert_attends, attention_float64, random_cache

pytestmark = pytest.mark.usefixtures("quick_compilation")

packed = jax.jit(paged_attention_packed, static_argnames=("page_size", "implementation"))


def segments_of(start: Any, length: Any, position: Any) -> Segments:
    vectors = (start, length, position, np.zeros(len(length)))
    return Segments(*(jnp.asarray(vector, jnp.int32) for vector in vectors))


@pytest.mark.parametrize(
    ("implementation", "dtype", "dim"),
    [("reference", "float32", 12), (KERNEL, "float32", 16), (KERNEL, "bfloat16", 16)],
)
@settings(max_examples=6)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=3, max_size=3).filter(any),
    before=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    order=st.permutations(range(3)),
    seed=st.integers(0, 99),
)
def test_each_request_alone(
    implementation: str, dtype: str, dim: int, lengths: list[int], before: list[int], order: list[int], seed: int
) -> None:
    """Three query heads a KV head; NaN wherever no token is, on rows of no segment and in their gates too."""
    rng, page_size, rows = np.random.default_rng(seed), 4, 160
    total = [b + n for b, n in zip(before, lengths, strict=True)]
    keys, values, page_table, _ = random_cache(rng, [*total, 92], page_size, 2, dim)
    q = rng.normal(size=(rows, 6, dim))
    start, row, owned = np.zeros(3, np.int32), 1, np.zeros(rows, bool)
    for r in order:
        start[r] = row
        owned[row : row + lengths[r]] = True
        row += lengths[r] + 2
    q[~owned] = np.nan
    q, keys, values = (jnp.asarray(x, dtype) for x in (q, keys, values))
    segments = segments_of(start, lengths, before)
    out = packed(q, keys, values, page_table[:3], segments, page_size=page_size, implementation=implementation)
    assert out.dtype == jnp.float32
    for r in range(3):
        mine = slice(start[r], start[r] + lengths[r])
        cells = page_table[r, np.arange(total[r]) // page_size] * page_size + np.arange(total[r]) % page_size
        if lengths[r]:
            exact = attention_float64(q[mine], keys[cells], values[cells])
            assert_close(out[mine], exact, ATTENTION if dtype == "float32" else SPLIT, f"request {r}")
    assert_same_bits(out[~owned], np.zeros((int((~owned).sum()), 6, dim), np.float32), "rows of no segment")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_whatever_else_is_in_the_call(dtype: str) -> None:
    """Alone, at another start, behind its own first rows only, and with a page table four times as wide."""
    rng = np.random.default_rng(4)
    lengths, before, start = np.array([50, 1, 0, 37]), np.array([30, 64, 5, 0]), np.array([2, 60, 0, 61])
    keys, values, page_table, _ = random_cache(rng, list(lengths + before), 32, 2, 16)
    q, keys, values = (jnp.asarray(x, dtype) for x in (rng.normal(size=(100, 6, 16)), keys, values))
    attend = functools.partial(packed, keys=keys, values=values, page_size=32, implementation=KERNEL)
    together = attend(q=q, page_table=page_table, segments=segments_of(start, lengths, before))
    for r in (0, 1, 3):
        mine = slice(start[r], start[r] + lengths[r])
        moved = jnp.roll(q, -int(start[r]), axis=0)
        only = np.where(np.arange(4) == r, lengths, 0)
        alone = attend(q=moved, page_table=page_table, segments=segments_of(np.zeros(4), only, before))
        assert_same_bits(alone[: lengths[r]], together[mine], f"request {r} alone")
    wide = np.pad(page_table, ((0, 0), (0, 9)))
    assert_same_bits(attend(q=q, page_table=wide, segments=segments_of(start, lengths, before)), together, "wide")
    # in windows: rows that are cut elsewhere see the same keys in the same blocks
    first = attend(q=q, page_table=page_table, segments=segments_of(start, np.minimum(lengths, 7), before))
    rest = segments_of(start + 7, np.maximum(lengths - 7, 0), before + 7)
    rest = attend(q=q, page_table=page_table, segments=rest)
    assert_same_bits(first[2:9], together[2:9], "a first window")
    assert_same_bits(rest[9:52], together[9:52], "a second window")


def test_page_size_does_not_change_a_bit() -> None:
    """Pages smaller and larger than a block are looked up in different ways."""
    rng = np.random.default_rng(5)
    k, v = rng.normal(size=(2, 128, 2, 16)).astype(np.float32)
    q, segments = rng.normal(size=(40, 4, 16)).astype(np.float32), segments_of([0], [40], [77])
    results = []
    for page_size in (16, 128):
        order = rng.permutation(128 // page_size)
        keys, values = np.empty_like(k), np.empty_like(v)
        for page, place in enumerate(order):
            target, source = (slice(n * page_size, (n + 1) * page_size) for n in (place, page))
            keys[target], values[target] = k[source], v[source]
        table = order[None].astype(np.int32)
        results.append(packed(q, keys, values, table, segments, page_size=page_size, implementation=KERNEL))
    assert_same_bits(*results)


@pytest.mark.parametrize(
    ("name", "dtype", "implementation"),
    [
        ("27B", "bfloat16", "reference"),
        ("9B", "float32", KERNEL),
        ("27B", "bfloat16", KERNEL),
        ("397B", "bfloat16", KERNEL),
    ],
)
def test_real_sizes(name: str, dtype: str, implementation: Implementation) -> None:
    """Against float64, in windows that go on at a position, with and without the gate."""
    (shape,) = (shape for shape in shapes.SHAPES if shape.name == name)
    lengths, position = [13, 2], 70
    key = jax.random.key(0, impl="unsafe_rbg")
    *arguments, gate = shapes.packed_arguments(shape, lengths, key, position, 64, dtype)
    attend = functools.partial(paged_attention_packed, page_size=64, implementation=implementation)
    out, gated = jax.jit(lambda gate, *rest: (attend(*rest), attend(*rest, gate=gate)))(gate, *arguments)
    q, keys, values, pages, *_ = (np.asarray(x, np.float64) for x in arguments[:4])
    rows, exact = 0, []
    for r, length in enumerate(lengths):
        cells = (pages[r].astype(int)[:, None] * 64 + np.arange(64)).ravel()[: position + length]
        exact.append(attention_float64(q[rows : rows + length], keys[cells], values[cells]))
        rows += length
    exact = np.concatenate(exact)
    tolerance = SPLIT if dtype == "bfloat16" and implementation != "reference" else ATTENTION
    assert_attends(out, gated, gate, exact, tolerance)


def test_weights_keep_more_than_bfloat16() -> None:
    """Values of one sign, so that what rounded weights lose would add up."""
    rng = np.random.default_rng(6)
    q, keys, values = (jnp.asarray(rng.normal(size=(64, 1, 16)), jnp.bfloat16) for _ in range(3))
    values = 100 + values  # their steps are half a unit
    table = np.zeros((1, 1), np.int32)
    out = packed(q[:3], keys, values, table, segments_of([0], [3], [0]), page_size=64, implementation=KERNEL)
    exact = attention_float64(*(np.asarray(x, np.float64) for x in (q[:3], keys[:3], values[:3])))
    assert_close(out, exact, 100 * SPLIT)


def test_rows_behind_the_page_table_see_what_it_holds() -> None:
    rng = np.random.default_rng(7)
    keys, values, page_table, tokens = random_cache(rng, [32], 16, 1, 16)
    q = rng.normal(size=(5, 2, 16)).astype(np.float32)
    for implementation in ("reference", KERNEL):
        segments = segments_of([0], [5], [30])
        out = packed(q, keys, values, page_table, segments, page_size=16, implementation=implementation)
        for row in range(5):
            k, v = (x[: min(31 + row, 32)] for x in tokens[0])
            assert_close(out[row], attention_float64(q[row : row + 1], k, v)[0], ATTENTION, f"row {row}")


def test_sizes_without_a_kernel_run_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    rng = np.random.default_rng(8)
    keys, values, page_table, _ = random_cache(rng, [50], 24, 1, 16)
    segments = segments_of([0], [3], [20])
    dispatch._say_once.cache_clear()
    for heads, page_size, reason in (
        (2, 24, "page_size 24 is no power of two"),
        (17, 8, "17 heads over 1 KV heads are more than 16 for each"),
    ):
        arguments = (rng.normal(size=(3, heads, 16)).astype(np.float32), keys, values, page_table, segments)
        with caplog.at_level(logging.WARNING, "pallas_kernels"):
            found = packed(*arguments, page_size=page_size, implementation=KERNEL)
        assert reason in caplog.text
        assert_same_bits(found, packed(*arguments, page_size=page_size, implementation="reference"))


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    f32 = lambda *shape: jnp.zeros(shape)  # noqa: E731
    good: dict[str, Any] = {"q": f32(4, 4, 16), "keys": f32(64, 2, 16), "values": f32(64, 2, 16), "page_size": 16}
    good |= {"page_table": jnp.ones((2, 3), jnp.int32), "segments": segments_of([0, 2], [2, 2], [0, 0])}
    good |= {"implementation": "reference"}

    def refused(message: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            paged_attention_packed(**(good | changes))

    refused("takes keys and values", keys=f32(64, 3, 16), values=f32(64, 3, 16))
    refused(r"page_table is int32\[3, 3\]; it takes int32\[2, 3\]", page_table=jnp.ones((3, 3), jnp.int32))
    refused(
        r"segments.position is int32\[1\]",
        segments=Segments(*([jnp.zeros(2, jnp.int32)] * 2 + [jnp.zeros(1, jnp.int32)] * 2)),
    )
    refused("gate has shape", gate=f32(4, 2, 16))
    refused("page_size = 0", page_size=0)
    monkeypatch.setenv("GDNJAX_DEBUG", "2")
    refused("segment 1 has start 3 and length 2", segments=segments_of([0, 3], [2, 2], [0, 0]))
    refused(r"length\[1\] = 50; it takes 0 to 48", segments=segments_of([0, 2], [2, 2], [0, 48]))
    refused(r"pages\[0\]\[0\] = 0", page_table=jnp.zeros((2, 3), jnp.int32))
    paged_attention_packed(**good)

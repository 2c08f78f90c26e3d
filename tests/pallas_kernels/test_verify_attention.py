"""Attention of several rows of one request that share the read of its keys, against float64 and against rows apart."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation
from pallas_kernels.paged_attention import paged_attention_decode, shapes
from tests.helpers import assert_same_bits
from tests.pallas_kernels.attention import (
    ATTENTION,
    KERNEL,
    SPLIT,
    assert_attends,
    attention_float64,
    both,
    random_cache,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

PAGE_SIZE, DIM, ROWS = 32, 16, 4
# Four segments, one block wide up to 128 keys and two up to 256. The first request's rows lie on both sides of 128,
# where their segments differ; the second's on both sides of a block's end; the third is a padding group.
FIRST, LIVE = np.array([126, 32, 0, 200, 1]), np.array([4, 2, 0, 1, 3])
KEYS = FIRST + LIVE
attend = jax.jit(
    functools.partial(paged_attention_decode, page_size=PAGE_SIZE, attention_pin=128, attention_segment=32),
    static_argnames="implementation",
)


def lengths(live: np.ndarray, rows: int = ROWS) -> np.ndarray:
    """`[N, rows]`: what the rows of each request see, 0 for rows that are not live."""
    t = np.arange(rows)
    return np.where(t < live[:, None], FIRST[:, None] + t + 1, 0).astype(np.int32)


def random_rows(heads: int, dtype: str, rows: int = ROWS) -> tuple[Any, ...]:
    """(q `[N, rows, A, D]`, keys, values, page tables, each request's keys and values in order); NaN in q of rows that
    are not live, and in every cell that no key lies in."""
    rng = np.random.default_rng(heads)
    keys, values, table, tokens = random_cache(rng, list(np.maximum(KEYS, 1)), PAGE_SIZE, 2, DIM)
    q = rng.normal(size=(len(FIRST), rows, heads, DIM))
    q[lengths(LIVE, rows) == 0] = np.nan
    q, keys, values = (jnp.asarray(x, dtype) for x in (q, keys, values))
    exact = [tuple(np.asarray(jnp.asarray(x, dtype), np.float64) for x in pair) for pair in tokens]
    return q, keys, values, table, exact


def together(q: jax.Array, keys: jax.Array, values: jax.Array, table: Any, length: Any, **options: Any) -> jax.Array:
    """`attend` with rows by request: q `[N, T, A, D]`, length `[N, T]`."""
    flat = q.reshape(-1, *q.shape[2:])
    options = {"implementation": KERNEL, **options}
    return attend(flat, keys, values, table, jnp.asarray(length).reshape(-1), **options).reshape(q.shape)


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_row_sees_its_own_keys(dtype: str, implementation: Implementation) -> None:
    """Against float64, three query heads a KV head; rows that are not live and padding groups give zeros."""
    q, keys, values, table, tokens = random_rows(6, dtype)
    gate = jax.random.normal(jax.random.key(0), q.shape, dtype)
    length = lengths(LIVE)
    call = functools.partial(together, q, keys, values, table, length, implementation=implementation)
    out, gated = call(), call(gate=gate.reshape(-1, 6, DIM))
    live = length > 0
    exact = [
        attention_float64(q[r, t : t + 1], *(x[: length[r, t]] for x in tokens[r]))[0] for r, t in np.argwhere(live)
    ]
    tolerance = SPLIT if dtype == "bfloat16" and implementation != "reference" else ATTENTION
    assert_attends(out[live], gated[live], gate[live], np.stack(exact), tolerance)
    for rows in (out[~live], gated[~live]):
        assert not np.any(np.asarray(rows, np.float32))


@pytest.mark.parametrize(
    ("heads", "rows", "dtype"),
    [
        (8, 4, "bfloat16"),  # 16 queries of a KV head
        (12, 3, "bfloat16"),  # 18, padded to 32
        (32, 4, "bfloat16"),  # 64: two programs of two rows
        (4, 2, "float32"),
    ],
)
def test_rows_have_the_bits_that_they_have_apart(heads: int, rows: int, dtype: str) -> None:
    q, keys, values, table, _ = random_rows(heads, dtype, rows)
    length = lengths(LIVE, rows)
    apart = together(q.reshape(-1, 1, heads, DIM), keys, values, np.repeat(table, rows, axis=0), length)
    assert_same_bits(together(q, keys, values, table, length), apart.reshape(q.shape))


def test_no_bit_depends_on_other_rows_requests_or_the_page_table() -> None:
    q, keys, values, table, _ = random_rows(8, "bfloat16")
    length = lengths(LIVE)
    all_rows = together(q, keys, values, table, length)
    wide = np.pad(table, ((0, 0), (0, 9)))
    assert_same_bits(together(q, keys, values, wide, length), all_rows, "in a wide page table")
    for request in range(len(FIRST)):
        alone = np.where(np.arange(len(FIRST))[:, None] == request, length, 0)
        assert_same_bits(together(q, keys, values, table, alone)[request], all_rows[request], f"request {request}")
    backwards = together(q[:, ::-1], keys, values, table, length[:, ::-1])
    assert_same_bits(backwards[:, ::-1], all_rows, "in another order")
    one = lengths(np.minimum(LIVE, 1))
    assert_same_bits(together(q, keys, values, table, one)[:, 0], all_rows[:, 0], "first rows without the others")


@pytest.mark.parametrize(
    ("name", "rows", "dtype", "programs"),
    [
        ("0.8B", 4, "bfloat16", 3 * 2),  # requests x KV heads
        ("397B", 4, "bfloat16", 3 * 2 * 2),  # two rows a program, whose queries fill it
        ("397B", 3, "bfloat16", 3 * 3 * 2),  # three rows are not cut into two programs as full
        ("0.8B", 4, "float32", 3 * 4 * 8),  # rows x query heads
    ],
)
def test_programs(name: str, rows: int, dtype: str, programs: int) -> None:
    (shape,) = (shape for shape in shapes.SHAPES if shape.name == name)
    arguments = jax.eval_shape(
        lambda: shapes.arguments(shape, 3, jax.random.key(0), page_size=64, dtype=dtype, sharing=rows)
    )
    q, keys, values, pages, length, gate = arguments
    traced = jax.make_jaxpr(functools.partial(paged_attention_decode, page_size=64, implementation="interpret"))
    equations = traced(q, keys, values, pages, length, gate=gate).eqns
    grids = [e.params["grid_mapping"].grid for e in equations if e.primitive.name == "pallas_call"]
    assert grids == [(programs, 16), (3 * rows, shape.heads)]


def test_page_tables_that_rows_cannot_share_are_refused() -> None:
    cache = jnp.zeros((64, 2, 16))
    for tables in (0, 4, 12):
        with pytest.raises(ValueError, match=rf"pages is int32\[{tables}, 3\]; it takes int32\[6, 3\], or fewer"):
            paged_attention_decode(
                jnp.zeros((6, 4, 16)), cache, cache, jnp.zeros((tables, 3), jnp.int32), jnp.zeros(6, jnp.int32), 16
            )

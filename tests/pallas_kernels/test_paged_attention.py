"""Grouped-query attention over whole sequences and over pages, against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.reference import causal_attention, paged_attention_decode, paged_attention_packed
from pallas_kernels.segments import Segments
from tests.helpers import assert_close, assert_same_bits

ATTENTION = 2e-6

decode = jax.jit(paged_attention_decode, static_argnames="page_size")
packed = jax.jit(paged_attention_packed, static_argnames="page_size")


def attention_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q `[t, A, D]` at the last t positions of k, v `[s, G, D]` -> `[t, A, D]`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("tad,sad->ats", q, k) / np.sqrt(q.shape[-1])
    position = np.arange(len(k) - len(q), len(k))
    scores = np.where(np.arange(len(k)) <= position[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("ats,sad->tad", weights / weights.sum(-1, keepdims=True), v)


def random_cache(rng: np.random.Generator, lengths: list[int], page_size: int, groups: int, dim: int):
    """Keys and values of requests in shuffled pages, NaN in every cell that no token owns (page 0 included)."""
    pages = -(-max(lengths) // page_size)
    order = 1 + rng.permutation(len(lengths) * pages)
    page_table = np.zeros((len(lengths), pages), np.int32)
    keys, values = np.full((2, (1 + len(order)) * page_size, groups, dim), np.nan, np.float32)
    tokens = []
    for r, length in enumerate(lengths):
        used = -(-length // page_size)
        page_table[r, :used] = order[r * pages : r * pages + used]
        k, v = rng.normal(size=(2, length, groups, dim)).astype(np.float32)
        slots = page_table[r, np.arange(length) // page_size] * page_size + np.arange(length) % page_size
        keys[slots], values[slots] = k, v
        tokens.append((k, v))
    return keys, values, page_table, tokens


@pytest.mark.parametrize(("heads", "groups", "dim"), [(2, 2, 8), (4, 2, 12), (3, 1, 20), (8, 2, 32)])
def test_whole_sequences(heads: int, groups: int, dim: int) -> None:
    rng = np.random.default_rng(heads)
    q = rng.normal(size=(2, 21, heads, dim)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, 21, groups, dim)).astype(np.float32)
    out = causal_attention(q, k, v)
    assert out.dtype == jnp.float32
    for b in range(2):
        assert_close(out[b], attention_float64(q[b], k[b], v[b]), ATTENTION)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(2, 2, 8), (4, 2, 12), (3, 1, 20), (8, 2, 32)])
def test_decode(heads: int, groups: int, dim: int, page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    lengths = [1, 7, 30, 16]
    keys, values, page_table, tokens = random_cache(rng, lengths, page_size, groups, dim)
    q = rng.normal(size=(6, heads, dim)).astype(np.float32)
    # rows in another order than requests, rows 1 and 4 are padding
    request, length = np.array([2, 0, 0, 3, 0, 1]), np.array([30, 0, 1, 16, 0, 7], np.int32)
    out = decode(q, keys, values, page_table[request], length, page_size=page_size)
    for row, r in enumerate(request):
        if length[row]:
            assert_close(out[row], attention_float64(q[row : row + 1], *tokens[r])[0], ATTENTION, f"row {row}")
        else:
            assert_same_bits(out[row], np.zeros((heads, dim), np.float32), f"padding row {row}")


def test_decode_row_does_not_depend_on_its_batch() -> None:
    rng = np.random.default_rng(3)
    keys, values, page_table, _ = random_cache(rng, [13, 5, 20, 9, 1, 2, 17, 8], 4, 2, 12)
    length = np.array([13, 5, 20, 9, 1, 2, 17, 8], np.int32)
    q = rng.normal(size=(8, 6, 12)).astype(np.float32)
    together = decode(q, keys, values, page_table, length, page_size=4)
    for row in range(8):
        alone = decode(q, keys, values, page_table, np.where(np.arange(8) == row, length, 0), page_size=4)
        assert_same_bits(alone[row], together[row], f"row {row}")


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=3, max_size=3).filter(any),
    before=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    order=st.permutations(range(3)),
    seed=st.integers(0, 99),
)
def test_packed_is_each_request_alone(lengths: list[int], before: list[int], order: list[int], seed: int) -> None:
    rng, page_size, rows = np.random.default_rng(seed), 4, 220
    total = [b + n for b, n in zip(before, lengths, strict=True)]
    keys, values, page_table, tokens = random_cache(rng, [*total, 112], page_size, 2, 12)
    q = rng.normal(size=(rows, 4, 12)).astype(np.float32)
    start, row = np.zeros(3, np.int32), 1
    for r in order:
        start[r] = row
        row += lengths[r] + 2
    vectors = (start, np.array(lengths, np.int32), np.array(before, np.int32), np.zeros(3, np.int32))
    out = packed(q, keys, values, page_table[:3], Segments(*map(jnp.asarray, vectors)), page_size=page_size)
    owned = np.zeros(rows, bool)
    for r in range(3):
        mine = slice(start[r], start[r] + lengths[r])
        owned[mine] = True
        if lengths[r]:
            assert_close(out[mine], attention_float64(q[mine], *tokens[r]), ATTENTION, f"request {r}")
    assert_same_bits(out[~owned], np.zeros((int((~owned).sum()), 4, 12), np.float32), "rows of no segment")


def test_bfloat16_cache() -> None:
    rng = np.random.default_rng(0)
    keys, values, page_table, tokens = random_cache(rng, [33], 16, 1, 16)
    half = lambda x: jnp.asarray(x, jnp.bfloat16)  # noqa: E731
    q = half(rng.normal(size=(1, 4, 16)))
    out = decode(q, half(keys), half(values), page_table, np.array([33], np.int32), page_size=16)
    assert out.dtype == jnp.float32
    rounded = [np.asarray(half(x), np.float64) for x in tokens[0]]
    # softmax and its sums stay float32: only the inputs are rounded
    assert_close(out, attention_float64(np.asarray(q, np.float64), *rounded), ATTENTION)

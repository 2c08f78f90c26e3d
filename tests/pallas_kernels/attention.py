"""Attention in float64, a cache full of NaN where no token is, and what the tests of attention compare within."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation
from tests.helpers import assert_close, assert_rounded_once

ATTENTION = 2e-6
SPLIT = 1e-5  # of the kernels on bfloat16, whose weights have 17 bits

KERNEL: Implementation = "pallas" if jax.default_backend() != "cpu" else "interpret"
both = pytest.mark.parametrize("implementation", ["reference", KERNEL])


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


def assert_attends(out: jax.Array, gated: jax.Array, gate: jax.Array, exact: np.ndarray, tolerance: float) -> None:
    """The output without a gate and with one, against float64: gated it is rounded once, to the gate's dtype."""
    assert out.dtype == jnp.float32
    assert_close(out, exact, tolerance)
    exact = jnp.asarray(exact / (1 + np.exp(-np.asarray(gate, np.float64))), jnp.float32)
    assert gated.dtype == gate.dtype
    if gate.dtype == jnp.bfloat16:
        assert_rounded_once(gated, exact, tolerance)
        assert_rounded_once(gated, out * jax.nn.sigmoid(gate.astype(jnp.float32)), 1e-7, "the gate")
    else:
        assert_close(gated, exact, tolerance)

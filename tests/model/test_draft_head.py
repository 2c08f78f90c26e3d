"""The fp8 copy of the vocabulary matrix: its rounding, what its product makes of it, and that nothing else reads it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gdnjax.config import from_preset
from gdnjax.loading import load
from gdnjax.model.draft import draft, draft_logits
from gdnjax.state import state_shapes
from gdnjax.weights.declaration import abstract_params
from gdnjax.weights.draft_head import DRAFT_HEAD, abstract_draft_head, fp8_rows, with_draft_head
from gdnjax.weights.packing import pack
from tests.generation.small import SMALL
from tests.helpers import assert_same_bits, decode_batch

FP8 = ml_dtypes.float8_e4m3fn
CONFIG = SMALL.replace(mtp_num_hidden_layers=1, draft_head="fp8")

run_draft_logits = jax.jit(draft_logits, static_argnames="config")


def codes() -> np.ndarray:
    """All finite fp8 numbers, `[254]`."""
    every = np.arange(256, dtype=np.uint8).view(FP8)
    return every[np.isfinite(every.astype(np.float32))]


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_rounded_once(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 64)) * 2.0 ** rng.integers(-60, 60, (40, 1))
    rows[0], rows[1, 1:], rows[2] = 0.0, 0.0, 2.0**-120 * np.sign(rows[2])
    rows[3, 0] = 448.0 * np.abs(rows[3]).max()  # the smallest lie beneath fp8's normal numbers
    rows[4, :3], rows[4, 3:] = [448.0, -448.0, 232.0], 0.001
    rows[5] = np.linspace(-3.38e38, 3.38e38, 64)
    matrix = jnp.asarray(rows, dtype)
    exact = np.asarray(matrix, np.float64)
    found = fp8_rows(matrix)
    weight, scale = np.asarray(found["weight"]), np.asarray(found["scale"], np.float64)
    assert weight.dtype == FP8 and found["scale"].dtype == jnp.float32

    assert (np.frexp(scale)[0] == 0.5).all() and (scale >= 2.0**-100).all(), "scales are normal powers of two"
    nearest = (exact / scale[:, None]).astype(np.float32).astype(FP8)
    np.testing.assert_array_equal(weight.view(np.uint8), nearest.view(np.uint8))
    largest = np.abs(weight.astype(np.float32)).max(axis=1)
    ordinary = np.arange(40) > 2
    assert (largest[ordinary] >= 224).all() and (largest <= 448).all()
    assert not weight[0].astype(np.float32).any()
    error = np.abs(weight.astype(np.float64) * scale[:, None] - exact)
    assert (error <= np.maximum(2.0**-4 * np.abs(exact), 2.0**-10 * scale[:, None])).all()


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 64])
def test_every_fp8_number_in_the_product(rows: int, dtype: str) -> None:
    # On any device: some have fp8 of their own in which the same bits are other numbers.
    finite = codes()
    matrix = np.resize(finite, (256, 128))
    assert set(matrix[:, 5].view(np.uint8)) == set(finite.view(np.uint8)[5 % 2 :: 2])
    scale = (2.0 ** np.random.default_rng(0).integers(-20, 20, 256)).astype(np.float32)
    params = {DRAFT_HEAD: {"weight": jnp.asarray(matrix), "scale": jnp.asarray(scale)}}
    hidden = jnp.eye(128, dtype=dtype)[4 : 4 + rows]
    logits = run_draft_logits(params, CONFIG, hidden)
    assert logits.dtype == jnp.float32
    wanted = matrix.astype(np.float32).T[4 : 4 + rows] * scale
    np.testing.assert_array_equal(np.asarray(logits), wanted)


@pytest.mark.skipif(jax.default_backend() == "cpu", reason="a CPU converts the whole matrix first")
@pytest.mark.parametrize("rows", [1, 4, 64])
def test_no_copy_of_the_matrix_is_written(rows: int) -> None:
    config = from_preset("0.8b", draft_head="fp8")
    copy = abstract_draft_head(config)
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.bfloat16)

    def choose(copy: Any, hidden: jax.Array) -> jax.Array:
        return jnp.argmax(draft_logits({DRAFT_HEAD: copy}, config, hidden), axis=-1)

    memory = jax.jit(choose).lower(copy, hidden).compile().memory_analysis()
    logits = 4 * rows * config.vocab_size
    assert memory.temp_size_in_bytes < logits + copy["weight"].size / 4


def test_it_is_made_of_the_head_where_weights_are_loaded() -> None:
    model = load("tiny", draft_head="fp8")
    wanted = fp8_rows(model.params["model"]["embed_tokens"]["weight"])
    for params in (model.params, pack(model.params, model.config)):
        for name in ("weight", "scale"):
            assert_same_bits(params[DRAFT_HEAD][name], wanted[name], name)
    shapes = abstract_draft_head(model.config)
    assert {n: (s.shape, s.dtype) for n, s in shapes.items()} == {n: (x.shape, x.dtype) for n, x in wanted.items()}

    plain = load("tiny")
    assert DRAFT_HEAD not in plain.params and abstract_draft_head(plain.config) == {}
    assert model.parameter_count == plain.parameter_count
    # A head that is no embedding.
    untied = {**plain.params, "lm_head": {"weight": jnp.ones((4, 8))}}
    np.testing.assert_array_equal(with_draft_head(untied, model.config)[DRAFT_HEAD]["scale"], np.full(4, 2.0**-8))


def test_the_config_says_which_head() -> None:
    weights = CONFIG.replace(draft_head="weights")
    rng = np.random.default_rng(0)
    matrix, hidden = rng.normal(size=(2, 64, 16)).astype(np.float32)
    params = {"lm_head": {"weight": jnp.asarray(matrix)}}
    both = with_draft_head(params, CONFIG)
    logits = draft_logits(both, weights, hidden)
    assert_same_bits(logits, draft_logits(params, weights, hidden))
    found, largest = draft_logits(both, CONFIG, hidden), np.abs(hidden) @ np.abs(matrix).T
    assert np.abs(found - logits).max() > 0 and (np.abs(found - logits) <= 2.0**-4 * largest).all()

    config = CONFIG.replace(draft_kv=True)
    arguments = abstract_params(config), state_shapes(config), decode_batch({0: 1}, 1), hidden[:1, :1] * jnp.ones(48)
    with pytest.raises(ValueError, match=r"no fp8 copy of the vocabulary matrix.*with_draft_head.*draft_head='fp8'"):
        jax.eval_shape(functools.partial(draft, count=1), *arguments)

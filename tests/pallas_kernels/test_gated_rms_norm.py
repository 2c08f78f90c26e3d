"""RMS norms against Hugging Face's, in float32 and bfloat16; the gated one by its kernel too."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdnjax.config.presets import from_preset
from pallas_kernels.columns import Columns
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_rms_norm import gated_rms_norm, shapes
from pallas_kernels.gated_rms_norm.reference import rms_norm
from tests.helpers import assert_close, assert_same_bits, columns_of, components

EPS = 1e-6
KERNEL: Implementation = "pallas" if jax.default_backend() != "cpu" else "interpret"
both = pytest.mark.parametrize("implementation", ["reference", KERNEL])


@functools.partial(jax.jit, static_argnames=("implementation", "form"))
def gated(x, gate, weight, implementation="reference", form="columns"):
    """The operation on x and a gate of its shape, which it gets as columns of packed rows or as an array."""
    gate = jnp.reshape(gate, (*x.shape[:-2], -1))
    (gate,) = columns_of(gate) if form == "columns" else (gate,)
    return gated_rms_norm(x, gate, weight, EPS, implementation)


def bf16_steps(x: np.ndarray) -> np.ndarray:
    """bfloat16 numbers as integers that count them, so that neighbours differ by 1."""
    bits = np.asarray(x, np.float32).view(np.int32)
    assert (bits & 0xFFFF == 0).all(), "no bfloat16 numbers"
    bits = bits >> 16
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


@both
def test_float32(implementation: Implementation) -> None:
    c = components()
    assert_close(rms_norm(c["rmsnorm.f32.x"], c["rmsnorm.f32.weight"], EPS), c["rmsnorm.f32.y"], 1e-6)
    x, gate, weight = (c[f"rmsnorm_gated.f32.{name}"] for name in ("x", "gate", "weight"))
    assert_close(gated(x, gate, weight, implementation), c["rmsnorm_gated.f32.y"], 1e-6)


@pytest.mark.parametrize("name", ["rmsnorm", "rmsnorm_gated"])
def test_bfloat16_within_one_step(name: str) -> None:
    inputs = {
        k: jnp.asarray(v, jnp.bfloat16)
        for k in ("x", "gate")
        if (v := components().get(f"{name}.bf16.{k}")) is not None
    }
    weight = jnp.asarray(components()[f"{name}.bf16.weight"])
    if name == "rmsnorm":
        y = rms_norm(inputs["x"], weight.astype(jnp.bfloat16), EPS)
    else:
        y = gated(inputs["x"], inputs["gate"], weight)
    assert y.dtype == jnp.bfloat16
    steps = np.abs(bf16_steps(np.asarray(y, np.float32)) - bf16_steps(components()[f"{name}.bf16.y"]))
    print(f"{name}: {(steps > 0).sum()} of {steps.size} elements are one step off")
    assert steps.max() <= 1


def test_zero_weight_is_the_plain_norm() -> None:
    x = np.random.default_rng(0).normal(size=(3, 5, 7)).astype(np.float32)
    plain = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    assert_close(rms_norm(x, jnp.zeros(7), EPS), plain, 1e-6)
    assert_close(rms_norm(x, jnp.ones(7), EPS), 2 * plain, 1e-6)
    # the gated norm's weight is plain: 1 is neutral, and silu(1) scales
    assert_close(gated(x, jnp.ones_like(x), jnp.ones(7)), plain / (1 + np.exp(-1)), 1e-6)
    assert_close(gated(x, x, jnp.zeros(7)), np.zeros_like(x), 0.0)


@both
def test_eps_counts_for_small_inputs(implementation: Implementation) -> None:
    # The rule's output is often this small: another eps would show in every logit.
    x = np.full((1, 8), 1e-3, np.float32)
    expected = 1e-3 / np.sqrt(1e-6 + EPS)
    assert_close(rms_norm(x, jnp.zeros(8), EPS), np.full((1, 8), expected), 1e-6)
    gate = np.full((1, 8), 30.0, np.float32)  # silu(30) = 30
    assert_close(gated(x, gate, jnp.ones(8), implementation), np.full((1, 8), 30 * expected), 3e-5)


def gated_float64(x: np.ndarray, gate: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x, gate, weight = (np.asarray(a, np.float64) for a in (x, gate, weight))
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight * gate / (1 + np.exp(-gate))


@both
@settings(max_examples=12)
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 9),
    dim=st.sampled_from([1, 8, 64, 128, 256, 24]),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    gate_scale=st.sampled_from([1.0, 50.0]),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
def test_any_shape_against_float64(
    implementation: Implementation, rows: int, heads: int, dim: int, scale: float, gate_scale: float, dtype: jnp.dtype
) -> None:
    rng = np.random.default_rng(heads)
    x = (scale * rng.normal(size=(rows, heads, dim))).astype(dtype)
    gate = (gate_scale * rng.normal(size=x.shape)).astype(dtype)
    weight = rng.normal(size=dim).astype(np.float32)
    y = gated(x, gate, weight, implementation)
    assert y.shape == x.shape and y.dtype == dtype
    exact = gated_float64(x, gate, weight, EPS)
    relative = 4e-6 if dtype == jnp.float32 else 2.0**-8 + 4e-6
    assert (np.abs(np.asarray(y, np.float64) - exact) <= relative * np.abs(exact) + 1e-30).all()


@both
def test_row_does_not_depend_on_its_batch(implementation: Implementation) -> None:
    # The same compiled program of 64 rows, and programs of 8 rows and of one: heads are cut, rows never.
    rng = np.random.default_rng(0)
    x, gate = rng.normal(size=(2, 64, 6, 64)).astype(jnp.bfloat16)
    weight = rng.normal(size=64).astype(np.float32)
    together = np.asarray(gated(x, gate, weight, implementation))
    assert_same_bits(gated(x, gate, weight, implementation, form="array"), together, "a gate of its own")
    for row in (0, 5, 63):
        others = np.arange(64) != row
        noise = np.where(others[:, None, None], np.nan, x).astype(x.dtype)
        assert_same_bits(np.asarray(gated(noise, gate, weight, implementation))[row], together[row])
        if implementation != "reference":
            for some in (slice(row, row + 1), slice(row // 8 * 8, row // 8 * 8 + 8)):
                found = np.asarray(gated(x[some], gate[some], weight, implementation))
                assert_same_bits(found[row - some.start], together[row], f"row {row} of {some}")


def test_what_does_not_fit_is_refused() -> None:
    x, gate, weight = np.ones((2, 3, 8), np.float32), np.ones((2, 24), np.float32), np.ones(8, np.float32)
    for wrong in (
        dict(gate=gate[:1]),
        dict(gate=x),
        dict(gate=Columns(gate, 0, 16)),
        dict(weight=weight[:4]),
        dict(weight=x[0]),
        dict(x=x[0, 0], gate=gate[0]),
    ):
        with pytest.raises(ValueError, match=r"gate .* take"):
            gated_rms_norm(**{**dict(x=x, gate=gate, weight=weight, eps=EPS), **wrong})


def test_shapes_of_the_benchmarks() -> None:
    for shape in shapes.SHAPES:
        if shape.name != "397B":
            c = from_preset(shape.name.lower())
            assert (shape.heads, shape.dim) == (c.linear_num_value_heads, c.linear_value_head_dim), shape.name
            # z stands behind qkv
            assert shape.first == c.conv_channels
    x, gate, weight = jax.jit(lambda key: shapes.arguments(shapes.SHAPES[-1], 3, key))(jax.random.key(1))
    y = jax.jit(gated_rms_norm, static_argnames=("eps", "implementation"))(x, gate, weight, EPS, KERNEL)
    exact = gated_float64(x, gate.value().reshape(x.shape), weight, EPS)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= 2.0**-7 * np.abs(exact)).all()
    assert shapes.bytes_moved(shapes.SHAPES[0], 64) == 3 * 64 * 2048 * 2

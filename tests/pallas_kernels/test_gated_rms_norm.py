"""RMS norms against Hugging Face's, in float32 and bfloat16."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_rms_norm.reference import gated_rms_norm, rms_norm
from tests.helpers import assert_close, components

EPS = 1e-6


def bf16_steps(x: np.ndarray) -> np.ndarray:
    """bfloat16 numbers as integers that count them, so that neighbours differ by 1."""
    bits = np.asarray(x, np.float32).view(np.int32)
    assert (bits & 0xFFFF == 0).all(), "no bfloat16 numbers"
    bits = bits >> 16
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def test_float32() -> None:
    c = components()
    assert_close(rms_norm(c["rmsnorm.f32.x"], c["rmsnorm.f32.weight"], EPS), c["rmsnorm.f32.y"], 1e-6)
    x, gate, weight = (c[f"rmsnorm_gated.f32.{name}"] for name in ("x", "gate", "weight"))
    assert_close(gated_rms_norm(x, gate, weight, EPS), c["rmsnorm_gated.f32.y"], 1e-6)


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
        y = gated_rms_norm(inputs["x"], inputs["gate"], weight, EPS)
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
    assert_close(gated_rms_norm(x, jnp.ones_like(x), jnp.ones(7), EPS), plain / (1 + np.exp(-1)), 1e-6)
    assert_close(gated_rms_norm(x, x, jnp.zeros(7), EPS), np.zeros_like(x), 0.0)


def test_eps_counts_for_small_inputs() -> None:
    # The rule's output is often this small: another eps would show in every logit.
    x = np.full((1, 8), 1e-3, np.float32)
    expected = 1e-3 / np.sqrt(1e-6 + EPS)
    assert_close(rms_norm(x, jnp.zeros(8), EPS), np.full((1, 8), expected), 1e-6)
    gate = np.full((1, 8), 30.0, np.float32)  # silu(30) = 30
    assert_close(gated_rms_norm(x, gate, jnp.ones(8), EPS), np.full((1, 8), 30 * expected), 3e-5)

"""Rope tables, norm and rope of q and k, and the write into the paged cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_prologue import reference
from pallas_kernels.attention_prologue.reference import (
    inverse_frequencies,
    norm_and_rope,
    normalize_heads,
    rope_table,
    rotate,
    write_kv,
)
from tests.helpers import assert_close, assert_same_bits, components

ROPE = 1e-6
POSITIONS = np.array([0, 4095, 262143], np.int32)
TABLES = ("real", "small")  # head_dim 256, theta 1e7, sections 11, 11, 10; and a small one


def table(name: str) -> tuple[int, int, float, tuple[int, int, int]]:
    """head_dim, rotary_dim, theta and sections of a golden table."""
    head_dim, factor, theta, *sections = components()[f"mrope.{name}_cfg"]
    return int(head_dim), int(head_dim * factor), float(theta), tuple(int(s) for s in sections)


@pytest.mark.parametrize("name", TABLES)
def test_inverse_frequencies(name: str) -> None:
    _, rotary_dim, theta, _ = table(name)
    ours, theirs = inverse_frequencies(theta, rotary_dim), components()[f"mrope.{name}_inv_freq"]
    assert ours.dtype == np.float32
    # Ours are rounded once, from float64; Hugging Face computes them in float32, at most one step off.
    exact = theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    assert (np.abs(ours - exact) <= 0.501 * np.spacing(ours)).all()
    assert (np.abs(ours - theirs) <= np.spacing(theirs)).all()


@pytest.mark.parametrize("kind", ["text", "grid"])
@pytest.mark.parametrize("name", TABLES)
def test_golden_tables_and_rotations(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    c, (_, rotary_dim, theta, sections) = components(), table(name)
    # One step of a frequency moves the angle at position 2,700 by 1e-4: compare at the same frequencies.
    monkeypatch.setattr(reference, "inverse_frequencies", lambda *_: c[f"mrope.{name}_inv_freq"])
    position = jnp.asarray(c[f"mrope.{name}_{kind}.position_ids"], jnp.int32)
    cos, sin = rope_table(position, theta, rotary_dim, sections)
    half = rotary_dim // 2
    assert cos.dtype == sin.dtype == jnp.float32
    for ours, which in ((cos, "cos"), (sin, "sin")):
        theirs = c[f"mrope.{name}_{kind}.{which}"]
        assert_close(ours, theirs[..., :half], ROPE, which)
        assert_close(ours, theirs[..., half:], ROPE, which)
    for head in "qk":
        x = c[f"mrope.{name}_{head}"].swapaxes(1, 2)
        turned = rotate(jnp.asarray(x), cos, sin)
        assert_close(turned.swapaxes(1, 2), c[f"mrope.{name}_{kind}.{head}_out"], 4 * ROPE, f"{head}, every head")
        assert_same_bits(turned[..., rotary_dim:], x[..., rotary_dim:], f"{head} behind the rotary part")


@pytest.mark.parametrize("name", TABLES)
def test_text_needs_no_sections(name: str) -> None:
    _, rotary_dim, theta, sections = table(name)
    plain = rope_table(jnp.asarray(POSITIONS), theta, rotary_dim)
    three = rope_table(jnp.asarray(np.stack([POSITIONS] * 3)), theta, rotary_dim, sections)
    for one, other in zip(plain, three, strict=True):
        assert_same_bits(one, other)


def test_rows_interleave_as_published() -> None:
    # [11, 11, 10] over 32 frequencies: height at 1, 4, .., 31, width at 2, 5, .., 29, time elsewhere.
    position = jnp.asarray([[0], [1], [2]], jnp.int32)
    cos, sin = rope_table(position, 1e7, 64, (11, 11, 10))
    angle = np.arctan2(sin[0], cos[0]) / inverse_frequencies(1e7, 64)
    row = np.zeros(32)
    row[1:32:3], row[2:30:3] = 1, 2
    assert_close(angle, row, 1e-5)


def rope_error(theta: float, rotary_dim: int) -> float:
    """Largest error of the table at far positions, against float64 at the float32 angle."""
    exact = (1.0 / theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)).astype(np.float32)
    angle = (POSITIONS[:, None].astype(np.float32) * exact).astype(np.float64)
    cos, sin = jax.jit(lambda position: rope_table(position, theta, rotary_dim))(POSITIONS)
    return max(np.abs(cos - np.cos(angle)).max(), np.abs(sin - np.sin(angle)).max())


@pytest.mark.parametrize(("theta", "rotary_dim"), [(1e7, 64), (1e4, 16), (1e6, 12)])
def test_far_positions(theta: float, rotary_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rope_error(theta, rotary_dim) <= ROPE

    # The same check must notice frequencies in bfloat16.
    def rounded(theta: float, rotary_dim: int) -> np.ndarray:
        return inverse_frequencies(theta, rotary_dim).astype(jnp.bfloat16).astype(np.float32)

    monkeypatch.setattr(reference, "inverse_frequencies", rounded)
    assert rope_error(theta, rotary_dim) > 0.1


@pytest.mark.parametrize(("heads", "groups", "dim", "rotary_dim"), [(4, 1, 32, 16), (6, 2, 20, 6), (3, 3, 12, 12)])
def test_norm_and_rope(heads: int, groups: int, dim: int, rotary_dim: int) -> None:
    rng = np.random.default_rng(dim)
    q, k = rng.normal(size=(5, heads, dim)), rng.normal(size=(5, groups, dim))
    q_weight, k_weight = rng.normal(size=(2, dim))
    position = np.array([0, 1, 7, 100, 3])
    cos, sin = rope_table(jnp.asarray(position, jnp.int32), 1e4, rotary_dim)
    angle = position[:, None] / 1e4 ** (np.arange(0, rotary_dim, 2) / rotary_dim)

    def expected(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + weight)
        half = rotary_dim // 2
        turned = (x[..., :half] + 1j * x[..., half:rotary_dim]) * np.exp(1j * angle)[:, None]
        return np.concatenate([turned.real, turned.imag, x[..., rotary_dim:]], -1)

    f32 = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    found_q, found_k = norm_and_rope(f32(q), f32(k), f32(q_weight), f32(k_weight), cos, sin, 1e-6)
    assert_close(found_q, expected(q, q_weight), 2e-5, "q")
    assert_close(found_k, expected(k, k_weight), 2e-5, "k")

    # what is not turned is the plain norm, bit for bit
    assert_same_bits(found_q[..., rotary_dim:], normalize_heads(f32(q), f32(q_weight), 1e-6)[..., rotary_dim:])
    # in bfloat16 everything up to the one rounding is float32
    half = jnp.bfloat16
    rounded, _ = norm_and_rope(f32(q).astype(half), f32(k), f32(q_weight), f32(k_weight), cos, sin, 1e-6)
    whole, _ = norm_and_rope(
        f32(q).astype(half).astype(jnp.float32), f32(k), f32(q_weight), f32(k_weight), cos, sin, 1e-6
    )
    assert rounded.dtype == half
    assert_same_bits(rounded, whole.astype(half))


def test_write_kv_touches_only_its_slots() -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 40, 2, 6)).astype(np.float32)
    k, v = rng.normal(size=(2, 5, 2, 6)).astype(np.float32)
    slot = jnp.asarray([17, -1, 39, 8, -1], jnp.int32)
    new_keys, new_values = jax.jit(write_kv)(keys, values, k, v, slot)
    for new, old, rows in ((new_keys, keys, k), (new_values, values, v)):
        expected = old.copy()
        expected[[17, 39, 8]] = rows[[0, 2, 3]]
        assert_same_bits(new, expected)

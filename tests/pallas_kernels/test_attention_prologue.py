"""Rope tables, and the prologue by reference and kernels: whole, in halves, and half by half in one launch."""

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
from pallas_kernels.attention_prologue import attention_prologue, norm_and_rope, reference, shapes, write_kv
from pallas_kernels.attention_prologue.reference import (
    inverse_frequencies,
    normalize_heads,
    rope_table,
    rotate,
    split_heads,
)
from pallas_kernels.dispatch import Implementation
from tests.helpers import assert_close, assert_rounded_once, assert_same_bits, components

ROPE = 1e-6
NORM = 1e-5  # of normed and turned float32 heads, against float64
EPS = 1e-6
POSITIONS = np.array([0, 4095, 262143], np.int32)
TABLES = ("real", "small")  # head_dim 256, theta 1e7, sections 11, 11, 10; and a small one

KERNEL: Implementation = "pallas" if jax.default_backend() != "cpu" else "interpret"
both = pytest.mark.parametrize("implementation", ["reference", KERNEL])
SHAPES = {shape.name: shape for shape in shapes.SHAPES}

random_key = functools.partial(jax.random.key, impl="unsafe_rbg")  # compiles in half the time
fused = jax.jit(functools.partial(attention_prologue, eps=EPS), static_argnames="implementation")
jit_norm_and_rope = jax.jit(norm_and_rope, static_argnames=("eps", "implementation"))
jit_write_kv = jax.jit(write_kv, static_argnames="implementation")


@functools.partial(jax.jit, static_argnames="implementation")
def unfused(projections, q_weight, k_weight, cos, sin, slot, keys, values, implementation):
    """The prologue as its two halves."""
    q, gate, k, v = split_heads(projections, *keys.shape[1:])
    q, k = norm_and_rope(q, k, q_weight, k_weight, cos, sin, EPS, implementation)
    return q, gate, *write_kv(keys, values, k, v, slot, implementation)


def normed_and_turned(x: Any, weight: Any, cos: Any, sin: Any) -> np.ndarray:
    """Norm and rope of heads `[R, heads, D]` in float64, by complex numbers."""
    x, weight, cos, sin = (np.asarray(array, np.float64) for array in (x, weight, cos, sin))
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * (1 + weight)
    half = cos.shape[-1]
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * (cos + 1j * sin)[:, None]
    return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], -1)


def assert_within_a_step(actual: jax.Array, desired: jax.Array, what: str) -> None:
    """One step of the dtype apart at most, or what float32 leaves of a difference of two larger numbers."""
    a, d = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    # frexp: |d| = m 2^e with m in [0.5, 1), so a step is 2^e eps / 2
    step = np.ldexp(float(jnp.finfo(desired.dtype).eps) / 2, np.frexp(d)[1])
    assert actual.dtype == desired.dtype
    assert (np.abs(a - d) <= step + 2e-6).all(), f"{what}: off by {np.abs(a - d).max():.3g}"


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


@both
@pytest.mark.parametrize(("heads", "groups", "dim", "rotary_dim"), [(4, 1, 32, 16), (6, 2, 20, 6), (3, 3, 16, 16)])
def test_norm_and_rope(heads: int, groups: int, dim: int, rotary_dim: int, implementation: Implementation) -> None:
    rng = np.random.default_rng(dim)
    q, k = (rng.normal(size=(5, n, dim)).astype(np.float32) for n in (heads, groups))
    q_weight, k_weight = rng.normal(size=(2, dim)).astype(np.float32)
    cos, sin = rope_table(jnp.asarray([0, 1, 7, 100, 3], jnp.int32), 1e4, rotary_dim)
    turn = functools.partial(jit_norm_and_rope, eps=EPS, implementation=implementation)
    found_q, found_k = turn(q, k, q_weight, k_weight, cos, sin)
    assert_close(found_q, normed_and_turned(q, q_weight, cos, sin), NORM, "q")
    assert_close(found_k, normed_and_turned(k, k_weight, cos, sin), NORM, "k")

    # in bfloat16 everything up to the one rounding is float32
    half = jnp.bfloat16
    rounded, _ = turn(jnp.asarray(q, half), jnp.asarray(k, half), q_weight, k_weight, cos, sin)
    whole, _ = turn(jnp.asarray(q, half).astype(jnp.float32), k, q_weight, k_weight, cos, sin)
    assert rounded.dtype == half
    assert_same_bits(rounded, whole.astype(half))


@both
@pytest.mark.parametrize("dim", [6, 16])
def test_write_kv_touches_only_its_slots(dim: int, implementation: Implementation) -> None:
    rng = np.random.default_rng(0)
    keys, values = np.full((2, 40, 2, dim), np.nan, np.float32)
    k, v = rng.normal(size=(2, 6, 2, dim)).astype(np.float32)
    # -1 is padding; a slot behind the end is nobody's
    slot = np.array([17, -1, 39, 8, -1, 40], np.int32)
    new_keys, new_values = jit_write_kv(keys, values, k, v, slot, implementation=implementation)
    for new, old, rows in ((new_keys, keys, k), (new_values, values, v)):
        expected = old.copy()
        expected[[17, 39, 8]] = rows[[0, 2, 3]]
        assert_same_bits(new, expected)


@both
@pytest.mark.parametrize(("name", "dtype"), [("27B", "bfloat16"), ("397B", "float32"), ("tiny", "float32")])
def test_real_sizes(name: str, dtype: str, implementation: Implementation) -> None:
    """Every head of every row against float64; slots that no row owns keep what they hold, NaN too."""
    packed, q_weight, k_weight, cos, sin, slot, keys, values = shapes.arguments(SHAPES[name], 3, random_key(1), dtype)
    slot = slot.at[1].set(-1)
    keys, values = keys.at[5].set(jnp.nan), values.at[5].set(jnp.nan)
    arguments = ([packed], q_weight, k_weight, cos, sin, slot, keys, values)
    q, gate, new_keys, new_values = fused(*arguments, implementation=implementation)
    raw_q, raw_gate, raw_k, raw_v = split_heads([packed], *keys.shape[1:])
    assert_same_bits(gate, raw_gate, "gate")
    live = np.array([0, 2])
    expected_keys, expected_values = np.array(keys), np.array(values)
    expected_values[slot[live]] = raw_v[live]
    assert_same_bits(new_values, expected_values, "values")
    expected_keys[slot[live]] = new_keys[slot[live]]
    assert_same_bits(new_keys, expected_keys, "keys of other slots")
    check = functools.partial(assert_rounded_once, tolerance=NORM) if dtype == "bfloat16" else None
    for what, found, x, weight in (("q", q, raw_q, q_weight), ("k", new_keys[slot[live]], raw_k[live], k_weight)):
        rows = live if what == "k" else np.arange(3)
        exact = normed_and_turned(x, weight, cos[rows], sin[rows])
        if check is None:
            assert_close(found, exact, NORM, what)
        else:
            check(found, jnp.asarray(exact, jnp.float32), what=what)

    # and within a step of the reference, in which the sums run in another order
    others = fused(*arguments, implementation="reference")
    assert_within_a_step(q, others[0], "q")
    assert_within_a_step(new_keys[slot[live]], others[2][slot[live]], "k")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_launch_gives_the_bits_of_two(dtype: str) -> None:
    """Packed or three projections, one launch or its halves, in one batch or another: the same bits."""
    shape = SHAPES["0.8B"]
    packed, *rest = shapes.arguments(shape, 3, random_key(2), dtype)
    together = fused([packed], *rest, implementation=KERNEL)
    edges = np.cumsum([2 * shape.heads * shape.dim, shape.groups * shape.dim])
    apart = jnp.split(packed, edges, axis=1)
    names = ("q", "gate", "keys", "values")
    for name, one, other in zip(names, together, fused(apart, *rest, implementation=KERNEL), strict=True):
        assert_same_bits(one, other, f"{name} from three projections")
    for name, one, other in zip(names, together, unfused(apart, *rest, implementation=KERNEL), strict=True):
        assert_same_bits(one, other, f"{name} from two launches")
    q_weight, k_weight, cos, sin, slot, keys, values = rest
    alone = fused([packed[2:]], q_weight, k_weight, cos[2:], sin[2:], slot[2:], keys, values, implementation=KERNEL)
    assert_same_bits(alone[0][0], together[0][2], "q of a row alone")
    assert_same_bits(alone[2][slot[2]], together[2][slot[2]], "k of a row alone")


@both
@pytest.mark.parametrize("name", ["0.8B", "tiny"])
def test_only_the_rotary_part_turns(name: str, implementation: Implementation) -> None:
    """Small powers of two sum exactly in any order, so what isn't turned is the plain norm to the bit."""
    shape = SHAPES[name]
    packed, q_weight, k_weight, cos, sin, slot, keys, values = shapes.arguments(shape, 3, random_key(3))
    packed = jnp.exp2(jnp.clip(jnp.round(packed), -2, 2)) * jnp.sign(packed)
    for weights in ((q_weight, k_weight), (jnp.zeros_like(q_weight), jnp.zeros_like(k_weight))):
        q, _, new_keys, _ = fused([packed], *weights, cos, sin, slot, keys, values, implementation=implementation)
        raw_q, _, raw_k, _ = split_heads([packed], *keys.shape[1:])
        for what, found, x, weight in (("q", q, raw_q, weights[0]), ("k", new_keys[slot], raw_k, weights[1])):
            plain = jax.jit(normalize_heads)(x, weight, EPS).astype(x.dtype)
            turned, left = found[..., : shape.rotary_dim], found[..., shape.rotary_dim :]
            if KERNEL == "interpret":
                assert_same_bits(left, plain[..., shape.rotary_dim :], what)
            else:  # another reciprocal root
                assert_within_a_step(left, plain[..., shape.rotary_dim :], what)
            assert (turned != plain[..., : shape.rotary_dim]).mean() > 0.5, what
            if not weight.any():
                # a weight of zero is the pure root mean square
                size = np.square(np.asarray(found, np.float64)).mean(-1)
                assert_close(size, np.ones_like(size), 0.02, f"{what} with weight 0")


@both
def test_padding_stores_nothing(implementation: Implementation) -> None:
    packed, q_weight, k_weight, cos, sin, slot, keys, values = shapes.arguments(SHAPES["tiny"], 2, random_key(4))
    nobody = jnp.full_like(slot, -1)
    _, _, new_keys, new_values = fused(
        [packed], q_weight, k_weight, cos, sin, nobody, keys, values, implementation=implementation
    )
    assert_same_bits(new_keys, keys)
    assert_same_bits(new_values, values)


@settings(max_examples=3)
@given(
    shared=st.integers(1, 3),
    groups=st.integers(1, 3),
    dim=st.sampled_from([16, 32]),
    rotary=st.sampled_from([2, 4, 16]),
    slots=st.lists(st.integers(-1, 6), min_size=1, max_size=4, unique_by=lambda s: s if s >= 0 else object()),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_shape(shared: int, groups: int, dim: int, rotary: int, slots: list[int], dtype: str) -> None:
    shape = shapes.Shape("", shared * groups, groups, dim, rotary)
    rows = len(slots)
    packed, q_weight, k_weight, cos, sin, _, keys, values = shapes.arguments(shape, rows, random_key(dim), dtype, 7)
    slot = jnp.asarray(slots, jnp.int32)
    arguments = ([packed], q_weight, k_weight, cos, sin, slot, keys, values)
    found, expected = (fused(*arguments, implementation=i) for i in (KERNEL, "reference"))
    for name, one, other in zip(("q", "gate", "keys", "values"), found, expected, strict=True):
        assert_within_a_step(one, other, name)
    for one, other in zip(found, unfused(*arguments, implementation=KERNEL), strict=True):
        assert_same_bits(one, other)


def test_sizes_without_a_kernel_run_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    shape = shapes.Shape("", 2, 1, dim=24, rotary_dim=8)
    packed, *rest = shapes.arguments(shape, 2, random_key(5))
    dispatch._say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        found = fused([packed], *rest, implementation=KERNEL)
    assert "head dimension 24 is no power of two" in caplog.text
    for one, other in zip(found, fused([packed], *rest, implementation="reference"), strict=True):
        assert_same_bits(one, other)


def test_what_does_not_fit_is_refused() -> None:
    packed, q_weight, k_weight, cos, sin, slot, keys, values = shapes.arguments(SHAPES["tiny"], 2, random_key(6))

    def refused(message: str, **changes: Any) -> None:
        arguments = {"projections": [packed], "q_weight": q_weight, "k_weight": k_weight, "cos": cos, "sin": sin}
        arguments |= {"slot": slot, "keys": keys, "values": values, "eps": EPS}
        with pytest.raises(ValueError, match=message):
            attention_prologue(**(arguments | changes))

    refused("projections has 2 arrays", projections=[packed, packed])
    refused(r"projections are \[767\] wide", projections=[packed[:, 1:]])
    refused(r"projections are \[256\] wide", projections=[packed[:, :256]])
    refused("projections are", projections=[packed[:, :512], packed[:, :128], packed[:, :64]])
    refused("projections \\(v\\)", projections=[packed[:, :512], packed[:, :128], packed[:1, :128]])
    refused("q_weight is", q_weight=q_weight[1:])
    refused("cos has shape", cos=jnp.zeros((2, 33)))
    refused(r"sin is bfloat16\[2, 8\]; it takes float32\[2, 8\]", sin=sin.astype(jnp.bfloat16))
    refused("slot is", slot=slot[:1])
    refused("keys has shape", keys=keys[0])
    refused("values is", values=values.astype(jnp.float32))

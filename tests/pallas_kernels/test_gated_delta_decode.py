"""The delta rule token by token: golden cases, slots, padding, and long runs against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gated_delta_decode.reference import delta_update, gated_delta_decode, gates, l2norm, normalize_qk
from tests.helpers import (
    DELTA_EXTREME,
    DELTA_OUT,
    DELTA_STATE,
    assert_close,
    assert_rounded_once,
    assert_same_bits,
    components,
    difference,
    gated_delta_float64,
    host_copy,
    random_delta_inputs,
    raw_gates,
)

CASES = sorted({key.split(".")[1] for key in components() if key.startswith("delta.")})

decode = jax.jit(gated_delta_decode)
donated_decode = jax.jit(gated_delta_decode, donate_argnames="pool")


def tolerances(g: np.ndarray) -> tuple[float, float]:
    """For outputs and state; wider where decays are extreme."""
    return (DELTA_EXTREME, DELTA_EXTREME) if g.min() <= -30 else (DELTA_OUT, DELTA_STATE)


@functools.partial(jax.jit, static_argnames="keep")
def walk(q, k, v, a, b, a_log, dt_bias, pool, slot, position, keep=True):
    """Decode steps over `[b, t, ...]` inputs, in place at `slot`; outputs, and the pool after every step
    (only after the last one if not `keep`)."""

    def step(carry, x):
        pool, position = carry
        out, pool = gated_delta_decode(*x, a_log, dt_bias, pool, slot, slot, position > 0)
        return (pool, position + 1), (out, pool if keep else None)

    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, a, b))
    (pool, _), (out, pools) = jax.lax.scan(step, (pool, position), xs)
    return jnp.moveaxis(out, 0, 1), pools if keep else pool


def test_the_float64_rule_of_these_tests_is_the_golden_one() -> None:
    for case in CASES:
        x = {name: components()[f"delta.{case}.{name}"] for name in ("q", "k", "v", "g", "beta")}
        start = components().get(f"delta.{case}.initial_state")
        out, states = gated_delta_float64(**x, initial_state=None if start is None else start.swapaxes(-1, -2))
        # the golden arrays are float64 stored as float32
        assert_close(out, components()[f"delta.{case}.f64_out"], 1e-7)
        assert_close(states[:, -1].swapaxes(-1, -2), components()[f"delta.{case}.f64_state"], 2e-7)


@pytest.mark.newest
@pytest.mark.parametrize("case", CASES)
def test_golden_cases(case: str) -> None:
    x = {name: components()[f"delta.{case}.{name}"] for name in ("q", "k", "v", "g", "beta")}
    start = components().get(f"delta.{case}.initial_state")
    batch, _, heads, dv = x["v"].shape
    pool = np.full((4, heads, dv, x["k"].shape[-1]), np.nan, np.float32)
    slot = np.arange(batch, dtype=np.int32) + 2
    if start is not None:
        pool[slot] = start.swapaxes(-1, -2)
    position = np.full(batch, 0 if start is None else 7, np.int32)
    out, pools = walk(x["q"], x["k"], x["v"], *raw_gates(x["g"], x["beta"]), pool, slot, position)
    for_out, for_state = tolerances(x["g"])
    assert_close(out, components()[f"delta.{case}.f64_out"], for_out, "outputs")
    state = pools[-1][slot].swapaxes(-1, -2)
    assert_close(state, components()[f"delta.{case}.f64_state"], for_state, "state")
    # Hugging Face's own recurrent path, where its outputs were kept
    assert_close(state, components()[f"delta.{case}.rec_state"], for_state, "state against the recurrent path")
    if (theirs := components().get(f"delta.{case}.rec_out")) is not None:
        assert_close(out, theirs, for_out, "outputs against the recurrent path")


def test_gates() -> None:
    c = components()
    g, beta = gates(c["gate.a"], np.zeros_like(c["gate.a"]), c["gate.A_log"], c["gate.dt_bias"])
    assert_close(g / c["gate.g"], np.ones_like(c["gate.g"]), 1e-6)
    assert_same_bits(beta, np.full_like(c["gate.a"], 0.5))
    assert g.dtype == beta.dtype == jnp.float32


def test_gates_stay_float32_and_exact_far_out() -> None:
    a = jnp.asarray([-200.0, -20.0, 0.0, 19.0, 21.0, 200.0], jnp.bfloat16)
    g, beta = gates(a, a, jnp.zeros(6), jnp.zeros(6))
    exact = np.asarray(a, np.float64)
    assert g.dtype == beta.dtype == jnp.float32
    assert_close(g, -np.logaddexp(0, exact), 2e-6)
    assert_close(beta, 1 / (1 + np.exp(-exact)), 1e-7)
    # beta of a bfloat16 projection isn't itself rounded to bfloat16
    _, beta = gates(jnp.zeros(1), jnp.asarray([1.0], jnp.bfloat16), jnp.zeros(1), jnp.zeros(1))
    assert float(beta[0]) != float(beta[0].astype(jnp.bfloat16))


def test_l2norm() -> None:
    assert_close(l2norm(components()["l2norm.x"]), components()["l2norm.y"], 1e-6)
    # eps counts: added to the sum, inside the root
    tiny = np.full((1, 4), 1e-4, np.float32)
    assert_close(l2norm(tiny), np.full((1, 4), 1e-4 / np.sqrt(4e-8 + 1e-6)), 1e-7)
    assert_same_bits(l2norm(np.zeros((1, 4), np.float32)), np.zeros((1, 4), np.float32))
    assert l2norm(jnp.ones((1, 4), jnp.bfloat16)).dtype == jnp.float32


def test_scale_comes_after_the_norm() -> None:
    x = np.random.default_rng(0).normal(size=(3, 2, 16)).astype(np.float32)
    q, k = normalize_qk(x, x)
    assert_same_bits(k, l2norm(x))
    assert_close(q, np.asarray(k) / 4, 1e-7)


@pytest.mark.parametrize(("ratio", "dk", "dv"), [(1, 12, 20), (2, 16, 24), (3, 20, 12), (4, 5, 7)])
def test_head_ratios(ratio: int, dk: int, dv: int) -> None:
    x = random_delta_inputs(ratio, batch=3, length=9, key_heads=2, ratio=ratio, dk=dk, dv=dv)
    out, states = gated_delta_float64(**x)
    pool = np.full((5, 2 * ratio, dv, dk), np.nan, np.float32)
    slot = np.array([4, 1, 3], np.int32)
    found, pools = walk(x["q"], x["k"], x["v"], *raw_gates(x["g"], x["beta"]), pool, slot, np.zeros(3, np.int32))
    assert_close(found, out, DELTA_OUT)
    for t in range(9):
        assert_close(pools[t][slot], states[:, t], DELTA_STATE, f"state after token {t}")


# Slots and padding


def one_step(seed: int, rows: int, heads: int = 4) -> tuple[np.ndarray, ...]:
    """q, k, v, a, b, A_log, dt_bias of one step: two value heads a key head, dk 12, dv 20."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, heads // 2, 12), (rows, heads // 2, 12), (rows, heads, 20), (rows, heads), (rows, heads)]
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in [*shapes, (heads,), (heads,)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("twin", [False, True])
def test_only_written_slots_change(twin: bool, dtype: jnp.dtype) -> None:
    rng = np.random.default_rng(5)
    pool = jnp.asarray(rng.normal(size=(11, 4, 20, 12)), dtype)
    pool = pool.at[jnp.asarray([0, 9])].set(jnp.nan)  # sentinels: nothing may read or write them
    before = host_copy(pool)
    read = np.array([0, 3, 0, 7, 1, 0], np.int32)
    write = np.array([0, 4, 0, 8, 2, 0], np.int32) if twin else read
    inputs = list(one_step(6, rows=6))
    for x in inputs[:5]:
        x[read == 0] = np.nan
    out, pool = donated_decode(*inputs, pool, read, write, np.array([0, 1, 0, 1, 0, 0], bool))
    untouched = np.setdiff1d(np.arange(11), write[write > 0])
    assert_same_bits(pool[untouched], before[untouched], "slots that no row writes")
    assert np.isfinite(np.asarray(pool[write[write > 0]], np.float32)).all()
    assert np.isfinite(np.asarray(out)[read > 0]).all()

    # the values, and a row without state starting from zero although its slot holds something
    stored = np.where(np.array([1, 1, 0])[:, None, None, None], before[read[[1, 3, 4]]].astype(np.float32), 0.0)
    q, k = normalize_qk(*(jnp.repeat(x[[1, 3, 4]], 2, axis=1) for x in inputs[:2]))
    g, beta = gates(inputs[3], inputs[4], inputs[5], inputs[6])
    state, expected = delta_update(
        stored, q, k, inputs[2][[1, 3, 4]], g[jnp.array([1, 3, 4])], beta[jnp.array([1, 3, 4])]
    )
    assert_close(np.asarray(out)[[1, 3, 4]], expected, DELTA_OUT)
    tolerance = DELTA_STATE if dtype == jnp.float32 else 2.0**-8 * float(jnp.abs(state).max())
    assert_close(np.asarray(pool[write[[1, 3, 4]]], np.float32), state, tolerance)


def test_row_does_not_depend_on_its_batch() -> None:
    # The same compiled program: one row alone among padding, and eight rows together.
    inputs = one_step(1, rows=8)
    pool = np.random.default_rng(2).normal(size=(9, 4, 20, 12)).astype(np.float32)
    slot = np.arange(1, 9, dtype=np.int32)
    together, together_pool = decode(*inputs, pool, slot, slot, np.ones(8, bool))
    for row in range(8):
        alone = np.where(np.arange(8) == row, slot, 0)
        out, after = decode(*inputs, pool, alone, alone, np.ones(8, bool))
        assert_same_bits(out[row], together[row], f"row {row}")
        assert_same_bits(after[slot[row]], together_pool[slot[row]], f"slot of row {row}")


def test_layouts_agree_bit_for_bit() -> None:
    inputs = one_step(3, rows=3)
    state = np.random.default_rng(4).normal(size=(3, 4, 20, 12)).astype(np.float32)
    in_place, twin = np.zeros((7, 4, 20, 12), np.float32), np.zeros((7, 4, 20, 12), np.float32)
    slot = np.array([1, 3, 5], np.int32)
    in_place[slot] = twin[slot] = state
    out, in_place = decode(*inputs, in_place, slot, slot, np.ones(3, bool))
    twin_out, twin = decode(*inputs, twin, slot, slot + 1, np.ones(3, bool))
    assert_same_bits(twin_out, out)
    assert_same_bits(twin[slot + 1], in_place[slot])
    assert_same_bits(twin[slot], state, "the slot that was read")


# Numerics


def test_2048_steps_stay_near_float64() -> None:
    rng = np.random.default_rng(11)
    x = random_delta_inputs(11, batch=2, length=2048, key_heads=2, ratio=2, dk=16, dv=24)
    # memory from a few tokens to thousands, as A_log and dt_bias give it
    x["g"] = -np.exp(rng.uniform(-8, 0.7, size=(1, 1, 4)) + rng.normal(0, 0.3, size=x["g"].shape)).astype(np.float32)
    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    g, beta = gates(a, b, a_log, dt_bias)  # what the rule will see, in float32
    out, states = gated_delta_float64(x["q"], x["k"], x["v"], g, beta)
    slot, position = np.array([1, 2], np.int32), np.zeros(2, np.int32)

    def errors(b: np.ndarray, dtype: jnp.dtype) -> tuple[float, float]:
        pool = jnp.zeros((3, 4, 24, 16), dtype)
        found, pool = walk(x["q"], x["k"], x["v"], a, b, a_log, dt_bias, pool, slot, position, keep=False)
        assert pool.dtype == dtype
        return difference(found, out), difference(np.asarray(pool[slot], np.float32), states[:, -1])

    for_out, for_state = errors(b, jnp.float32)
    print(f"2048 steps: output off by {for_out:.2g}, state by {for_state:.2g}")
    assert for_out <= DELTA_OUT
    assert for_state <= DELTA_STATE

    # Both of the roundings that this guards against are far outside of that.
    beta16 = np.asarray(beta.astype(jnp.bfloat16), np.float64)
    rounded = (np.log(beta16) - np.log1p(-np.minimum(beta16, 1 - 1e-7))).astype(np.float32)
    assert errors(rounded, jnp.float32)[1] > 100 * DELTA_STATE
    assert errors(b, jnp.bfloat16)[1] > 100 * DELTA_STATE


def test_large_values_stay_finite_in_bfloat16() -> None:
    x = random_delta_inputs(3, batch=1, length=40, key_heads=1, ratio=2, dk=16, dv=24)
    half = {name: jnp.asarray(x[name], jnp.bfloat16) for name in "qk"}
    v = jnp.asarray(1e3 * x["v"], jnp.bfloat16)
    pool = jnp.zeros((2, 2, 24, 16))
    gates_in = raw_gates(x["g"], x["beta"])
    out, pools = walk(half["q"], half["k"], v, *gates_in, pool, np.array([1], np.int32), np.zeros(1, np.int32))
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.isfinite(np.asarray(pools)).all()
    exact, _ = gated_delta_float64(half["q"], half["k"], v, x["g"], x["beta"])
    scale = np.abs(exact).max()
    assert_close(np.asarray(out, np.float32) / scale, exact / scale, 2.0**-8)


def test_bfloat16_pool_rounds_only_what_it_stores() -> None:
    inputs = one_step(8, rows=2)
    pool = jnp.asarray(np.random.default_rng(9).normal(size=(3, 4, 20, 12)), jnp.bfloat16)
    slot = np.array([1, 2], np.int32)
    out, after = decode(*inputs, pool, slot, slot, np.ones(2, bool))
    exact_out, exact = decode(*inputs, pool.astype(jnp.float32), slot, slot, np.ones(2, bool))
    assert_close(out, exact_out, DELTA_OUT)
    assert_rounded_once(after, exact, DELTA_STATE)

"""The delta rule token by token, by its reference and its kernel: golden cases, slots, padding, bits, and long
runs against float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdnjax.config.presets import from_preset
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode import DEFAULT_TILE, Tile, gated_delta_decode, kernel, shapes
from pallas_kernels.gated_delta_decode.reference import delta_update, gates, l2norm, normalize_qk
from pallas_kernels.triton_backend import Warps
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
    rule_inputs,
)

CASES = sorted({key.split(".")[1] for key in components() if key.startswith("delta.")})

ON_GPU = jax.default_backend() != "cpu"
KERNEL: Implementation = "pallas" if ON_GPU else "interpret"
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", KERNEL)
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def of_parts(q, k, v, a, b, a_log, dt_bias, pool, read_slot, write_slot, has_state, implementation, tile=DEFAULT_TILE):
    """The operation, on rows that are packed here."""
    rest = (a_log, dt_bias, pool, read_slot, write_slot, has_state, implementation, tile)
    return gated_delta_decode(*rule_inputs(q, k, v, a, b), *rest)


decode = jax.jit(of_parts, static_argnames=("implementation", "tile"))
donated_decode = jax.jit(of_parts, static_argnames=("implementation", "tile"), donate_argnames="pool")


def tolerances(g: np.ndarray) -> tuple[float, float]:
    """For outputs and state; wider where decays are extreme."""
    return (DELTA_EXTREME, DELTA_EXTREME) if g.min() <= -30 else (DELTA_OUT, DELTA_STATE)


@functools.partial(jax.jit, static_argnames=("implementation", "keep"))
def walk(q, k, v, a, b, a_log, dt_bias, pool, slot, position, implementation, keep=True):
    """Decode steps over `[b, t, ...]` inputs, in place at `slot`; outputs, and the pool after every step
    (only after the last one if not `keep`)."""

    def step(carry, x):
        pool, position = carry
        out, pool = of_parts(*x, a_log, dt_bias, pool, slot, slot, position > 0, implementation)
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
@both
@pytest.mark.parametrize("case", CASES)
def test_golden_cases(case: str, implementation: Implementation) -> None:
    x = {name: components()[f"delta.{case}.{name}"] for name in ("q", "k", "v", "g", "beta")}
    start = components().get(f"delta.{case}.initial_state")
    batch, _, heads, dv = x["v"].shape
    pool = np.full((4, heads, dv, x["k"].shape[-1]), np.nan, np.float32)
    slot = np.arange(batch, dtype=np.int32) + 2
    if start is not None:
        pool[slot] = start.swapaxes(-1, -2)
    position = np.full(batch, 0 if start is None else 7, np.int32)
    raw = raw_gates(x["g"], x["beta"])
    out, pools = walk(x["q"], x["k"], x["v"], *raw, pool, slot, position, implementation)
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


@both
@pytest.mark.parametrize(("ratio", "dk", "dv"), [(1, 16, 20), (2, 16, 24), (3, 32, 12), (4, 8, 7), (2, 12, 20)])
def test_head_ratios(ratio: int, dk: int, dv: int, implementation: Implementation) -> None:
    x = random_delta_inputs(ratio, batch=3, length=9, key_heads=2, ratio=ratio, dk=dk, dv=dv)
    out, states = gated_delta_float64(**x)
    pool = np.full((5, 2 * ratio, dv, dk), np.nan, np.float32)
    slot = np.array([4, 1, 3], np.int32)
    raw = raw_gates(x["g"], x["beta"])
    found, pools = walk(x["q"], x["k"], x["v"], *raw, pool, slot, np.zeros(3, np.int32), implementation)
    assert_close(found, out, DELTA_OUT)
    for t in range(9):
        assert_close(pools[t][slot], states[:, t], DELTA_STATE, f"state after token {t}")


def random_step(seed: int, rows: int, shape: shapes.Shape, pool_dtype: jnp.dtype, slots: int) -> list[np.ndarray]:
    """q, k, v, a, b, A_log, dt_bias and a pool. Made by numpy: each of JAX's would compile for each shape."""
    rng, s = np.random.default_rng(seed), shape
    key, heads = (rows, s.key_heads, s.key_dim), (rows, s.value_heads)
    sizes = [key, key, (*heads, s.value_dim), heads, heads, heads[1:], heads[1:]]
    pool = 0.3 * rng.normal(size=(slots, s.value_heads, s.value_dim, s.key_dim))
    return [*(rng.normal(size=size).astype(np.float32) for size in sizes), pool.astype(pool_dtype)]


@both
@pytest.mark.parametrize("pool_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_real_head_sizes(ratio: int, pool_dtype: jnp.dtype, implementation: Implementation) -> None:
    inputs = random_step(ratio, 2, shapes.Shape("", 1, ratio), pool_dtype, slots=6)
    q, k, v, a, b, a_log, dt_bias, pool = inputs
    read, write = np.array([4, 1], np.int32), np.array([2, 1], np.int32)
    g, beta = gates(a, b, a_log, dt_bias)
    one_token = (x[:, None] for x in (q, k, v, np.asarray(g), np.asarray(beta)))
    expected, states = gated_delta_float64(*one_token, initial_state=pool[read].astype(np.float32))
    out, after = decode(*inputs, read, write, np.ones(2, bool), implementation=implementation)
    assert after.dtype == pool_dtype
    assert_close(out, expected[:, 0], DELTA_OUT)
    exact = states[:, 0].astype(np.float32)
    if pool_dtype == jnp.float32:
        assert_close(after[write], exact, DELTA_STATE)
    else:
        assert_rounded_once(after[write], exact, DELTA_STATE)
    untouched = [0, 3, 4, 5]
    assert_same_bits(np.asarray(after)[untouched], pool[untouched], "slots that no row writes")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "tile",
    [
        DEFAULT_TILE,
        Tile(8, 1, 128, Warps(1, 1)),
        Tile(4, 4, 32, Warps(1, 1)),
        Tile(16, 2, 64, Warps(2, 2)),
        Tile(32, 1, 16, Warps(4, 4)),
        Tile(128, 1, 128, Warps(8, 8)),
    ],
)
def test_every_tile_gives_the_same_values(tile: Tile, dtype: jnp.dtype) -> None:
    inputs = random_step(1, 1, shapes.Shape("", 1, 2), jnp.float32, slots=3)
    inputs[:5] = [x.astype(dtype) for x in inputs[:5]]
    slots = (np.array([1], np.int32), np.array([2], np.int32), np.ones(1, bool))
    expected, expected_pool = decode(*inputs, *slots, implementation="reference")
    out, pool = decode(*inputs, *slots, implementation=KERNEL, tile=tile)
    rounding = 0.0 if dtype == jnp.float32 else 2.0**-8 * float(jnp.abs(expected).max())
    assert_close(out.astype(jnp.float32), expected.astype(jnp.float32), DELTA_OUT + rounding)
    assert_close(pool, expected_pool, DELTA_STATE)


# Slots and padding


def one_step(seed: int, rows: int, heads: int = 4) -> list[np.ndarray]:
    """q, k, v, a, b, A_log, dt_bias of one step: two value heads a key head, dk 16, dv 20."""
    return random_step(seed, rows, shapes.Shape("", heads // 2, heads, 16, 20), jnp.float32, slots=1)[:-1]


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("twin", [False, True])
def test_only_written_slots_change(twin: bool, dtype: jnp.dtype, implementation: Implementation) -> None:
    rng = np.random.default_rng(5)
    pool = jnp.asarray(rng.normal(size=(11, 4, 20, 16)), dtype)
    pool = pool.at[jnp.asarray([0, 1, 9])].set(jnp.nan)  # sentinels: nothing may read or write 0 and 9
    before = host_copy(pool)
    read = np.array([0, 3, 0, 7, 1, 0], np.int32)
    write = np.array([0, 4, 0, 8, 2, 0], np.int32) if twin else read
    inputs = one_step(6, rows=6)
    for x in inputs[:5]:
        x[read == 0] = np.nan
    has_state = np.array([0, 1, 0, 1, 0, 1], bool)
    out, pool = donated_decode(*inputs, pool, read, write, has_state, implementation=implementation)
    untouched = np.setdiff1d(np.arange(11), write[write > 0])
    assert_same_bits(pool[untouched], before[untouched], "slots that no row writes")
    assert np.isfinite(np.asarray(pool[write[write > 0]], np.float32)).all()
    assert np.isfinite(np.asarray(out)[read > 0]).all()
    if implementation != "reference":
        assert_same_bits(np.asarray(out)[read == 0], np.zeros((3, 4, 20), np.float32), "padding rows")

    # the values, and a row without state starting from zero although its slot holds NaN
    stored = np.where(np.array([1, 1, 0])[:, None, None, None], before[read[[1, 3, 4]]].astype(np.float32), 0.0)
    q, k = normalize_qk(*(jnp.repeat(x[[1, 3, 4]], 2, axis=1) for x in inputs[:2]))
    g, beta = gates(inputs[3], inputs[4], inputs[5], inputs[6])
    state, expected = delta_update(
        stored, q, k, inputs[2][[1, 3, 4]], g[jnp.array([1, 3, 4])], beta[jnp.array([1, 3, 4])]
    )
    assert_close(np.asarray(out)[[1, 3, 4]], expected, DELTA_OUT)
    tolerance = DELTA_STATE if dtype == jnp.float32 else 2.0**-8 * float(jnp.abs(state).max())
    assert_close(np.asarray(pool[write[[1, 3, 4]]], np.float32), state, tolerance)


@both
def test_minus_one_is_padding_too(implementation: Implementation) -> None:
    inputs = one_step(7, rows=3)
    pool = jnp.asarray(np.random.default_rng(8).normal(size=(5, 4, 20, 16)), jnp.float32)
    before, has_state = host_copy(pool), np.ones(3, bool)
    slots, marked = np.array([0, 2, 0], np.int32), np.array([-1, 2, -1], np.int32)
    expected = donated_decode(*inputs, jnp.array(pool), slots, slots, has_state, implementation=implementation)
    out, pool = donated_decode(*inputs, pool, marked, marked, has_state, implementation=implementation)
    assert_same_bits(np.asarray(out)[1], np.asarray(expected[0])[1], "the row that lives")
    assert_same_bits(pool, expected[1], "the pool")
    assert_same_bits(pool[np.array([0, 1, 3, 4])], before[[0, 1, 3, 4]], "slots that no row writes")


@pytest.mark.skipif(ON_GPU, reason="a reference is what a CPU runs; on a GPU XLA fuses it as it likes")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shapes.Shape("", 1, 2, 16, 16), jnp.bfloat16), (shapes.Shape("", 1, 3, 32, 20), jnp.float32)],
)
def test_the_reference_has_the_same_bits_wherever_it_runs(shape: shapes.Shape, dtype: jnp.dtype) -> None:
    *inputs, pool, read, write, has_state = shapes.arguments(shape, 4, jax.random.key(9), dtype)
    slots = read, write, has_state

    # All are arguments: of constants a compiler computes parts ahead, and knows the branch.
    def step(pool: jax.Array, inputs: Any, slots: Any) -> tuple[jax.Array, jax.Array]:
        return gated_delta_decode(*inputs, pool, *slots, implementation="reference")

    def loop(pool: jax.Array, inputs: Any, slots: Any) -> tuple[jax.Array, jax.Array]:
        out = jnp.zeros((4, shape.value_heads, shape.value_dim), dtype)
        return jax.lax.fori_loop(0, 2, lambda _, carry: step(carry[1], inputs, slots), (out, pool))

    def chain(pool: jax.Array, inputs: Any, slots: Any) -> tuple[jax.Array, jax.Array]:
        return step(step(pool, inputs, slots)[1], inputs, slots)

    once = jax.jit(step)
    apart = once(once(pool, inputs, slots)[1], inputs, slots)
    looped, chained = jax.jit(loop)(pool, inputs, slots), jax.jit(chain)(pool, inputs, slots)
    for found, where in ((looped, "in a loop"), (chained, "after itself")):
        assert_same_bits(found[0], apart[0], f"outputs {where}")
        assert_same_bits(found[1], apart[1], f"states {where}")


@both
def test_row_does_not_depend_on_its_batch(implementation: Implementation) -> None:
    # The same compiled program of 64 rows: all of them live, eight, and one alone among padding.
    inputs = one_step(1, rows=64, heads=2)
    pool = np.random.default_rng(2).normal(size=(65, 2, 20, 16)).astype(np.float32)
    slot = np.arange(1, 65, dtype=np.int32)

    def run(live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        slots = np.where(live, slot, 0)
        out, after = decode(*inputs, pool, slots, slots, np.ones(64, bool), implementation=implementation)
        return np.asarray(out), np.asarray(after)

    together, together_pool = run(np.ones(64, bool))
    eight, eight_pool = run(np.arange(64) % 8 == 3)
    for row in (3, 11, 59):
        alone, alone_pool = run(np.arange(64) == row)
        for out, after in ((eight, eight_pool), (together, together_pool)):
            assert_same_bits(alone[row], out[row], f"row {row}")
            assert_same_bits(alone_pool[slot[row]], after[slot[row]], f"slot of row {row}")


@both
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layouts_agree_bit_for_bit_and_a_step_can_run_again(dtype: jnp.dtype, implementation: Implementation) -> None:
    inputs = one_step(3, rows=3)
    state = jnp.asarray(np.random.default_rng(4).normal(size=(3, 4, 20, 16)), dtype)
    slot, live = np.array([1, 3, 5], np.int32), np.ones(3, bool)
    start = jnp.zeros((7, 4, 20, 16), dtype).at[slot].set(state)
    out, in_place = decode(*inputs, start, slot, slot, live, implementation=implementation)
    twin_out, twin = decode(*inputs, start, slot, slot + 1, live, implementation=implementation)
    assert_same_bits(twin_out, out)
    assert_same_bits(twin[slot + 1], in_place[slot])
    assert_same_bits(twin[slot], state, "the slot that was read")
    # Until a commit the slot that was read is current: the same step again gives the same bits.
    again_out, again = decode(*inputs, twin, slot, slot + 1, live, implementation=implementation)
    assert_same_bits(again_out, out)
    assert_same_bits(again, twin)


@pytest.mark.skipif(ON_GPU, reason="a GPU runs programs in an order of its own")
def test_order_of_programs_and_form_of_inputs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    # Interpreted programs run one by one: were any to read what another writes, turning the order would show.
    q, k, v, a, b, *rest = random_step(2, 3, shapes.Shape("", 1, 3, 16, 24), jnp.float32, slots=6)
    rest += [np.array([2, 4, 3], np.int32), np.array([2, 1, 5], np.int32), np.ones(3, bool)]
    qkv, *columns = rule_inputs(q, k, v, a, b)

    def run(*gates: Any) -> list[np.ndarray]:
        return [np.asarray(x) for x in gated_delta_decode(qkv, *gates, *rest, implementation=KERNEL)]

    forward, forward_id = run(*columns), kernel.pl.program_id
    monkeypatch.setattr(kernel.pl, "program_id", lambda axis: kernel.pl.num_programs(axis) - 1 - forward_id(axis))
    for one, other in zip(run(a, b), forward, strict=True):
        assert_same_bits(one, other)


@settings(max_examples=8)
@given(
    key_heads=st.integers(1, 3),
    ratio=st.integers(1, 4),
    dk=st.sampled_from([4, 16, 64]),
    dv=st.sampled_from([1, 8, 20, 24, 64]),
    strip=st.sampled_from([1, 8, 32]),
    strips=st.sampled_from([1, 2, 4]),
    piece=st.sampled_from([4, 64]),
    rows=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=4),
    pool_dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
    scale=st.sampled_from([1.0, 40.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_gates_and_slots(
    key_heads: int,
    ratio: int,
    dk: int,
    dv: int,
    strip: int,
    strips: int,
    piece: int,
    rows: list[tuple[bool, bool, bool]],
    pool_dtype: jnp.dtype,
    scale: float,
    seed: int,
) -> None:
    live, twin, has_state = np.array(rows, bool).T
    slots = 2 * len(rows) + 3
    inputs = random_step(seed, len(rows), shapes.Shape("", key_heads, key_heads * ratio, dk, dv), pool_dtype, slots)
    inputs[3], inputs[4] = scale * inputs[3], scale * inputs[4]  # gates from nothing to all
    order = 1 + np.random.default_rng(seed).permutation(slots - 1).astype(np.int32)
    read = np.where(live, order[: len(rows)], 0)
    write = np.where(live, np.where(twin, order[-len(rows) :], order[: len(rows)]), 0)
    pool = inputs[-1]
    pool[read[live & ~has_state]] = np.nan
    expected, expected_pool = map(np.asarray, decode(*inputs, read, write, has_state, implementation="reference"))
    tile = Tile(strip, strips, piece, DEFAULT_TILE.warps)
    out, after = map(np.asarray, decode(*inputs, read, write, has_state, implementation=KERNEL, tile=tile))
    written = write[live]
    assert_close(out[live], expected[live], DELTA_OUT)
    found, exact = after[written].astype(np.float64), expected_pool[written].astype(np.float64)
    # Two bfloat16 states that round apart differ by one step.
    step = 0.0 if pool_dtype == jnp.float32 else 2.0**-7
    assert (np.abs(found - exact) <= DELTA_STATE + step * np.abs(exact)).all()
    untouched = np.setdiff1d(np.arange(slots), written)
    assert_same_bits(after[untouched], pool[untouched], "slots that no row writes")


# Numerics


@both
def test_2048_steps_stay_near_float64(implementation: Implementation) -> None:
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
        steps = (x["q"], x["k"], x["v"], a, b, a_log, dt_bias, pool, slot, position)
        found, pool = walk(*steps, implementation, keep=False)
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


@both
def test_large_values_stay_finite_in_bfloat16(implementation: Implementation) -> None:
    x = random_delta_inputs(3, batch=1, length=40, key_heads=1, ratio=2, dk=16, dv=24)
    half = {name: jnp.asarray(x[name], jnp.bfloat16) for name in "qk"}
    v = jnp.asarray(1e3 * x["v"], jnp.bfloat16)
    pool = jnp.zeros((2, 2, 24, 16))
    gates_in = raw_gates(x["g"], x["beta"])
    slot, position = np.array([1], np.int32), np.zeros(1, np.int32)
    out, pools = walk(half["q"], half["k"], v, *gates_in, pool, slot, position, implementation)
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(out, np.float32)).all() and np.isfinite(np.asarray(pools)).all()
    exact, _ = gated_delta_float64(half["q"], half["k"], v, x["g"], x["beta"])
    scale = np.abs(exact).max()
    assert_close(np.asarray(out, np.float32) / scale, exact / scale, 2.0**-8)


@both
def test_bfloat16_pool_rounds_only_what_it_stores(implementation: Implementation) -> None:
    inputs = one_step(8, rows=2)
    pool = jnp.asarray(np.random.default_rng(9).normal(size=(3, 4, 20, 16)), jnp.bfloat16)
    slot = np.array([1, 2], np.int32)
    out, after = decode(*inputs, pool, slot, slot, np.ones(2, bool), implementation=implementation)
    exact_out, exact = decode(
        *inputs, pool.astype(jnp.float32), slot, slot, np.ones(2, bool), implementation=implementation
    )
    assert_close(out, exact_out, DELTA_OUT)
    assert_rounded_once(after, exact, DELTA_STATE)


# The public function


def test_what_does_not_fit_is_refused() -> None:
    names = "qkv a b a_log dt_bias pool read_slot write_slot has_state".split()
    slot = np.arange(1, 4, dtype=np.int32)
    q, k, v, *values = random_step(0, 3, shapes.Shape("", 2, 4, 16, 8), jnp.float32, 4)
    qkv, _, b = rule_inputs(q, k, v, *values[:2])
    arguments = dict(zip(names, [qkv, *values, slot, slot, np.ones(3, bool)], strict=True))
    wrong = {
        "a": arguments["a"][:, :2],
        "b": arguments["b"][:1],
        "a_log": arguments["a_log"].astype(jnp.bfloat16),
        "dt_bias": arguments["dt_bias"][:3],
        "pool": arguments["pool"].astype(jnp.float16),
        "read_slot": arguments["read_slot"].astype(jnp.float32),
        "write_slot": arguments["write_slot"][:2],
        "has_state": arguments["has_state"].astype(jnp.int32),
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"\b{name}\b.*take"):
            gated_delta_decode(**{**arguments, name: value})
    # 32 columns are the values; 2 Hk * 16 of q and k, Hk a divisor of 4
    for width in (32, 32 + 3 * 32, 32 + 2 * 32 - 1):
        with pytest.raises(ValueError, match=r"qkv has shape \(3, .* it takes"):
            gated_delta_decode(**{**arguments, "qkv": np.zeros((3, width), np.float32)})
    with pytest.raises(ValueError, match="qkv has shape"):
        gated_delta_decode(**{**arguments, "qkv": q})
    with pytest.raises(ValueError, match=r"b is float32\[3, 3\]"):
        gated_delta_decode(**{**arguments, "b": dataclasses.replace(b, width=3)})
    for name, sizes in (("strip = 12", (12, 1, 64)), ("strips = 0", (8, 0, 64)), ("piece = 48", (8, 1, 48))):
        with pytest.raises(ValueError, match=f"tile.{name}; it takes a power of two"):
            gated_delta_decode(**arguments, tile=Tile(*sizes, Warps(1, 1)))
    with pytest.raises(ValueError, match="implementation = 'cuda'"):
        gated_delta_decode(**arguments, implementation="cuda")  # pyright: ignore[reportArgumentType]


def test_shapes_of_the_benchmarks() -> None:
    tiny = shapes.SHAPES[-1]
    arguments = jax.jit(lambda key: shapes.arguments(tiny, 3, key, twin=True, spare=2))(jax.random.key(0))
    operation = jax.jit(gated_delta_decode, static_argnames="implementation")
    expected, expected_pool = operation(*arguments, implementation="reference")
    out, pool = operation(*arguments, implementation=KERNEL)
    assert pool.shape[0] == 1 + 2 * 3 + 2
    assert_close(out.astype(jnp.float32), expected.astype(jnp.float32), 2.0**-7 * float(jnp.abs(expected).max()))
    assert_close(pool, expected_pool, DELTA_STATE)
    assert len({0, *np.asarray(arguments[6]).tolist(), *np.asarray(arguments[7]).tolist()}) == 7

    for shape in shapes.SHAPES:
        if shape.name == "397B":
            continue
        c = from_preset(shape.name.lower())
        dims = (c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim)
        assert dims == (shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim), shape.name
        assert shape.layout.width == c.conv_channels
    assert {s.value_heads // s.key_heads for s in shapes.SHAPES} == {1, 2, 3, 4}
    # 0.8B: 1 MiB of state a row and layer each way, and 4 * 2048 activations of 2 bytes
    assert shapes.bytes_moved(shapes.SHAPES[0], 64) == 64 * (2 * 2**20 + 4 * 2048 * 2)

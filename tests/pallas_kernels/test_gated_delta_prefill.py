"""The chunked delta rule: whole sequences, packed segments, gradients; always against token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gated_delta_decode.reference import gates
from pallas_kernels.gated_delta_prefill.reference import (
    gated_delta_prefill,
    gated_delta_sequence,
    inverse_unit_lower,
)
from pallas_kernels.segments import Segments
from tests.helpers import (
    DELTA_EXTREME,
    DELTA_OUT,
    DELTA_STATE,
    assert_close,
    assert_rounded_once,
    assert_same_bits,
    components,
    gated_delta_float64,
    random_delta_inputs,
    raw_gates,
)

CASES = sorted({key.split(".")[1] for key in components() if key.startswith("delta.")})

sequence = jax.jit(gated_delta_sequence)
prefill = jax.jit(gated_delta_prefill)


def tolerances(g: np.ndarray) -> tuple[float, float]:
    """For outputs and state; wider where decays are extreme."""
    return (DELTA_EXTREME, DELTA_EXTREME) if g.min() <= -30 else (DELTA_OUT, DELTA_STATE)


def golden_inputs(case: str) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Inputs, and the initial state `[b, Hv, dv, dk]`."""
    x = {name: components()[f"delta.{case}.{name}"] for name in ("q", "k", "v", "g", "beta")}
    start = components().get(f"delta.{case}.initial_state")
    return x, None if start is None else start.swapaxes(-1, -2)


def int_vectors(*values: object) -> Segments:
    return Segments(*(jnp.asarray(value, jnp.int32) for value in values))


# Whole sequences


@pytest.mark.newest
@pytest.mark.parametrize("case", CASES)
def test_sequence_golden_cases(case: str) -> None:
    x, start = golden_inputs(case)
    out, state = sequence(**x, initial_state=start)
    assert out.dtype == state.dtype == jnp.float32
    # Under extreme gates too: decays are summed directly, where Hugging Face takes differences of sums.
    assert_close(out, components()[f"delta.{case}.f64_out"], DELTA_OUT, "outputs")
    assert_close(state.swapaxes(-1, -2), components()[f"delta.{case}.f64_state"], DELTA_STATE, "state")
    for_out, for_state = tolerances(x["g"])
    assert_close(out, components()[f"delta.{case}.chunk_out"], for_out, "outputs against the chunk path")
    assert_close(state.swapaxes(-1, -2), components()[f"delta.{case}.chunk_state"], for_state, "state against it")


@pytest.mark.parametrize("case", CASES)
def test_packed_golden_cases(case: str) -> None:
    x, start = golden_inputs(case)
    batch, length, heads, dv = x["v"].shape
    rows = 140  # for every case, so that they share a program
    segment_start = 2 + (length + 3) * np.arange(batch)
    own_rows = (segment_start[:, None] + np.arange(length)).reshape(-1)

    def line(values: np.ndarray) -> np.ndarray:
        """Every sequence's tokens as rows, with NaN rows between."""
        flat = np.full((rows, *values.shape[2:]), np.nan, np.float32)
        flat[own_rows] = values.reshape(-1, *values.shape[2:])
        return flat

    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    pool = np.full((4, heads, dv, x["k"].shape[-1]), np.nan, np.float32)
    slot = 3 - np.arange(batch)
    if start is not None:
        pool[slot] = start
    segments = int_vectors(segment_start, np.full(batch, length), np.full(batch, 0 if start is None else 9), slot)
    inputs = [line(values) for values in (x["q"], x["k"], x["v"], a, b)]
    out, after = prefill(*inputs, a_log, dt_bias, pool, segments)
    for_out, for_state = tolerances(x["g"])
    found = np.asarray(out)[own_rows].reshape(x["v"].shape)
    assert_close(found, components()[f"delta.{case}.f64_out"], for_out, "outputs")
    assert_close(after[slot].swapaxes(-1, -2), components()[f"delta.{case}.f64_state"], for_state, "state")
    others = np.setdiff1d(np.arange(4), slot)
    assert_same_bits(after[others], pool[others], "slots of no segment")
    assert_same_bits(np.delete(np.asarray(out), own_rows, 0), np.zeros((rows - len(own_rows), heads, dv), np.float32))


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 127, 129, 200])
def test_lengths(length: int) -> None:
    x = random_delta_inputs(length, batch=1, length=200, key_heads=1, ratio=3, dk=12, dv=20)
    x = {name: values[:, :length] for name, values in x.items()}
    out, states = gated_delta_float64(**x)
    found, state = sequence(**x)
    assert_close(found, out, DELTA_OUT)
    assert_close(state, states[:, -1], DELTA_STATE)


@pytest.mark.parametrize(("ratio", "dk", "dv"), [(1, 12, 20), (2, 16, 24), (3, 20, 12), (4, 5, 7)])
def test_head_ratios(ratio: int, dk: int, dv: int) -> None:
    x = random_delta_inputs(ratio, batch=2, length=70, key_heads=2, ratio=ratio, dk=dk, dv=dv)
    out, states = gated_delta_float64(**x)
    found, state = sequence(**x)
    assert_close(found, out, DELTA_OUT)
    assert_close(state, states[:, -1], DELTA_STATE)


def strong(kind: str, length: int) -> dict[str, np.ndarray]:
    """Gates and keys at which a chunked form breaks first."""
    x = random_delta_inputs(5, batch=1, length=length, key_heads=1, ratio=2, dk=12, dv=20)
    rng = np.random.default_rng(6)
    if kind == "all decays -50":
        x["g"][:] = -50.0
    elif kind == "same keys, no decay, beta 1":
        x["g"][:], x["beta"][:], x["k"][:] = 0.0, 1.0, x["k"][:, :1]
    elif kind == "nearly the same keys":
        x["g"][:], x["beta"][:] = 0.0, 1.0
        x["k"][:] = x["k"][:, :1] + 1e-3 * rng.normal(size=x["k"].shape)
    elif kind == "decays of -80 among none":
        x["g"][:] = np.where(rng.uniform(size=x["g"].shape) < 0.2, -80.0, 0.0)
    return x


STRONG = ["all decays -50", "same keys, no decay, beta 1", "nearly the same keys", "decays of -80 among none"]


@pytest.mark.parametrize("kind", STRONG)
def test_strong_gates_and_equal_keys(kind: str) -> None:
    x = strong(kind, 130)
    out, states = gated_delta_float64(**x)
    found, state = sequence(**x)
    assert_close(found, out, DELTA_OUT, "outputs")
    assert_close(state, states[:, -1], DELTA_STATE, "state")

    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    pool = np.full((2, 2, 20, 12), np.nan, np.float32)
    inputs = (x["q"][0], x["k"][0], x["v"][0], a[0], b[0], a_log, dt_bias)
    found, after = prefill(*inputs, pool, int_vectors([0], [130], [0], [1]))
    assert_close(found, out[0], DELTA_OUT, "packed outputs")
    assert_close(after[1], states[0, -1], DELTA_STATE, "packed state")


def test_inverse_unit_lower() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 16, 64):
        m = np.tril(rng.normal(size=(3, size, size)) / np.sqrt(size), -1).astype(np.float32)
        exact = np.linalg.inv(np.eye(size) + m.astype(np.float64))
        assert_close(inverse_unit_lower(m), exact, 1e-5)
    # equal keys, beta 1, no decay: all ones below the diagonal, inverse -1 on the first subdiagonal
    assert_close(inverse_unit_lower(np.tril(np.ones((64, 64), np.float32), -1)), np.eye(64) - np.eye(64, k=-1), 0.0)


# Packed segments: windows, order, padding

REQUESTS, LONGEST, ROWS, HEADS, DK, DV = 3, 150, 160, 4, 12, 20


@functools.cache
def packed_inputs() -> tuple[dict[str, np.ndarray], tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """Tokens of three requests, their raw gates, and in float64 all outputs and the state after each token."""
    x = random_delta_inputs(21, batch=REQUESTS, length=LONGEST, key_heads=2, ratio=2, dk=DK, dv=DV)
    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    g, beta = gates(a, b, a_log, dt_bias)
    out, states = gated_delta_float64(x["q"], x["k"], x["v"], g, beta)
    return x, (a, b, a_log, dt_bias), out, states


class Packed:
    """A pool whose requests advance through packed calls of a fixed number of rows."""

    def __init__(self) -> None:
        self.slot = np.array([5, 2, 4], np.int32)
        self.pool = np.full((7, HEADS, DV, DK), np.nan, np.float32)  # every unused value is a sentinel
        self.position = np.zeros(REQUESTS, np.int32)

    def call(self, start: np.ndarray, length: np.ndarray) -> None:
        """Runs each request's next `length[r]` tokens at rows `start[r]`, and checks everything."""
        x, (a, b, a_log, dt_bias), out, states = packed_inputs()
        lines = [np.full((ROWS, *values.shape[2:]), np.nan, np.float32) for values in (x["q"], x["k"], x["v"], a, b)]
        owner = np.full(ROWS, -1)
        for r in range(REQUESTS):
            rows, tokens = slice(start[r], start[r] + length[r]), slice(self.position[r], self.position[r] + length[r])
            if length[r]:
                owner[rows] = r
                for line, values in zip(lines, (x["q"], x["k"], x["v"], a, b), strict=True):
                    line[rows] = values[r, tokens]
        segments = int_vectors(start, length, self.position, self.slot)
        found, after = map(np.array, prefill(*lines, a_log, dt_bias, self.pool, segments))
        touched = self.slot[length > 0]
        others = np.setdiff1d(np.arange(7), touched)
        assert_same_bits(after[others], self.pool[others], "slots of requests without rows, and slot 0")
        assert_same_bits(found[owner < 0], np.zeros(((owner < 0).sum(), HEADS, DV), np.float32), "padding rows")
        for r in np.flatnonzero(length):
            end = self.position[r] + length[r]
            assert_close(found[owner == r], out[r, self.position[r] : end], DELTA_OUT, f"outputs of request {r}")
            assert_close(after[self.slot[r]], states[r, end - 1], DELTA_STATE, f"state of request {r}")
        self.pool, self.position = after, self.position + length.astype(np.int32)


@settings(max_examples=50)
@given(data=st.data())
def test_any_segmentation_is_token_by_token(data: st.DataObject) -> None:
    packed = Packed()
    for _ in range(data.draw(st.integers(1, 5), label="calls")):
        start, length, row = np.zeros(REQUESTS, int), np.zeros(REQUESTS, int), 0
        for r in data.draw(st.permutations(range(REQUESTS)), label="order"):
            row = min(row + data.draw(st.integers(0, 3), label="padding"), ROWS)
            most = min(LONGEST - packed.position[r], ROWS - row)
            length[r] = data.draw(st.integers(0, most), label=f"length {r}")
            start[r] = row if length[r] else data.draw(st.integers(0, ROWS - 1), label="start of nothing")
            row += length[r]
        packed.call(start, length)


@pytest.mark.parametrize("pieces", [(37, 64, 49), (64, 64, 22), (1, 149), (63, 1, 86), (1,) * 20, (150,)])
def test_windows(pieces: tuple[int, ...]) -> None:
    packed = Packed()
    for size in pieces:
        packed.call(np.array([3, 0, 0]), np.array([size, 0, 0]))


def test_no_rows_at_all() -> None:
    # Terminates, and changes nothing.
    Packed().call(np.array([0, 159, 7]), np.zeros(REQUESTS, int))


def test_slot_0_stores_nothing() -> None:
    x, (a, b, a_log, dt_bias), _, _ = packed_inputs()
    pool = np.full((7, HEADS, DV, DK), np.nan, np.float32)
    inputs = [values[0] for values in (x["q"], x["k"], x["v"], a, b)]
    _, after = prefill(*inputs, a_log, dt_bias, pool, int_vectors([0], [100], [0], [0]))
    assert_same_bits(after, pool)


def test_request_does_not_depend_on_its_batch() -> None:
    x, (a, b, a_log, dt_bias), _, _ = packed_inputs()
    lines = [np.concatenate([values[r, :50] for r in range(REQUESTS)]) for values in (x["q"], x["k"], x["v"], a, b)]
    pool = np.random.default_rng(0).normal(size=(7, HEADS, DV, DK)).astype(np.float32)
    slot, start = np.array([1, 2, 3]), np.array([0, 50, 100])
    run = lambda length: prefill(*lines, a_log, dt_bias, pool, int_vectors(start, length, [4, 4, 4], slot))  # noqa: E731
    together, together_pool = run([50, 50, 50])
    for r in range(REQUESTS):
        out, after = run(np.where(np.arange(REQUESTS) == r, 50, 0))
        assert_same_bits(out[start[r] : start[r] + 50], together[start[r] : start[r] + 50], f"request {r}")
        assert_same_bits(after[slot[r]], together_pool[slot[r]], f"state of request {r}")


def test_bfloat16_pool_rounds_once_at_the_end() -> None:
    x, (a, b, a_log, dt_bias), _, _ = packed_inputs()
    inputs = [values[0] for values in (x["q"], x["k"], x["v"], a, b)]
    start = jnp.asarray(np.random.default_rng(1).normal(size=(2, HEADS, DV, DK)), jnp.bfloat16)
    segments = int_vectors([0], [LONGEST], [3], [1])
    out, after = prefill(*inputs, a_log, dt_bias, start, segments)
    exact_out, exact = prefill(*inputs, a_log, dt_bias, start.astype(jnp.float32), segments)
    assert_close(out, exact_out, DELTA_OUT)
    assert_rounded_once(after[1], exact[1], DELTA_STATE)


def test_bfloat16_inputs() -> None:
    x, (a, b, a_log, dt_bias), _, _ = packed_inputs()
    half = [jnp.asarray(values[0], jnp.bfloat16) for values in (x["q"], x["k"], x["v"], a, b)]
    out, after = prefill(*half, a_log, dt_bias, jnp.zeros((2, HEADS, DV, DK)), int_vectors([0], [LONGEST], [0], [1]))
    assert out.dtype == jnp.bfloat16 and after.dtype == jnp.float32
    g, beta = gates(half[3], half[4], a_log, dt_bias)
    exact, states = gated_delta_float64(*(values[None] for values in (*half[:3], g, beta)))
    # the rule itself stays float32: only its output is rounded
    assert_close(after[1], states[0, -1], DELTA_STATE)
    assert_close(np.asarray(out, np.float32), exact[0], 2.0**-8 * np.abs(exact).max())


# Gradients

GRADIENT_LENGTHS = [5, 64, 70]


def directional_float64(inputs: dict[str, np.ndarray], direction: dict, weights: tuple) -> float:
    """The derivative along `direction` of a weighted sum of outputs and final state, by central differences."""

    def loss(step: float) -> float:
        moved = {
            name: np.asarray(values, np.float64) + step * direction.get(name, 0.0) for name, values in inputs.items()
        }
        out, states = gated_delta_float64(**moved)
        return float((weights[0] * out).sum() + (weights[1] * states[:, -1]).sum())

    h = 1e-5
    return (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)


@jax.jit
def gradients(inputs: dict[str, jax.Array], weights: tuple[jax.Array, jax.Array]) -> dict[str, jax.Array]:
    def loss(inputs: dict[str, jax.Array]) -> jax.Array:
        out, state = gated_delta_sequence(**inputs)
        return jnp.sum(weights[0] * out) + jnp.sum(weights[1] * state)

    return jax.grad(loss)(inputs)


def assert_gradients(inputs: dict[str, np.ndarray], names: tuple[str, ...], tolerance: float = 2e-5) -> None:
    """Every named gradient along random directions, relative to the direction's and the gradient's length."""
    rng = np.random.default_rng(31)
    out_shape, state_shape = inputs["v"].shape, inputs["initial_state"].shape
    weights = (rng.normal(size=out_shape).astype(np.float32), rng.normal(size=state_shape).astype(np.float32))
    found = gradients(inputs, weights)
    for name in names:
        gradient = np.asarray(found[name], np.float64)
        assert np.isfinite(gradient).all(), name
        assert np.abs(gradient).max() > 0, name
        for _ in range(4):
            direction = rng.normal(size=gradient.shape)
            exact = directional_float64(inputs, {name: direction}, weights)
            error = abs(float((gradient * direction).sum()) - exact)
            assert error <= tolerance * max(1.0, np.linalg.norm(gradient)), f"{name}: {error:.2g} off {exact:.4g}"


@pytest.mark.parametrize("length", GRADIENT_LENGTHS)
def test_gradients(length: int) -> None:
    x = random_delta_inputs(length, batch=2, length=length, key_heads=2, ratio=2, dk=6, dv=5)
    x["initial_state"] = np.random.default_rng(1).normal(size=(2, 4, 5, 6)).astype(np.float32)
    assert_gradients(x, ("q", "k", "v", "g", "beta", "initial_state"))


@pytest.mark.parametrize("kind", STRONG)
def test_gradients_with_strong_gates_and_equal_keys(kind: str) -> None:
    x = strong(kind, 70)
    x["initial_state"] = np.random.default_rng(1).normal(size=(1, 2, 20, 12)).astype(np.float32)
    assert_gradients(x, ("q", "k", "v", "g", "beta", "initial_state"))


def test_gradient_of_every_element_of_short_inputs() -> None:
    x = random_delta_inputs(3, batch=1, length=3, key_heads=1, ratio=2, dk=3, dv=2)
    x["initial_state"] = np.random.default_rng(1).normal(size=(1, 2, 2, 3)).astype(np.float32)
    rng = np.random.default_rng(2)
    weights = (rng.normal(size=x["v"].shape), rng.normal(size=x["initial_state"].shape))
    found = gradients(x, tuple(w.astype(np.float32) for w in weights))
    weights = tuple(w.astype(np.float32).astype(np.float64) for w in weights)
    for name, values in x.items():
        expected = np.zeros(values.shape)
        for index in np.ndindex(values.shape):
            direction = np.zeros(values.shape)
            direction[index] = 1
            expected[index] = directional_float64(x, {name: direction}, weights)
        assert_close(found[name], expected, 5e-6, name)

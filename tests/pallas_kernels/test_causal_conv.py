"""The causal convolution and its ring, against Hugging Face's and against itself token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.causal_conv.reference import (
    causal_conv_decode,
    causal_conv_packed,
    causal_conv_sequence,
    ring_window,
)
from pallas_kernels.segments import Segments
from tests.helpers import assert_close, assert_same_bits, components

CONV = 1e-6
WIDTHS = (4, 5, 7)  # of the ring; the convolution's is 4

decode = jax.jit(causal_conv_decode)
packed = jax.jit(causal_conv_packed)


def golden_inputs() -> tuple[np.ndarray, np.ndarray]:
    """x `[2, 9, 12]` and weight `[12, 1, 4]`."""
    return components()["conv.x"].swapaxes(1, 2), components()["conv.weight"][:, None]


def ring_of(window: np.ndarray, position: int, columns: int) -> np.ndarray:
    """A ring for two requests whose last four inputs before `position` are `window` `[2, C, 4]`; NaN elsewhere."""
    ring = np.full((3, columns, window.shape[1]), np.nan, np.float32)
    for back in range(1, 5):
        if position - back >= 0:
            ring[1:, (position - back) % columns] = window[:, :, -back]
    return ring


def two_segments(length: int, position: int, rows: int, gap: int = 2) -> tuple[Segments, np.ndarray]:
    """Two segments with padding rows before, between and behind them, and the segment of every row."""
    starts = np.array([gap, 2 * gap + length], np.int32)
    owner = np.full(rows, -1, np.int32)
    for segment, start in enumerate(starts):
        owner[start : start + length] = segment
    full = lambda value: jnp.full(2, value, jnp.int32)  # noqa: E731
    return Segments(jnp.asarray(starts), full(length), full(position), full(0)), owner


def test_sequence() -> None:
    x, weight = golden_inputs()
    assert_close(causal_conv_sequence(x, weight).swapaxes(1, 2), components()["conv.prefill_out"], CONV)


def test_from_the_start_token_by_token() -> None:
    x, weight = golden_inputs()
    ring = jnp.full((3, 4, 12), jnp.nan)  # an empty request reads zeros whatever its ring holds
    rows = jnp.asarray([1, 2], jnp.int32)
    for t in range(x.shape[1]):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(2, t, jnp.int32))
        assert_close(y, components()["conv.prefill_out"][:, :, t], CONV, f"token {t}")
        last = np.pad(x, ((0, 0), (4, 0), (0, 0)))[:, t + 1 : t + 5]
        assert_same_bits(ring_window(ring, rows, jnp.full(2, t + 1), 4), last, f"window after token {t}")


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("position", [4, 6, 11])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_update(length: int, position: int, columns: int) -> None:
    x, weight = golden_inputs()
    x = x[:, :length]
    golden = {name: components()[f"conv.update_T{length}.{name}"] for name in ("state_in", "state_out", "out")}
    start = ring_of(golden["state_in"], position, columns)
    rows = jnp.asarray([1, 2], jnp.int32)

    # one token a step
    ring, outputs = jnp.asarray(start), []
    for t in range(length):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(2, position + t, jnp.int32))
        outputs.append(y)
    assert_close(jnp.stack(outputs, 2), golden["out"], CONV, "token by token")
    end = jnp.full(2, position + length, jnp.int32)
    assert_same_bits(ring_window(ring, rows, end, 4).swapaxes(1, 2), golden["state_out"])
    assert_same_bits(ring[0], start[0], "row 0")

    # all tokens in one packed call, behind NaN padding
    segments, owner = two_segments(length, position, rows=24)
    line = np.full((24, 12), np.nan, np.float32)
    line[owner == 0], line[owner == 1] = x
    y, ring = packed(line, weight, start, segments, owner)
    assert_close(jnp.stack([y[owner == s].T for s in range(2)]), golden["out"], CONV, "packed")
    assert_same_bits(ring_window(ring, rows, end, 4).swapaxes(1, 2), golden["state_out"])
    assert_same_bits(ring[0], start[0], "row 0")


def test_decode_leaves_other_rows_and_columns_alone() -> None:
    x, weight = golden_inputs()
    rng = np.random.default_rng(0)
    ring = rng.normal(size=(9, 5, 12)).astype(np.float32)
    rows = jnp.asarray([0, 3, 0, 7], jnp.int32)
    position = jnp.asarray([6, 6, 0, 9], jnp.int32)
    inputs = np.concatenate([x[0, :2], x[1, :2]])
    _, after = decode(inputs, weight, ring, rows, position)
    expected = ring.copy()
    expected[3, 6 % 5], expected[7, 9 % 5] = inputs[1], inputs[3]
    assert_same_bits(after, expected)
    # It wrote nothing that it reads, so a step can be run again.
    once, _ = decode(inputs, weight, ring, rows, position)
    twice, again = decode(inputs, weight, after, rows, position)
    assert_same_bits(twice, once)
    assert_same_bits(again, after)


@pytest.mark.parametrize("width", [2, 3, 8])
def test_other_widths_and_bfloat16(width: int) -> None:
    rng = np.random.default_rng(width)
    x = jnp.asarray(rng.normal(size=(1, 20, 6)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(6, 1, width)), jnp.bfloat16)
    exact = np.zeros((20, 6))
    for j in range(width):
        shifted = np.pad(np.asarray(x[0], np.float64), ((width - 1 - j, 0), (0, 0)))[:20]
        exact += shifted * np.asarray(weight[:, 0, j], np.float64)
    exact = exact / (1 + np.exp(-exact))
    whole = causal_conv_sequence(x, weight)
    assert whole.dtype == jnp.bfloat16
    # rounded once: half a step of bfloat16
    assert (np.abs(np.asarray(whole[0], np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all()
    ring = jnp.zeros((2, width, 6), jnp.bfloat16)
    for t in range(20):
        y, ring = causal_conv_decode(x[:, t], weight, ring, jnp.asarray([1]), jnp.asarray([t]))
        assert_same_bits(y, whole[:, t], f"token {t}")


REQUESTS, LONGEST, ROWS, COLUMNS = 3, 23, 32, 5


def token_by_token() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs `[requests, T, C]`, weight, outputs `[requests, T, C]`, and the ring after every token."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(REQUESTS, LONGEST, 6)).astype(np.float32)
    weight = rng.normal(size=(6, 1, 4)).astype(np.float32)
    ring = jnp.zeros((REQUESTS + 1, COLUMNS, 6))
    rows = jnp.arange(1, REQUESTS + 1, dtype=jnp.int32)
    outputs, rings = [], [np.asarray(ring)]
    for t in range(LONGEST):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(REQUESTS, t, jnp.int32))
        outputs.append(np.asarray(y))
        rings.append(np.asarray(ring))
    return x, weight, np.stack(outputs, 1), np.stack(rings)


@settings(max_examples=50)
@given(data=st.data())
def test_any_segmentation_is_token_by_token(data: st.DataObject) -> None:
    x, weight, outputs, rings = token_by_token()
    ring = np.full((REQUESTS + 1, COLUMNS, 6), 77.0, np.float32)
    position = np.zeros(REQUESTS, np.int32)
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        before, old = ring.copy(), position.copy()
        length, start = np.zeros(REQUESTS, np.int32), np.zeros(REQUESTS, np.int32)
        owner, line, row = np.full(ROWS, -1, np.int32), np.full((ROWS, 6), np.nan, np.float32), 0
        for r in data.draw(st.permutations(range(REQUESTS)), label="order"):
            row = min(row + data.draw(st.integers(0, 2), label="padding"), ROWS)
            length[r] = data.draw(st.integers(0, min(LONGEST - position[r], ROWS - row)), label=f"length {r}")
            start[r] = row if length[r] else data.draw(st.integers(0, ROWS - 1), label="start of nothing")
            owner[row : row + length[r]] = r
            line[row : row + length[r]] = x[r, position[r] : position[r] + length[r]]
            row += length[r]
        segments = Segments(*map(jnp.asarray, (start, length, position, np.zeros(REQUESTS, np.int32))))
        y, ring = map(np.array, packed(line, weight, ring, segments, owner))
        position = position + length
        for r in range(REQUESTS):
            assert_close(y[owner == r], outputs[r, old[r] : position[r]], CONV, f"outputs of request {r}")
            if length[r] == 0:
                assert_same_bits(ring[r + 1], before[r + 1], "ring of a request without rows")
            for p in range(max(0, position[r] - COLUMNS), position[r]):
                assert_same_bits(ring[r + 1, p % COLUMNS], rings[position[r], r + 1, p % COLUMNS], "ring")
        assert_same_bits(ring[0], before[0], "row 0")

"""The chunked delta rule: whole sequences, packed segments by the reference and the kernels, gradients; always
against token by token."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.columns import Columns, value
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode.reference import gates
from pallas_kernels.gated_delta_prefill import gated_delta_prefill, kernel, shapes
from pallas_kernels.gated_delta_prefill.reference import gated_delta_sequence, inverse_unit_lower
from pallas_kernels.products import pieces
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
    rule_inputs,
)

CASES = sorted({key.split(".")[1] for key in components() if key.startswith("delta.")})

ON_GPU = jax.default_backend() != "cpu"
KERNEL: Implementation = "pallas" if ON_GPU else "interpret"
both = pytest.mark.parametrize("implementation", ["reference", KERNEL])

BF16_STATE = 1e-5
"""Of the kernels' state with bfloat16 inputs: float32 operands next to them are cut to 16 bits."""

sequence = jax.jit(gated_delta_sequence)


@functools.partial(jax.jit, static_argnames=("implementation", "form"))
def prefill(q, k, v, a, b, a_log, dt_bias, pool, segments, implementation, form="columns"):
    """The operation, on rows that are packed here; a and b as columns of packed rows, or as arrays."""
    qkv, *columns = rule_inputs(q, k, v, a, b)
    a, b = columns if form == "columns" else (a, b)
    return gated_delta_prefill(qkv, a, b, a_log, dt_bias, pool, segments, implementation)


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


def strong(kind: str, length: int, key_heads: int = 1, dk: int = 12, dv: int = 20) -> dict[str, np.ndarray]:
    """Gates and keys at which a chunked form breaks first."""
    x = random_delta_inputs(5, batch=1, length=length, key_heads=key_heads, ratio=2, dk=dk, dv=dv)
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
    elif kind == "decays of -80 among slow ones":  # a difference of running sums loses the slow ones
        x["g"][:] = np.where(rng.uniform(size=x["g"].shape) < 0.2, -80.0, 0.01 * x["g"])
    return x


STRONG = [
    "all decays -50",
    "same keys, no decay, beta 1",
    "nearly the same keys",
    "decays of -80 among none",
    "decays of -80 among slow ones",
]


@pytest.mark.parametrize("kind", STRONG)
def test_strong_gates_and_equal_keys(kind: str) -> None:
    x = strong(kind, 130)
    out, states = gated_delta_float64(**x)
    found, state = sequence(**x)
    assert_close(found, out, DELTA_OUT, "outputs")
    assert_close(state, states[:, -1], DELTA_STATE, "state")


def test_inverse_unit_lower() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 16, 64):
        m = np.tril(rng.normal(size=(3, size, size)) / np.sqrt(size), -1).astype(np.float32)
        exact = np.linalg.inv(np.eye(size) + m.astype(np.float64))
        assert_close(inverse_unit_lower(m), exact, 1e-5)
    # equal keys, beta 1, no decay: all ones below the diagonal, inverse -1 on the first subdiagonal
    assert_close(inverse_unit_lower(np.tril(np.ones((64, 64), np.float32), -1)), np.eye(64) - np.eye(64, k=-1), 0.0)


# Packed segments: windows, order, padding. All calls share one shape, and so one program an implementation.

REQUESTS, LONGEST, ROWS, SLOTS = 3, 150, 160, 7
KEY_HEADS, HEADS, DK, DV = 2, 4, 16, 32
Arrays = Sequence[np.ndarray | jax.Array]


def packed(
    pieces: Sequence[Arrays],
    start: Sequence[int],
    position: Sequence[int],
    slot: Sequence[int],
    weights: Arrays,
    pool: np.ndarray | jax.Array,
    implementation: Implementation,
    rows: int = ROWS,
    form: str = "columns",
) -> tuple[list[np.ndarray], np.ndarray]:
    """Runs the q, k, v, a, b of each segment at rows `start`, among rows of NaN.

    Checks that slots of no segment and slot 0 stay as they are, and that rows of no segment are zero.

    Returns:
        Outputs by segment, and the pool.
    """
    length = [len(piece[0]) for piece in pieces]
    lines = [np.full((rows, *x.shape[1:]), np.nan, x.dtype) for x in pieces[0]]
    owner = np.full(rows, -1)
    for number, (piece, first) in enumerate(zip(pieces, start, strict=True)):
        owner[first : first + length[number]] = number
        for line, x in zip(lines, piece, strict=True):
            line[first : first + length[number]] = x
    segments = int_vectors(start, length, position, slot)
    out, after = prefill(*lines, *weights, pool, segments, implementation=implementation, form=form)
    assert out.dtype == lines[2].dtype and after.dtype == pool.dtype
    out, after, before = np.asarray(out), np.asarray(after), np.asarray(pool)
    others = np.setdiff1d(np.arange(len(before)), [s for s, n in zip(slot, length, strict=True) if n and s])
    assert_same_bits(after[others], before[others], "slots of segments without rows, and slot 0")
    unowned = out[owner < 0]
    assert_same_bits(unowned, np.zeros_like(unowned), "rows of no segment")
    return [out[owner == number] for number in range(len(pieces))], after


def alone(
    x: Arrays, weights: Arrays, pool: np.ndarray | jax.Array, position: int, implementation: Implementation
) -> tuple[np.ndarray, np.ndarray]:
    """One segment in slot 1, with two empty ones: its outputs, and the pool."""
    empty = [values[:0] for values in x]
    out, after = packed([empty, x, empty], [9, 2, 9], [3, position, 0], [2, 1, 4], weights, pool, implementation)
    return out[1], after


def unused_pool(dtype: jax.typing.DTypeLike = np.float32) -> np.ndarray:
    """A pool that holds NaN wherever no request put something."""
    return np.full((SLOTS, HEADS, DV, DK), np.nan, dtype)


@both
@pytest.mark.parametrize("case", CASES)
def test_packed_golden_cases(case: str, implementation: Implementation) -> None:
    x, start = golden_inputs(case)
    batch, length, heads, dv = x["v"].shape
    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    # As the shared shape has it: heads repeated, and the values' dimensions, which do not mix, padded.
    value_heads = np.arange(HEADS) * heads // HEADS if x["k"].shape[2] == KEY_HEADS else np.arange(HEADS) % heads
    key_heads = np.arange(KEY_HEADS) % x["k"].shape[2]

    def padded(values: np.ndarray, axis: int) -> np.ndarray:
        widths = [(0, 0)] * values.ndim
        widths[axis] = (0, DV - dv)
        return np.pad(values, widths)

    pool = unused_pool()
    slot = 3 - np.arange(REQUESTS)
    if start is not None:
        pool[slot[:batch]] = padded(start[:, value_heads], 2)
    v = padded(x["v"][:, :, value_heads], 3)
    inputs = (x["q"][:, :, key_heads], x["k"][:, :, key_heads], v, a[:, :, value_heads], b[:, :, value_heads])
    pieces = [[values[r] if r < batch else values[0, :0] for values in inputs] for r in range(REQUESTS)]
    begin = [2 + (length + 3) * r if r < batch else 0 for r in range(REQUESTS)]
    position = [0 if start is None else 9] * REQUESTS
    weights = (a_log[value_heads], dt_bias[value_heads])
    out, after = packed(pieces, begin, position, slot.tolist(), weights, pool, implementation)
    expected, state = (components()[f"delta.{case}.{name}"] for name in ("f64_out", "f64_state"))
    for_out, for_state = tolerances(x["g"])
    for r in range(batch):
        assert_close(out[r][..., :dv], expected[r][:, value_heads], for_out, "outputs")
        found = after[slot[r], :, :dv].swapaxes(-1, -2)
        assert_close(found, state[r][value_heads], for_state, "state")


@both
@pytest.mark.parametrize("kind", STRONG)
def test_packed_strong_gates_and_equal_keys(kind: str, implementation: Implementation) -> None:
    x = strong(kind, 130, KEY_HEADS, DK, DV)
    expected, states = gated_delta_float64(**x)
    a, b, *weights = raw_gates(x["g"], x["beta"])
    out, after = alone([x["q"][0], x["k"][0], x["v"][0], a[0], b[0]], weights, unused_pool(), 0, implementation)
    assert_close(out, expected[0], DELTA_OUT, "outputs")
    assert_close(after[1], states[0, -1], DELTA_STATE, "state")


@functools.cache
def packed_inputs() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...], np.ndarray, np.ndarray]:
    """q, k, v, a, b of three requests, A_log and dt_bias, and in float64 all outputs and the state after each token."""
    x = random_delta_inputs(21, batch=REQUESTS, length=LONGEST, key_heads=KEY_HEADS, ratio=2, dk=DK, dv=DV)
    a, b, a_log, dt_bias = raw_gates(x["g"], x["beta"])
    g, beta = gates(a, b, a_log, dt_bias)
    out, states = gated_delta_float64(x["q"], x["k"], x["v"], g, beta)
    return (x["q"], x["k"], x["v"], a, b), (a_log, dt_bias), out, states


class Packed:
    """A pool whose requests advance through packed calls of a fixed number of rows."""

    def __init__(self, implementation: Implementation) -> None:
        self.implementation: Implementation = implementation
        self.slot = np.array([5, 2, 4], np.int32)
        self.pool = unused_pool()
        self.position = np.zeros(REQUESTS, np.int32)

    def call(self, start: np.ndarray, length: np.ndarray) -> None:
        """Runs each request's next `length[r]` tokens at rows `start[r]`, and checks everything."""
        inputs, weights, out, states = packed_inputs()
        tokens = [slice(self.position[r], self.position[r] + length[r]) for r in range(REQUESTS)]
        pieces = [[values[r, tokens[r]] for values in inputs] for r in range(REQUESTS)]
        found, after = packed(
            pieces, start.tolist(), self.position.tolist(), self.slot.tolist(), weights, self.pool, self.implementation
        )
        for r in np.flatnonzero(length):
            assert_close(found[r], out[r, tokens[r]], DELTA_OUT, f"outputs of request {r}")
            assert_close(after[self.slot[r]], states[r, tokens[r].stop - 1], DELTA_STATE, f"state of request {r}")
        self.pool, self.position = after, self.position + length.astype(np.int32)


@both
@settings(max_examples=30)
@given(data=st.data())
def test_any_segmentation_is_token_by_token(implementation: Implementation, data: st.DataObject) -> None:
    packed = Packed(implementation)
    for _ in range(data.draw(st.integers(1, 5), label="calls")):
        start, length, row = np.zeros(REQUESTS, int), np.zeros(REQUESTS, int), 0
        for r in data.draw(st.permutations(range(REQUESTS)), label="order"):
            row = min(row + data.draw(st.integers(0, 3), label="padding"), ROWS)
            most = min(LONGEST - packed.position[r], ROWS - row)
            length[r] = data.draw(st.integers(0, most), label=f"length {r}")
            start[r] = row if length[r] else data.draw(st.integers(0, ROWS - 1), label="start of nothing")
            row += length[r]
        packed.call(start, length)


@pytest.mark.newest
@both
@pytest.mark.parametrize("pieces", [(37, 64, 49), (64, 64, 22), (1, 149), (63, 1, 86), (1,) * 20, (150,)])
def test_windows(pieces: tuple[int, ...], implementation: Implementation) -> None:
    packed = Packed(implementation)
    for size in pieces:
        packed.call(np.array([3, 0, 0]), np.array([size, 0, 0]))


@both
def test_no_rows_at_all(implementation: Implementation) -> None:
    # Terminates, and changes nothing.
    Packed(implementation).call(np.array([0, 159, 7]), np.zeros(REQUESTS, int))


@both
def test_slot_0_stores_nothing(implementation: Implementation) -> None:
    inputs, weights, expected, _ = packed_inputs()
    pieces = [[values[r, : 100 * (r == 0)] for values in inputs] for r in range(REQUESTS)]
    out, _ = packed(pieces, [0, 0, 0], [0, 0, 0], [0, 1, 2], weights, unused_pool(), implementation)
    assert_close(out[0], expected[0, :100], DELTA_OUT)


@both
def test_request_does_not_depend_on_its_batch(implementation: Implementation) -> None:
    inputs, weights, _, _ = packed_inputs()
    pool = np.random.default_rng(0).normal(size=(SLOTS, HEADS, DV, DK)).astype(np.float32)
    slot = [1, 2, 3]

    def run(length: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        pieces = [[values[r, : length[r]] for values in inputs] for r in range(REQUESTS)]
        return packed(pieces, [0, 50, 100], [4, 4, 4], slot, weights, pool, implementation)

    together, together_pool = run([50, 50, 50])
    for r in range(REQUESTS):
        out, after = run([50 * (other == r) for other in range(REQUESTS)])
        assert_same_bits(out[r], together[r], f"request {r}")
        assert_same_bits(after[slot[r]], together_pool[slot[r]], f"state of request {r}")


@both
def test_bfloat16_pool_rounds_once_at_the_end(implementation: Implementation) -> None:
    inputs, weights, _, _ = packed_inputs()
    x = [values[0] for values in inputs]
    start = jnp.asarray(np.random.default_rng(1).normal(size=(SLOTS, HEADS, DV, DK)), jnp.bfloat16)
    out, after = alone(x, weights, start, 3, implementation)
    exact_out, exact = alone(x, weights, start.astype(jnp.float32), 3, implementation)
    assert_close(out, exact_out, DELTA_OUT)
    assert_rounded_once(after[1], exact[1], DELTA_STATE)


@both
@pytest.mark.parametrize("kind", ["ordinary", *STRONG])
def test_bfloat16_inputs(kind: str, implementation: Implementation) -> None:
    x = strong(kind, LONGEST, KEY_HEADS, DK, DV)
    a, b, *weights = raw_gates(x["g"], x["beta"])
    half = [np.asarray(values[0], jnp.bfloat16) for values in (x["q"], x["k"], x["v"], a, b)]
    out, after = alone(half, weights, unused_pool(), 0, implementation)
    g, beta = gates(half[3], half[4], *weights)
    exact, states = gated_delta_float64(*(np.asarray(values, np.float32)[None] for values in (*half[:3], g, beta)))
    # the rule itself stays float32 or close to it: only its output is rounded
    assert_close(after[1], states[0, -1], DELTA_STATE if implementation == "reference" else BF16_STATE)
    assert_close(out.astype(np.float32), exact[0], 2.0**-8 * np.abs(exact).max())


@pytest.mark.parametrize(
    ("ratio", "dtype", "pool_dtype"),
    [(3, jnp.float32, jnp.float32), (4, jnp.bfloat16, jnp.bfloat16)]
    + [(ratio, jnp.bfloat16, jnp.float32) for ratio in (1, 2) if ON_GPU],  # interpreted, each takes long
)
def test_real_head_sizes(ratio: int, dtype: jnp.dtype, pool_dtype: jnp.dtype) -> None:
    lengths = [1, 3, 63, 0, 64, 65, 127, 129, 200]
    x = random_delta_inputs(ratio, batch=1, length=sum(lengths), key_heads=1, ratio=ratio, dk=128, dv=128)
    a, b, *weights = raw_gates(x["g"], x["beta"])
    inputs = [np.asarray(values[0], dtype) for values in (x["q"], x["k"], x["v"], a, b)]
    rng = np.random.default_rng(0)
    slot = 1 + rng.permutation(len(lengths))
    pool = (0.3 * rng.normal(size=(len(lengths) + 2, ratio, 128, 128))).astype(pool_dtype)
    pool[slot[0]] = np.nan  # starts from nothing
    position = [5 * (number > 0) for number in range(len(lengths))]
    ends = np.cumsum(lengths)
    pieces = [[values[end - n : end] for values in inputs] for n, end in zip(lengths, ends, strict=True)]
    start = [end - n + 2 * (number > 2) for number, (n, end) in enumerate(zip(lengths, ends, strict=True))]
    out, after = packed(pieces, start, position, slot.tolist(), weights, pool, KERNEL, rows=661)

    for number in np.flatnonzero(lengths):
        q, k, v, a, b = (values.astype(np.float32) for values in pieces[number])
        g, beta = map(np.asarray, gates(a, b, *weights))
        stored = pool[slot[number]][None].astype(np.float32) if position[number] else None
        expected, states = gated_delta_float64(*(values[None] for values in (q, k, v, g, beta)), initial_state=stored)
        exact, found = jnp.asarray(states[0, -1], jnp.float32), after[slot[number]]
        tolerance = DELTA_STATE if dtype == jnp.float32 else BF16_STATE
        if pool_dtype == jnp.float32:
            assert_close(found, exact, tolerance, f"state after {lengths[number]} tokens")
        else:
            assert_rounded_once(found, exact, tolerance, f"state after {lengths[number]} tokens")
        rounding = 0.0 if dtype == jnp.float32 else 2.0**-8 * np.abs(expected).max()
        assert_close(out[number].astype(np.float32), expected[0], DELTA_OUT + rounding, f"{lengths[number]} tokens")


def test_order_of_programs_and_of_loads_and_form_of_inputs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, weights, _, _ = packed_inputs()
    pieces = [[values[r, :n] for values in inputs] for r, n in enumerate((70, 0, 65))]
    pool = np.random.default_rng(0).normal(size=(SLOTS, HEADS, DV, DK)).astype(np.float32)

    def run(form: str) -> tuple[list[np.ndarray], np.ndarray]:
        return packed(pieces, [1, 0, 80], [4, 4, 4], [1, 2, 3], weights, pool, KERNEL, form=form)

    expected, expected_pool = run("columns")
    monkeypatch.setattr(kernel, "device_kind", lambda: "gfx1100")  # loads operands late
    if not ON_GPU:  # Interpreted programs run one by one: were one to read what another writes, it would show.
        forward = kernel.pl.program_id
        monkeypatch.setattr(kernel.pl, "program_id", lambda axis: kernel.pl.num_programs(axis) - 1 - forward(axis))
    prefill.clear_cache()
    out, after = run("arrays")
    prefill.clear_cache()
    assert_same_bits(after, expected_pool)
    for found, exact in zip(out, expected, strict=True):
        assert_same_bits(found, exact)


# What the kernels are made of, and the public function


def test_the_table_of_segments_finds_their_chunks() -> None:
    lengths = [0, 130, 1, 0, 64]
    start, owner = np.cumsum([0, *lengths[:-1]]), np.arange(5)
    table = np.asarray(kernel.segment_table(int_vectors(start, lengths, owner, owner + 10)))
    assert table[:, kernel.FIRST_CHUNK][[1, 2, 4]].tolist() == [0, 3, 4]
    assert table[:, 1:].tolist() == np.stack([start, lengths, owner, owner + 10], axis=1).tolist()


@pytest.mark.parametrize(("count", "error"), [(2, 2.0**-16), (3, 0.0)])
def test_pieces_add_up(count: int, error: float) -> None:
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.logspace(-20, 20, 1000, dtype=np.float32)
    cut = [np.asarray(piece, np.float64) for piece in jax.jit(pieces, static_argnums=1)(x, count)]
    assert (np.abs(sum(cut) - x) <= error * np.abs(x)).all()
    assert (np.abs(cut[0] - x) <= 2.0**-8 * np.abs(x)).all()


def small_arguments(dv: int = 16) -> dict[str, np.ndarray | Segments]:
    names = "qkv a b a_log dt_bias pool segments".split()
    shape = shapes.Shape("", 2, 4, 16, dv)
    made = jax.eval_shape(lambda key: shapes.packed_arguments(shape, [5, 3], key), jax.random.key(0))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), made)
    return {name: value(array) for name, array in zip(names, zeros, strict=True)}


def test_what_does_not_fit_is_refused() -> None:
    arguments = small_arguments()
    segments = arguments["segments"]
    assert isinstance(segments, Segments)
    wrong = {
        "qkv has shape": {"qkv": arguments["qkv"][:, :-1]},
        "a is bfloat16": {"a": arguments["a"][:, :2]},
        "b is bfloat16": {"b": Columns(arguments["b"], 1, 2)},
        "b is float32": {"b": arguments["b"].astype(np.float32)},
        "a_log is bfloat16": {"a_log": arguments["a_log"].astype(jnp.bfloat16)},
        "dt_bias is": {"dt_bias": arguments["dt_bias"][:3]},
        "pool is float16": {"pool": arguments["pool"].astype(jnp.float16)},
        "segments.slot is": {"segments": dataclasses.replace(segments, slot=segments.slot[:1])},
    }
    for message, changed in wrong.items():
        with pytest.raises(ValueError, match=rf"\b{message}\b.* takes? "):
            jax.eval_shape(gated_delta_prefill, **{**arguments, **changed})
    jax.eval_shape(gated_delta_prefill, **arguments)


def test_sizes_that_are_no_power_of_two_take_the_reference_and_say_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatch._say_once.cache_clear()
    monkeypatch.setattr(kernel, "launch", None)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        jax.eval_shape(functools.partial(gated_delta_prefill, implementation=KERNEL), **small_arguments(dv=24))
    assert "value head dimension 24 is no power of two" in caplog.text


def test_bytes_moved() -> None:
    # 0.8B: 16 heads of q, k, v and output, and 1 MiB of state twice
    shape = shapes.SHAPES[0]
    assert shapes.bytes_moved(shape, 100) == 100 * 4 * 16 * 128 * 2 + 2 * 2**20
    assert shapes.bytes_moved(shape, 100, segments=3, pool_dtype=jnp.bfloat16) == 100 * 16384 + 3 * 2**20


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

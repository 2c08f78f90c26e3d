"""The causal convolution and its ring, by reference and kernels: against Hugging Face's and against itself
token by token."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdnjax.config.presets import from_preset
from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed, kernel, shapes
from pallas_kernels.causal_conv.reference import causal_conv_sequence, ring_window
from pallas_kernels.columns import Columns
from pallas_kernels.dispatch import Implementation
from pallas_kernels.segments import Segments
from tests.helpers import assert_close, assert_same_bits, columns_of, components

CONV = 1e-6
WIDTHS = (4, 7)  # of the ring; the convolution's is 4

ON_GPU = jax.default_backend() != "cpu"
KERNEL: Implementation = "pallas" if ON_GPU else "interpret"
both = pytest.mark.parametrize("implementation", ["reference", KERNEL])


@functools.partial(jax.jit, static_argnames=("implementation", "form"))
def decode(x, weight, ring, ring_row, position, implementation, form="columns"):
    """The operation, on columns of packed rows or on an array."""
    (x,) = columns_of(x) if form == "columns" else (x,)
    return causal_conv_decode(x, weight, ring, ring_row, position, implementation)


@functools.partial(jax.jit, static_argnames=("implementation", "form"))
def packed(x, weight, ring, segments, segment_of_row, implementation, form="columns"):
    """The operation, on columns of packed rows or on an array."""
    (x,) = columns_of(x) if form == "columns" else (x,)
    return causal_conv_packed(x, weight, ring, segments, segment_of_row, implementation)


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


def make_segments(
    lengths: list[int], positions: list[int], rows: int, gap: int, order: list[int] | None = None
) -> tuple[Segments, np.ndarray]:
    """Segments with `gap` padding rows before, between and behind them, and the segment of every row."""
    start, owner, row = np.zeros(len(lengths), np.int32), np.full(rows, -1, np.int32), gap
    for segment in order or range(len(lengths)):
        start[segment] = row
        owner[row : row + lengths[segment]] = segment
        row += lengths[segment] + gap
    vectors = (start, lengths, positions, np.zeros(len(lengths)))
    return Segments(*(jnp.asarray(np.asarray(v, np.int32)) for v in vectors)), owner


def test_sequence() -> None:
    x, weight = golden_inputs()
    assert_close(causal_conv_sequence(x, weight).swapaxes(1, 2), components()["conv.prefill_out"], CONV)


@both
def test_from_the_start_token_by_token(implementation: Implementation) -> None:
    x, weight = golden_inputs()
    ring = jnp.full((3, 4, 12), jnp.nan)  # an empty request reads zeros whatever its ring holds
    rows = jnp.asarray([1, 2], jnp.int32)
    for t in range(x.shape[1]):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(2, t, jnp.int32), implementation)
        assert_close(y, components()["conv.prefill_out"][:, :, t], CONV, f"token {t}")
        last = np.pad(x, ((0, 0), (4, 0), (0, 0)))[:, t + 1 : t + 5]
        assert_same_bits(ring_window(ring, rows, jnp.full(2, t + 1), 4), last, f"window after token {t}")


@both
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("position", [4, 6, 11])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 9])
def test_update(length: int, position: int, columns: int, implementation: Implementation) -> None:
    x, weight = golden_inputs()
    x = x[:, :length]
    golden = {name: components()[f"conv.update_T{length}.{name}"] for name in ("state_in", "state_out", "out")}
    start = ring_of(golden["state_in"], position, columns)
    rows = jnp.asarray([1, 2], jnp.int32)

    # one token a step
    ring, outputs = jnp.asarray(start), []
    for t in range(length):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(2, position + t, jnp.int32), implementation)
        outputs.append(y)
    assert_close(jnp.stack(outputs, 2), golden["out"], CONV, "token by token")
    end = jnp.full(2, position + length, jnp.int32)
    assert_same_bits(ring_window(ring, rows, end, 4).swapaxes(1, 2), golden["state_out"])
    assert_same_bits(ring[0], start[0], "row 0")

    # all tokens in one packed call, behind NaN padding
    segments, owner = make_segments([length] * 2, [position] * 2, rows=24, gap=2)
    line = np.full((24, 12), np.nan, np.float32)
    line[owner == 0], line[owner == 1] = x
    y, ring = packed(line, weight, start, segments, owner, implementation)
    y = np.asarray(y)
    assert_close(jnp.stack([y[owner == s].T for s in range(2)]), golden["out"], CONV, "packed")
    assert_same_bits(ring_window(ring, rows, end, 4).swapaxes(1, 2), golden["state_out"])
    assert_same_bits(ring[0], start[0], "row 0")
    if implementation != "reference":
        assert_same_bits(y[owner < 0], np.zeros((24 - 2 * length, 12), np.float32), "padding rows")


@both
def test_decode_leaves_other_rows_and_columns_alone(implementation: Implementation) -> None:
    x, weight = golden_inputs()
    rng = np.random.default_rng(0)
    ring = rng.normal(size=(9, 5, 12)).astype(np.float32)
    ring[[0, 1, 8]] = np.nan  # sentinels
    rows = jnp.asarray([0, 3, 0, 7], jnp.int32)
    position = jnp.asarray([6, 6, 0, 9], jnp.int32)
    inputs = np.concatenate([x[0, :2], x[1, :2]])
    once, after = decode(inputs, weight, ring, rows, position, implementation)
    expected = ring.copy()
    expected[3, 6 % 5], expected[7, 9 % 5] = inputs[1], inputs[3]
    assert_same_bits(after, expected)
    # It wrote nothing that it reads, so a step can be run again.
    twice, again = decode(inputs, weight, after, rows, position, implementation)
    assert_same_bits(twice, once)
    assert_same_bits(again, after)
    assert np.isfinite(np.asarray(once)[[1, 3]]).all()
    if implementation != "reference":
        assert_same_bits(np.asarray(once)[[0, 2]], np.zeros((2, 12), np.float32), "padding rows")


@both
@pytest.mark.parametrize("width", [2, 3])
def test_other_widths_and_bfloat16(width: int, implementation: Implementation) -> None:
    rng = np.random.default_rng(width)
    x = jnp.asarray(rng.normal(size=(1, 20, 8)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(8, 1, width)), jnp.bfloat16)
    exact = np.zeros((20, 8))
    for j in range(width):
        shifted = np.pad(np.asarray(x[0], np.float64), ((width - 1 - j, 0), (0, 0)))[:20]
        exact += shifted * np.asarray(weight[:, 0, j], np.float64)
    exact = exact / (1 + np.exp(-exact))
    whole = causal_conv_sequence(x, weight)
    assert whole.dtype == jnp.bfloat16
    # rounded once: half a step of bfloat16
    assert (np.abs(np.asarray(whole[0], np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-6).all()
    start = jnp.zeros((2, width, 8), jnp.bfloat16)
    ring, tokens = start, []
    for t in range(20):
        y, ring = decode(x[:, t], weight, ring, jnp.asarray([1]), jnp.asarray([t]), implementation)
        tokens.append(y[0])
    # The kernel's SiLU may differ from the reference's in the last bit of float32.
    close = functools.partial(assert_close, tolerance=2.0**-7 * float(np.abs(exact).max()))
    if implementation == "reference":
        assert_same_bits(jnp.stack(tokens), whole[0])
    else:
        close(jnp.stack(tokens).astype(jnp.float32), whole[0].astype(jnp.float32))
    segments, owner = make_segments([20], [0], rows=20, gap=0)
    y, packed_ring = packed(x[0], weight, start, segments, owner, implementation)
    assert_same_bits(y, jnp.stack(tokens), "packed")
    assert_same_bits(packed_ring, ring, "ring after packed")


REQUESTS, LONGEST, ROWS, COLUMNS = 3, 23, 32, 5


@functools.cache
def token_by_token(implementation: Implementation) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Inputs `[requests, T, C]`, weight, outputs `[requests, T, C]`, and the ring after every token."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(REQUESTS, LONGEST, 8)).astype(np.float32)
    weight = rng.normal(size=(8, 1, 4)).astype(np.float32)
    ring = jnp.zeros((REQUESTS + 1, COLUMNS, 8))
    rows = jnp.arange(1, REQUESTS + 1, dtype=jnp.int32)
    outputs, rings = [], [np.asarray(ring)]
    for t in range(LONGEST):
        y, ring = decode(x[:, t], weight, ring, rows, jnp.full(REQUESTS, t, jnp.int32), implementation)
        outputs.append(np.asarray(y))
        rings.append(np.asarray(ring))
    return x, weight, np.stack(outputs, 1), np.stack(rings)


@both
@settings(max_examples=50)
@given(data=st.data())
def test_any_segmentation_is_token_by_token(implementation: Implementation, data: st.DataObject) -> None:
    x, weight, outputs, rings = token_by_token(implementation)
    ring = np.full((REQUESTS + 1, COLUMNS, 8), np.nan, np.float32)
    position = np.zeros(REQUESTS, np.int32)
    for _ in range(data.draw(st.integers(1, 6), label="calls")):
        before, old = ring.copy(), position.copy()
        length, start = np.zeros(REQUESTS, np.int32), np.zeros(REQUESTS, np.int32)
        owner, line, row = np.full(ROWS, -1, np.int32), np.full((ROWS, 8), np.nan, np.float32), 0
        for r in data.draw(st.permutations(range(REQUESTS)), label="order"):
            row = min(row + data.draw(st.integers(0, 2), label="padding"), ROWS)
            length[r] = data.draw(st.integers(0, min(LONGEST - position[r], ROWS - row)), label=f"length {r}")
            start[r] = row if length[r] else data.draw(st.integers(0, ROWS - 1), label="start of nothing")
            owner[row : row + length[r]] = r
            line[row : row + length[r]] = x[r, position[r] : position[r] + length[r]]
            row += length[r]
        segments = Segments(*map(jnp.asarray, (start, length, position, np.zeros(REQUESTS, np.int32))))
        y, ring = map(np.array, packed(line, weight, ring, segments, owner, implementation))
        position = position + length
        for r in range(REQUESTS):
            # Element by element the same arithmetic: the same bits however a request is cut.
            assert_same_bits(y[owner == r], outputs[r, old[r] : position[r]], f"outputs of request {r}")
            if length[r] == 0:
                assert_same_bits(ring[r + 1], before[r + 1], "ring of a request without rows")
            for p in range(max(0, position[r] - COLUMNS), position[r]):
                assert_same_bits(ring[r + 1, p % COLUMNS], rings[position[r], r + 1, p % COLUMNS], "ring")
        assert_same_bits(ring[0], before[0], "row 0")


# The kernels


def random_inputs(
    seed: int, rows: int, channels: int, requests: int, columns: int = 4, dtype: jnp.dtype = jnp.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, weight and a ring full of numbers."""
    rng = np.random.default_rng(seed)
    sizes = [(rows, channels), (channels, 1, 4), (requests + 1, columns, channels)]
    x, weight, ring = (rng.normal(size=size).astype(dtype) for size in sizes)
    return x, weight, ring


@pytest.mark.parametrize(("channels", "dtype"), [(12, jnp.float32), (768, jnp.bfloat16)])
def test_kernels_against_the_reference(channels: int, dtype: jnp.dtype) -> None:
    x, weight, ring = random_inputs(1, 23, channels, 5, 6, dtype)
    segments, owner = make_segments([9, 0, 1, 2, 4], [0, 3, 2, 50, 7], rows=23, gap=1, order=[3, 0, 4, 2, 1])
    one_each = (x[:4], weight, ring, np.array([3, 0, 5, 1], np.int32), np.array([2, 0, 0, 77], np.int32))
    for function, arguments, live in (
        (packed, (x, weight, ring, segments, owner), owner >= 0),
        (decode, one_each, one_each[3] > 0),
    ):
        expected, expected_ring = function(*arguments, implementation="reference")
        out, after = function(*arguments, implementation=KERNEL)
        assert out.dtype == dtype
        out, expected = np.asarray(out, np.float32)[live], np.asarray(expected, np.float32)[live]
        assert_close(out, expected, CONV if dtype == jnp.float32 else 2.0**-7 * np.abs(expected).max())
        assert_same_bits(after, expected_ring, "ring")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("channels", "columns", "dtype"),
    [(512, 4, jnp.bfloat16), (512, 5, jnp.float32), (24, 4, jnp.float32)],
)
def test_decode_is_packed_of_one_token(channels: int, columns: int, dtype: jnp.dtype) -> None:
    x, weight, ring = random_inputs(2, 8, channels, 6, columns, dtype)
    position = [0, 1, 2, 3, 9, 40]
    segments, owner = make_segments([1, 1, 0, 1, 1, 1], position, rows=8, gap=0, order=[4, 1, 0, 5, 3, 2])
    y, after = packed(x, weight, ring, segments, owner, KERNEL)
    row_position = np.where(owner >= 0, np.asarray(position, np.int32)[owner], 0).astype(np.int32)
    one, one_after = decode(x, weight, ring, owner + 1, row_position, KERNEL)
    assert_same_bits(one, y)
    assert_same_bits(one_after, after)


@both
def test_row_does_not_depend_on_its_batch(implementation: Implementation) -> None:
    # The same compiled program of 64 rows: all of them live, eight, and one alone among padding.
    x, weight, ring = random_inputs(3, 64, 24, 64)
    position = np.arange(64, dtype=np.int32) // 8

    def run(live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.where(live, np.arange(1, 65), 0).astype(np.int32)
        y, after = decode(x, weight, ring, rows, position, implementation)
        return np.asarray(y), np.asarray(after)

    together, eight = run(np.ones(64, bool)), run(np.arange(64) % 8 == 3)
    for row in (3, 11, 59):
        alone = run(np.arange(64) == row)
        for other in (eight, together):
            assert_same_bits(alone[0][row], other[0][row], f"row {row}")
            assert_same_bits(alone[1][row + 1], other[1][row + 1], f"ring of row {row}")
        assert_same_bits(np.delete(alone[1], row + 1, 0), np.delete(ring, row + 1, 0), "other rings")


@pytest.mark.skipif(ON_GPU, reason="a GPU runs programs in an order of its own")
def test_order_of_programs_and_form_of_inputs_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    # Interpreted programs run one by one: were any to read what another writes, turning the order would show.
    lengths, positions = [5, 1, 9, 3, 2], [3, 1, 20, 0, 6]
    x, weight, ring = random_inputs(4, 23, 12, 5, 6)
    segments, owner = make_segments(lengths, positions, rows=23, gap=0, order=[2, 0, 4, 1, 3])
    decode_arguments = (x[:4], weight, ring, np.arange(1, 5, dtype=np.int32), np.asarray(positions[:4], np.int32))

    def run(form: str) -> list[np.ndarray]:
        results = packed(x, weight, ring, segments, owner, implementation=KERNEL, form=form)
        return [np.asarray(r) for r in (*results, *decode(*decode_arguments, implementation=KERNEL, form=form))]

    forward, forward_id = run("columns"), kernel.pl.program_id
    monkeypatch.setattr(kernel.pl, "program_id", lambda axis: kernel.pl.num_programs(axis) - 1 - forward_id(axis))
    turned = run("arrays")
    # Compiled with the order turned: nobody else may get these.
    packed.clear_cache()
    decode.clear_cache()
    for a, b in zip(turned, forward, strict=True):
        assert_same_bits(a, b)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, ring = random_inputs(0, 3, 8, 3)
    ints = np.arange(3, dtype=np.int32)
    segments, owner = make_segments([1, 1, 1], [0, 0, 0], rows=3, gap=0)
    good = dict(x=x, weight=weight, ring=ring, ring_row=ints, position=ints)
    wrong = {
        "x": x[:, :4],
        "weight": weight[:, 0],
        "ring": ring[:, :3],
        "ring_row": ints.astype(np.float32),
        "position": ints[:2],
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=rf"\b{name}\b.*take"):
            causal_conv_decode(**{**good, name: value})
    with pytest.raises(ValueError, match=r"columns 5 to 13 of an array of shape \(3, 12\)"):
        causal_conv_decode(**{**good, "x": Columns(np.zeros((3, 12), np.float32), 5, 8)})
    with pytest.raises(ValueError, match="ring is bfloat16"):
        causal_conv_decode(**{**good, "ring": ring.astype(jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"segments\.start is int32\[3\]"):
        causal_conv_packed(x, weight, ring[:3], segments, owner)
    with pytest.raises(ValueError, match="segment_of_row is int32"):
        causal_conv_packed(x, weight, ring, segments, owner[:2])


def test_shapes_of_the_benchmarks() -> None:
    for shape in shapes.SHAPES:
        if shape.name != "397B":
            c = from_preset(shape.name.lower())
            assert (shape.channels, shape.width) == (c.conv_channels, c.linear_conv_kernel_dim), shape.name
            assert shape.projected == c.conv_channels + c.value_channels + 2 * c.linear_num_value_heads
    tiny, key = shapes.SHAPES[-1], jax.random.key(0)
    arguments = jax.jit(lambda key: shapes.arguments(tiny, 3, key, spare=2))(key)
    packed_arguments = jax.jit(lambda key: shapes.packed_arguments(tiny, [3, 1, 7], key))(key)
    for function, given_arguments in ((causal_conv_decode, arguments), (causal_conv_packed, packed_arguments)):
        out, ring = jax.eval_shape(functools.partial(function, implementation=KERNEL), *given_arguments)
        assert out.shape == given_arguments[0].shape and ring.shape == given_arguments[2].shape
    ring_rows, (segments, owner) = arguments[3].tolist(), packed_arguments[3:]
    assert len(set(ring_rows)) == 3 and min(ring_rows) > 0 and max(ring_rows) <= 5
    assert owner.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert segments.start.tolist() == [0, 3, 4] and segments.length.tolist() == [3, 1, 7]
    # 0.8B: in, out, three columns read, one written, and the weight
    assert shapes.bytes_moved(shapes.SHAPES[0], 64) == 6144 * 2 * (64 * 6 + 4)

"""How a packed batch is cut into chunks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segments import CHUNK, Segments, chunk_at, chunk_table, count_chunks, owned_rows


@settings(max_examples=30)
@given(
    lengths=st.lists(st.one_of(st.just(0), st.integers(1, 200)), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    gap=st.integers(0, 3),
)
def test_chunks_cover_every_row_once_and_in_order(lengths: list[int], order: list[int], gap: int) -> None:
    starts, end = [0] * 4, 0
    for segment in order:
        starts[segment] = end + gap
        end += gap + lengths[segment]
    rows = 4 * (200 + 3)
    zeros = jnp.zeros(4, jnp.int32)
    segments = Segments(jnp.asarray(starts, jnp.int32), jnp.asarray(lengths, jnp.int32), zeros, zeros)

    count = int(count_chunks(segments))
    assert count == sum(-(-n // CHUNK) for n in lengths)
    covered: list[list[int]] = [[] for _ in lengths]
    for index in range(count):
        chunk = chunk_at(segments, jnp.asarray(index), rows)
        segment, live = int(chunk.segment), np.asarray(chunk.live)
        assert bool(chunk.first) == (not covered[segment])
        assert int(chunk.offset) == len(covered[segment])
        assert ((chunk.rows >= 0) & (chunk.rows < rows)).all()
        assert live.any() and (np.diff(live.astype(int)) <= 0).all()
        covered[segment] += np.asarray(chunk.rows)[live].tolist()
        assert bool(chunk.last) == (len(covered[segment]) == lengths[segment])
    for start, length, seen in zip(starts, lengths, covered, strict=True):
        assert seen == list(range(start, start + length))


tables = functools.partial(jax.jit, static_argnums=(1, 2))(
    lambda segments, rows, size: (chunk_table(segments, rows, size), owned_rows(segments, rows))
)


@pytest.mark.parametrize("size", [10, CHUNK])
@settings(max_examples=30)
@given(lengths=st.lists(st.one_of(st.just(0), st.integers(1, 130)), min_size=5, max_size=5), spare=st.integers(0, 70))
def test_chunk_table(size: int, lengths: list[int], spare: int) -> None:
    rows, position = 720, 7 * np.arange(5)
    start = np.cumsum([0, *lengths[:-1]]) + spare
    vectors = (jnp.asarray(vector, jnp.int32) for vector in (start, lengths, position, position))
    chunks, owned = map(np.asarray, tables(Segments(*vectors), rows, size))
    expected = [
        [start[segment] + done, min(size, length - done), segment, position[segment] + done]
        for segment, length in enumerate(lengths)
        for done in range(0, length, size)
    ]
    assert chunks[: len(expected)].tolist() == expected
    # as many as there are rows to clear, too
    assert (chunks[len(expected) :, 1] == 0).all() and len(chunks) >= rows / size
    assert np.flatnonzero(owned).tolist() == list(range(spare, spare + sum(lengths)))


def test_every_row_a_segment_of_its_own_has_a_chunk() -> None:
    row, ones = jnp.arange(70, dtype=jnp.int32), jnp.ones(70, jnp.int32)
    chunks, _ = tables(Segments(row, ones, ones, ones), 70, CHUNK)
    assert chunks.tolist() == [[number, 1, number, 1] for number in range(70)]

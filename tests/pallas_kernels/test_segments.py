"""How a packed batch is cut into chunks."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.segments import CHUNK, Segments, chunk_at, count_chunks


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

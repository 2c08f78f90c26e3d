"""Columns of packed rows: what they hold, and that they pass through jit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.columns import Columns, as_columns, split, value

ROWS = np.arange(24.0, dtype=np.float32).reshape(2, 2, 6)


def test_split_covers_the_row() -> None:
    parts = split(ROWS, [1, 0, 3, 2])
    for part, (start, end) in zip(parts, [(0, 1), (1, 1), (1, 4), (4, 6)], strict=True):
        assert part.shape == (2, 2, end - start) and part.dtype == np.float32
        assert part.nbytes == 2 * 2 * (end - start) * 4
        np.testing.assert_array_equal(part.value(), ROWS[..., start:end])
        assert value(part) is not part and value(ROWS) is ROWS
    for widths in ([1, 3, 3], [5], []):
        with pytest.raises(ValueError, match=rf"widths add up to {sum(widths)}; .* take 6"):
            split(ROWS, widths)


def test_an_array_is_all_of_its_columns() -> None:
    whole = as_columns(ROWS)
    assert whole.array is ROWS and (whole.start, whole.width) == (0, 6)
    part = Columns(ROWS, 2, 4)
    assert as_columns(part) is part


@pytest.mark.parametrize(("start", "width"), [(-1, 3), (4, 3), (7, 0), (2, -1)])
def test_columns_that_are_not_there_are_refused(start: int, width: int) -> None:
    with pytest.raises(ValueError, match=rf"columns {start} to {start + width} of an array of shape \(2, 2, 6\)"):
        as_columns(Columns(ROWS, start, width))
    with pytest.raises(ValueError, match=r"of shape \(\)"):
        as_columns(jnp.zeros(()))


def test_start_and_width_are_static() -> None:
    @jax.jit
    def double(part: Columns) -> Columns:
        assert isinstance(part.start, int) and isinstance(part.width, int)
        return jax.tree.map(lambda array: 2 * array, part)

    doubled = double(Columns(jnp.asarray(ROWS), 1, 2))
    np.testing.assert_array_equal(doubled.value(), 2 * ROWS[..., 1:3])

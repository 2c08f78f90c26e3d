"""Columns of an array whose rows hold several things side by side: what a kernel reads instead of a slice.

A kernel takes whole arrays. A slice of a packed product is an array of its own, which a launch of its own must
copy first; the product and an offset that is known when the kernel is compiled cost nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns `start` to `start + width` of every row of `array` `[..., W]`."""

    array: jax.Array
    start: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.array.shape[:-1], self.width)

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        return self.array.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the columns alone."""
        return math.prod(self.shape) * self.array.dtype.itemsize

    def value(self) -> jax.Array:
        """The columns as an array `[..., width]`."""
        return self.array[..., self.start : self.start + self.width]


def as_columns(x: jax.Array | Columns) -> Columns:
    """An array as all of its columns.

    Raises:
        ValueError: no rows and columns, or columns that the array does not have.
    """
    if not isinstance(x, Columns):
        x = Columns(x, 0, x.shape[-1] if x.ndim else 0)
    if x.array.ndim < 1 or not 0 <= x.start <= x.start + x.width <= x.array.shape[-1]:
        raise ValueError(
            f"columns {x.start} to {x.start + x.width} of an array of shape {x.array.shape}; "
            "they take 0 <= start <= start + width <= its last axis"
        )
    return x


def value(x: jax.Array | Columns) -> jax.Array:
    """An array as it is, columns as an array."""
    return x.value() if isinstance(x, Columns) else x


def split(array: jax.Array, widths: Iterable[int]) -> list[Columns]:
    """All columns of `array` `[..., W]`, cut from left to right.

    Raises:
        ValueError: widths that do not add up to W.
    """
    parts, start = [], 0
    for width in widths:
        parts.append(Columns(array, start, width))
        start += width
    if start != array.shape[-1]:
        raise ValueError(f"widths add up to {start}; with an array of shape {array.shape} they take {array.shape[-1]}")
    return parts

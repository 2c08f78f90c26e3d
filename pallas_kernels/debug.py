"""Checks of values, which shapes and dtypes don't show: a slot out of range, two rows that share one.

Only with GDNJAX_DEBUG=2 in the environment when an operation is traced, since they wait for the device. A
concrete array's fault raises at once; inside `jit` JAX raises it, with the same text, when the result is
waited for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def debug_level() -> int:
    """GDNJAX_DEBUG in the environment: 0 (or unset) checks nothing of this, 1 the host's bookkeeping after every
    call, 2 also the values that operations get.

    Raises:
        ValueError: anything else.
    """
    value = os.environ.get("GDNJAX_DEBUG") or "0"
    if value not in ("0", "1", "2"):
        raise ValueError(f"GDNJAX_DEBUG = {value!r}; it takes 0, 1 or 2")
    return int(value)


def check_values(op: str, find: Callable[..., str | None], *arrays: jax.Array) -> None:
    """At debug level 2, has `find` look at the arrays on the host.

    Args:
        op: the operation's name, for the message.
        find: NumPy arrays -> what is wrong with them, or None.
        arrays: what it looks at.

    Raises:
        ValueError: something is wrong.
    """
    if debug_level() < 2:
        return

    def run(*values: Any) -> None:
        problem = find(*(np.asarray(value) for value in values))
        if problem is not None:
            raise ValueError(f"{op}: {problem}")

    if any(isinstance(array, Tracer) for array in arrays):
        jax.debug.callback(run, *arrays)
    else:
        run(*arrays)


def slot_faults(slots: int) -> Callable[[np.ndarray, np.ndarray], str | None]:
    """For (read_slot, write_slot) of a pool: a slot it doesn't have, or one row's write slot that another row
    reads or writes. Rows whose write slot is 0 are padding."""

    def find(read: np.ndarray, write: np.ndarray) -> str | None:
        for name, vector in (("read_slot", read), ("write_slot", write)):
            if problem := _out_of_range(name, vector, 0, slots):
                return problem
        live = np.flatnonzero(write > 0)
        if problem := _shared("write_slot", write, live):
            return problem
        owner = {int(write[row]): int(row) for row in live}
        for row in live:
            other = owner.get(int(read[row]), int(row))
            if other != row:
                return (
                    f"read_slot[{row}] = {read[row]} is write_slot[{other}]; a row's read slot may only be its own "
                    "write slot (in place), or one that no row writes"
                )
        return None

    return find


def place_faults(name: str, least: int, size: int) -> Callable[[np.ndarray], str | None]:
    """For a vector of places that rows write, `least` to size - 1, lower ones being padding: one out of range, or
    one that two rows share."""

    def find(places: np.ndarray) -> str | None:
        problem = _out_of_range(name, places, least - 1, size)
        return problem or _shared(name, places, np.flatnonzero(places >= least))

    return find


def segment_faults(rows: int, slots: int | None = None) -> Callable[..., str | None]:
    """For (start, length) or (start, length, slot) of the segments of a batch of `rows` rows: rows that the batch
    doesn't have, rows of two segments, or a slot out of range or of two segments (0 stores nothing)."""

    def find(start: np.ndarray, length: np.ndarray, slot: np.ndarray | None = None) -> str | None:
        used = np.flatnonzero(length != 0)
        end = 0
        for segment in used[np.argsort(start[used], kind="stable")]:
            first, count = int(start[segment]), int(length[segment])
            if count < 0 or first < end or first + count > rows:
                return (
                    f"segment {segment} has start {first} and length {count}; segments take rows 0 to {rows - 1}, none "
                    "of them twice"
                )
            end = first + count
        if slot is None or slots is None:
            return None
        live = used[slot[used] > 0]
        return _out_of_range("segments.slot", slot, 0, slots) or _shared("segments.slot", slot, live)

    return find


def page_faults(page_size: int, kv_slots: int) -> Callable[[np.ndarray, np.ndarray], str | None]:
    """For (pages, length) of decode attention: more keys than the page table has room for, or a page that the
    cache doesn't have or that is reserved (0) among those that hold the row's keys."""

    def find(pages: np.ndarray, length: np.ndarray) -> str | None:
        room = pages.shape[1] * page_size
        if problem := _out_of_range("length", length, 0, room + 1):
            return problem
        for row in range(len(length)):
            used = pages[row, : -(-int(length[row]) // page_size)]
            if problem := _out_of_range(f"pages[{row}]", used, 1, kv_slots // page_size):
                return problem
        return None

    return find


def _out_of_range(name: str, vector: np.ndarray, least: int, size: int) -> str | None:
    wrong = np.flatnonzero((vector < least) | (vector >= size))
    if wrong.size == 0:
        return None
    return f"{name}[{wrong[0]}] = {vector[wrong[0]]}; it takes {least} to {size - 1}"


def _shared(name: str, vector: np.ndarray, live: np.ndarray) -> str | None:
    values, counts = np.unique(vector[live], return_counts=True)
    if not np.any(counts > 1):
        return None
    value = values[counts > 1][0]
    rows = live[vector[live] == value][:2]
    return f"{name}[{rows[0]}] = {name}[{rows[1]}] = {value}; every row takes one of its own"

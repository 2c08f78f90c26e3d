"""Checksums: of what belongs to a request, bit for bit, wherever it lies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config
from gdnjax.diagnosis.checksums import Checksums, checksums
from gdnjax.state import State, cached_kv, conv_window, init_state, recurrent_state
from tests.diagnosis.driving import DEEP

pytestmark = pytest.mark.usefixtures("quick_compilation")

POSITION = np.array([7, 1, 12], np.int32)


def random_bits(shape: tuple[int, ...], dtype: Any, rng: np.random.Generator) -> jax.Array:
    bits = rng.integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return jnp.asarray(bits.view(np.dtype(dtype)).reshape(shape))


def filled(config: Config, seed: int, rows: int = 0) -> State:
    """A state of random bits, NaNs among them, whose requests have some tokens each. rows: of a record."""
    rng = np.random.default_rng(seed)
    state = init_state(config.replace(speculate=rows - 1) if rows else config)
    state = jax.tree.map(lambda x: random_bits(x.shape, x.dtype, rng) if x.ndim > 2 else x, state)
    return dataclasses.replace(state, position=jnp.asarray(POSITION))


@functools.cache
def plain() -> State:
    return filled(DEEP, 0)


def digest(array: Any) -> int:
    """The definition, in NumPy: murmur's mix of each element's place and bits, added up."""
    array = np.asarray(array)
    bits = array.view(f"uint{8 * array.dtype.itemsize}").reshape(-1).astype(np.uint64)

    def mix(x: np.ndarray) -> np.ndarray:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
        return x ^ (x >> np.uint64(16))

    return int(mix(mix(np.arange(bits.size, dtype=np.uint64)) ^ bits).sum() % 2**32)


@pytest.mark.newest
@pytest.mark.parametrize(
    "config", [DEEP, DEEP.replace(dtype="bfloat16", state_dtype="bfloat16", state_layout="in_place")]
)
def test_they_are_of_what_the_accessors_give(config: Config) -> None:
    state, rng = filled(config, 1), np.random.default_rng(1)
    # Numbers: what an accessor chooses with `where` need not keep the bits of every NaN.
    state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype) if x.ndim > 2 else x, state)
    found = jax.device_get(checksums(state))
    assert found.position.tolist() == POSITION.tolist() and found.behind.tolist() == [0, 0, 0]
    assert found.record is None
    for request in range(3):
        for layer in range(2):
            assert found.state[request, layer] == digest(recurrent_state(state, layer, request))
            window = np.ascontiguousarray(conv_window(state, layer, request).T)
            assert found.window[request, layer] == digest(window[1:])
            keys, values = cached_kv(state, layer, request)
            assert found.keys[request, layer] == digest(keys[-1])
            assert found.values[request, layer] == digest(values[-1])


def test_slots_rows_and_pages_do_not_matter() -> None:
    one, order = plain(), np.array([2, 0, 3])
    other = init_state(DEEP.replace(state_layout="in_place", max_requests=4))
    pages = np.asarray(other.page_table)[::-1].copy()
    slots = np.array([4, 2, 1, 3], np.int32)
    at = slots[order]

    def rows(table: np.ndarray) -> np.ndarray:
        return (table[:, :, None] * DEEP.page_size + np.arange(DEEP.page_size)).reshape(-1)

    source, target = rows(np.asarray(one.page_table)), rows(pages[order])
    other = dataclasses.replace(
        other,
        recurrent=tuple(p.at[at].set(q[one.read_slot]) for p, q in zip(other.recurrent, one.recurrent, strict=True)),
        conv=tuple(p.at[order + 1].set(q[1:]) for p, q in zip(other.conv, one.conv, strict=True)),
        keys=tuple(p.at[target].set(q[source]) for p, q in zip(other.keys, one.keys, strict=True)),
        values=tuple(p.at[target].set(q[source]) for p, q in zip(other.values, one.values, strict=True)),
        read_slot=jnp.asarray(slots),
        write_slot=jnp.asarray(slots),
        position=other.position.at[order].set(one.position),
        page_table=jnp.asarray(pages),
    )
    found, expected = jax.device_get((checksums(other), checksums(one)))
    for name in ("position", "state", "window", "keys", "values"):
        np.testing.assert_array_equal(getattr(found, name)[order], getattr(expected, name))


def differing(one: Checksums, other: Checksums) -> list[tuple[str, int, int]]:
    """(array, request, layer) of all checksums that are not the same."""
    found = []
    for name in ("state", "window", "record", "keys", "values"):
        a, b = getattr(one, name), getattr(other, name)
        if a is not None:
            found += [(name, int(r), int(layer)) for r, layer in np.argwhere(np.asarray(a) != np.asarray(b))]
    return found


def flipped(array: jax.Array, index: Any, bit: int) -> jax.Array:
    changed = np.array(array)
    changed.view(f"uint{8 * changed.dtype.itemsize}")[index] ^= 1 << bit
    return jnp.asarray(changed)


@pytest.mark.parametrize("bit", [0, 31])
def test_one_bit_of_a_request_changes_its_checksum_and_no_other(bit: int) -> None:
    state, before = plain(), checksums(plain())
    page = int(state.page_table[2, 11 // DEEP.page_size]) * DEEP.page_size + 11 % DEEP.page_size
    # Request 2 has 12 tokens: columns 1, 2 and 3 of its ring are of the last three, column 0 is of the one before.
    for name, field, row, others in (
        ("state", "recurrent", (int(state.read_slot[2]), 1, 7, 3), (int(state.write_slot[2]), 1, 7, 3)),
        ("window", "conv", (3, 1, 5), (3, 0, 5)),
        ("keys", "keys", (page, 0, 7), (page - 1, 0, 7)),
        ("values", "values", (page, 0, 0), (page + 1, 0, 0)),
    ):
        first, second = getattr(state, field)
        changed = dataclasses.replace(state, **{field: (first, flipped(second, row, bit))})
        assert differing(before, checksums(changed)) == [(name, 2, 1)]
        changed = dataclasses.replace(state, **{field: (first, flipped(second, others, bit))})
        assert differing(before, checksums(changed)) == []


def test_two_elements_that_change_places_change_it() -> None:
    state, slot = plain(), int(plain().read_slot[0])
    first, second = state.recurrent
    swapped = first.at[slot, 0, 0].set(first[slot, 0, 0, ::-1])
    changed = dataclasses.replace(state, recurrent=(swapped, second))
    assert differing(checksums(state), checksums(changed)) == [("state", 0, 0)]


def with_record(state: State, live: list[int], parity: list[int], advance: list[int]) -> State:
    assert state.record is not None
    numbers = (jnp.array(x, jnp.int32) for x in (live, parity, advance))
    recorded = type(state.record.recorded)(*numbers)
    return dataclasses.replace(state, record=dataclasses.replace(state.record, recorded=recorded))


def test_of_a_record_the_rows_that_are_replayed_count_in_whichever_half() -> None:
    state = with_record(filled(DEEP, 2, rows=3), [3, 0, 3], [0, 1, 1], [2, 5, 1])
    before = checksums(state)
    assert before.behind.tolist() == [2, 0, 1]
    assert before.record is not None and before.record.tolist()[1] == [0, 0]
    assert state.record is not None
    first, second = state.record.layers

    def changed(name: str, index: tuple[int, ...]) -> State:
        layer = dataclasses.replace(second, **{name: flipped(getattr(second, name), index, 0)})
        return dataclasses.replace(state, record=dataclasses.replace(state.record, layers=(first, layer)))

    for name, rest in (("keys", (0, 0)), ("values", (1, 7)), ("gates", (1, 1))):
        assert differing(before, checksums(changed(name, (0, 0, 1, *rest)))) == [("record", 0, 1)]
        assert differing(before, checksums(changed(name, (2, 1, 0, *rest)))) == [("record", 2, 1)]
        for dead in ((0, 0, 2), (0, 1, 0), (1, 1, 0), (2, 1, 1)):
            assert differing(before, checksums(changed(name, (*dead, *rest)))) == []

    layers = jax.tree.map(lambda x: x[:, ::-1], state.record.layers)
    other = dataclasses.replace(state, record=dataclasses.replace(state.record, layers=layers))
    other = with_record(other, [3, 0, 3], [1, 0, 0], [2, 5, 1])
    assert differing(before, checksums(other)) == []


def test_a_state_of_no_tokens_is_the_same_whatever_its_slot_holds() -> None:
    # All tokens of request 1, one, are in its record.
    state = with_record(filled(DEEP, 2, rows=3), [3, 1, 3], [0, 1, 1], [2, 1, 1])
    first, second = state.recurrent
    changed = dataclasses.replace(state, recurrent=(first + 1, second))
    assert {request for _, request, _ in differing(checksums(state), checksums(changed))} == {0, 2}

"""The state pytree: slots and pages, commit, and what steps may and may not touch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config
from gdnjax.state import (
    Batch,
    State,
    cached_kv,
    commit,
    conv_window,
    init_state,
    prefill_batch,
    recurrent_state,
    state_shapes,
)
from gdnjax.state.batch import check_ids, row_bucket, segments_of
from tests.helpers import (
    LAYOUTS,
    assert_same_bits,
    decode_batch,
    golden_arrays,
    host_copy,
    jit_commit,
    jit_decode_step,
    jit_prefill,
    load_golden,
)

REQUESTS, ROWS = 4, 32


def serving(layout: str, **changes: Any) -> Config:
    config, _ = load_golden("dense_gva")
    return config.replace(
        **({"state_layout": layout, "max_requests": REQUESTS, "max_length": 64, "page_size": 8} | changes)
    )


def prompt(length: int, skip: int = 0) -> list[int]:
    return golden_arrays("dense_gva")["input_ids"][0, skip : skip + length].tolist()


def params() -> Any:
    return load_golden("dense_gva")[1]


def prefilled(layout: str, lengths: dict[int, int]) -> State:
    """A state whose requests have read that many tokens each; every unused value is NaN."""
    state = poisoned(init_state(serving(layout)))
    batch = prefill_batch(state.config, {r: prompt(n, skip=r) for r, n in lengths.items()}, ROWS)
    return jit_prefill(params(), state, batch)[1]


def poisoned(state: State) -> State:
    """The state of empty requests, with NaN in everything that nothing may read, except slot 0."""
    nan = lambda arrays: tuple(jnp.full_like(x, jnp.nan) for x in arrays)  # noqa: E731
    recurrent = tuple(pool.at[0].set(0) for pool in nan(state.recurrent))
    return dataclasses.replace(
        state, recurrent=recurrent, conv=nan(state.conv), keys=nan(state.keys), values=nan(state.values)
    )


def requests_own(state: State, request: int) -> dict[str, np.ndarray]:
    """Copies of all that belongs to a request: both slots, its ring row, its pages, its entries of the vectors."""
    size = state.config.page_size
    slots = [int(state.read_slot[request]), int(state.write_slot[request])]
    pages = [int(p) for p in state.page_table[request] if p]
    cells = np.concatenate([np.arange(p * size, (p + 1) * size) for p in pages] or [np.zeros(0, int)])
    own = {f"slots {i}": np.array(pool)[slots] for i, pool in enumerate(state.recurrent)}
    own |= {f"ring {i}": np.array(ring)[request + 1] for i, ring in enumerate(state.conv)}
    own |= {f"keys {i}": np.array(keys)[cells] for i, keys in enumerate(state.keys)}
    own |= {f"values {i}": np.array(values)[cells] for i, values in enumerate(state.values)}
    for name in ("read_slot", "write_slot", "position", "pending", "page_table"):
        own[name] = np.array(getattr(state, name))[request]
    return own


def reserved(state: State) -> list[np.ndarray]:
    """Copies of slot 0, ring row 0 and page 0 of every layer."""
    size = state.config.page_size
    kept = [np.array(x)[0] for x in (*state.recurrent, *state.conv)]
    return kept + [np.array(x)[:size] for x in (*state.keys, *state.values)]


def assert_own_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        assert_same_bits(found[name], values, name)


# Shapes, slots, pages


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_init_state(layout: str) -> None:
    config = serving(layout)
    state = init_state(config)
    c, twin = config, layout == "twin"
    slots = 1 + REQUESTS * (2 if twin else 1)
    assert [x.shape for x in state.recurrent] == [(slots, 4, 24, 16)] * 3  # V before K
    assert [x.shape for x in state.conv] == [(REQUESTS + 1, 4, 160)] * 3
    assert [x.shape for x in (*state.keys, *state.values)] == [((1 + REQUESTS * 8) * 8, 1, 32)] * 2
    assert all(x.dtype == jnp.float32 for x in state.recurrent)
    assert all(x.dtype == jnp.dtype(c.dtype) for x in (*state.conv, *state.keys, *state.values))

    owned = [int(s) for s in (*state.read_slot, *(state.write_slot if twin else ()))]
    assert sorted(owned) == list(range(1, slots))  # every slot but 0, once
    if not twin:
        assert_same_bits(state.write_slot, state.read_slot)
    assert sorted(np.asarray(state.page_table).ravel()) == list(range(1, 1 + REQUESTS * 8))
    for name in ("position", "pending"):
        assert_same_bits(getattr(state, name), np.zeros(REQUESTS, np.int32))
    assert all(not np.any(x) for x in (*state.recurrent, *state.conv, *state.keys, *state.values))

    shapes = state_shapes(config)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    # donated leaves may not share a buffer
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)


def test_dtypes_follow_the_config() -> None:
    shapes = state_shapes(serving("twin", dtype="bfloat16"))
    assert {x.dtype.name for x in shapes.recurrent} == {"float32"}
    assert {x.dtype.name for x in (*shapes.conv, *shapes.keys, *shapes.values)} == {"bfloat16"}
    assert {x.dtype.name for x in state_shapes(serving("twin", state_dtype="bfloat16")).recurrent} == {"bfloat16"}


def test_pages_of_given_lengths() -> None:
    state = init_state(serving("in_place", kv_tokens=8 * 8), lengths=[17, 0, 8])
    np.testing.assert_array_equal(state.page_table, [[1, 2, 3] + [0] * 5, [0] * 8, [4] + [0] * 7, [0] * 8])
    # without lengths: as many whole requests as the cache holds
    whole = np.asarray(init_state(serving("in_place", kv_tokens=20 * 8)).page_table)
    np.testing.assert_array_equal((whole > 0).sum(axis=1), [8, 8, 0, 0])


@pytest.mark.parametrize(
    ("changes", "lengths", "message"),
    [
        ({}, [1] * 5, r"5 lengths; it takes at most max_requests = 4"),
        ({}, [3, 65], r"lengths\[1\] = 65; it takes 0 to max_length = 64"),
        ({}, [-1], r"lengths\[0\] = -1; it takes 0 to max_length = 64"),
        ({"kv_tokens": 32}, [17, 9], r"lengths need 5 KV pages of 8 tokens, the cache has 4; raise kv_tokens"),
        ({"kv_tokens": 32}, None, r"kv_tokens = 32 holds no request of max_length = 64; .*lower max_length"),
    ],
)
def test_init_state_errors(changes: dict, lengths: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        init_state(serving("in_place", **changes), lengths)


# Batches


def test_prefill_batch() -> None:
    batch = prefill_batch(serving("in_place"), {2: [5, 6, 7], 0: [9]}, rows=6)
    np.testing.assert_array_equal(batch.tokens, [5, 6, 7, 9, 0, 0])
    np.testing.assert_array_equal(batch.request, [2, 2, 2, 0, -1, -1])
    np.testing.assert_array_equal(batch.logits_rows, [3, 0, 2, 0])
    assert batch.tokens.dtype == batch.request.dtype == batch.logits_rows.dtype == jnp.int32

    segments = segments_of(batch, jnp.arange(4), jnp.arange(4) + 1)
    np.testing.assert_array_equal(segments.length, [1, 0, 3, 0])
    assert (int(segments.start[0]), int(segments.start[2])) == (3, 0)
    assert prefill_batch(serving("in_place"), {0: [1] * 17}).tokens.shape == (32,)


def test_row_buckets_are_few() -> None:
    assert [row_bucket(n) for n in (0, 1, 16, 17, 32, 33, 1000, 1024, 1025)] == [
        16,
        16,
        16,
        32,
        32,
        64,
        1024,
        1024,
        2048,
    ]


@pytest.mark.parametrize(
    ("pieces", "rows", "message"),
    [
        ({4: [1]}, None, r"request 4; it takes 0 to max_requests - 1 = 3"),
        ({-1: [1]}, None, r"request -1; it takes 0"),
        ({0: []}, None, r"request 0 has no tokens in this batch; leave it out"),
        ({0: [1, 192]}, None, r"token id 192; it takes 0 to vocab_size - 1 = 191"),
        ({0: [1], 1: [-1]}, None, r"token id -1; it takes 0 to"),
        ({0: [1] * 5}, 4, r"5 tokens in 4 rows; raise rows or cut the pieces"),
        ({0: [1.5]}, None, r"token ids are float64; they are integers"),
    ],
)
def test_prefill_batch_errors(pieces: dict, rows: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefill_batch(serving("in_place"), pieces, rows)


def test_check_ids_takes_the_ends() -> None:
    check_ids([0, 191], 192)
    check_ids(np.array([0, 191], np.uint8), 192)
    with pytest.raises(ValueError, match="token id 192"):
        check_ids(np.array([192], np.uint8), 192)


# Commit


@pytest.mark.newest
def test_commit_swaps_twin_slots_and_advances() -> None:
    state = prefilled("twin", {0: 5, 2: 9})
    read, write = np.array(state.read_slot), np.array(state.write_slot)
    np.testing.assert_array_equal(state.position, [5, 0, 9, 0])
    np.testing.assert_array_equal(state.pending, [0, 0, 0, 0])  # a prefill is current at once
    _, state = jit_decode_step(params(), state, decode_batch({2: 3}, 2))
    np.testing.assert_array_equal(state.position, [5, 0, 9, 0])
    np.testing.assert_array_equal(state.pending, [0, 0, 1, 0])
    assert_same_bits(state.read_slot, read)

    state = jit_commit(state)
    np.testing.assert_array_equal(state.position, [5, 0, 10, 0])
    np.testing.assert_array_equal(state.pending, [0, 0, 0, 0])
    swapped = np.array([False, False, True, False])
    np.testing.assert_array_equal(state.read_slot, np.where(swapped, write, read))
    np.testing.assert_array_equal(state.write_slot, np.where(swapped, read, write))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_is_idempotent_and_pure(layout: str) -> None:
    _, pending = jit_decode_step(params(), prefilled(layout, {1: 4}), decode_batch({1: 3}, 2))
    before = host_copy(pending)
    once = commit(pending)
    twice = commit(once)
    for found, expected in ((twice, once), (pending, before)):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert_same_bits(a, b)
    if layout == "in_place":
        assert_same_bits(once.read_slot, once.write_slot)


@pytest.mark.newest
def test_uncommitted_step_can_be_run_again_in_twin() -> None:
    state = prefilled("twin", {0: 5, 2: 9})
    slots = [int(state.read_slot[r]) for r in (0, 2)]
    current = [np.array(pool)[slots] for pool in state.recurrent]
    first, state = jit_decode_step(params(), state, decode_batch({2: 3, 0: 8}, 4))
    for pool, before in zip(state.recurrent, current, strict=True):
        assert_same_bits(np.array(pool)[slots], before, "current slots")
    # Another token in between, dropped like the first step: its ring column and its KV cell are rewritten.
    other, state = jit_decode_step(params(), state, decode_batch({2: 100, 0: 77}, 4))
    assert np.abs(np.asarray(other - first)[2:]).max() > 1
    again, state = jit_decode_step(params(), state, decode_batch({2: 3, 0: 8}, 4))
    assert_same_bits(np.asarray(again)[2:], np.asarray(first)[2:], "logits")
    np.testing.assert_array_equal(state.pending, [1, 0, 1, 0])  # one step, not three

    # and it leads where an undisturbed run leads
    _, straight = jit_decode_step(params(), prefilled("twin", {0: 5, 2: 9}), decode_batch({2: 3, 0: 8}, 4))
    disturbed, straight = jit_commit(state), jit_commit(straight)
    for r in (0, 2):
        assert_own_equal(requests_own(disturbed, r), requests_own(straight, r))


@pytest.mark.newest
def test_layouts_give_the_same_bits() -> None:
    outputs = []
    for layout in LAYOUTS:
        state, logits = prefilled(layout, {1: 7, 3: 2}), []
        for step in range(3):
            out, state = jit_decode_step(params(), state, decode_batch({3: 5 + step, 1: 90 - step}, 4))
            state = jit_commit(state)
            logits.append(np.asarray(out)[2:])
        own = [np.asarray(f(state, 0, r)) for f in (recurrent_state, conv_window) for r in (1, 3)]
        outputs.append([*logits, *own])
    for in_place, twin in zip(*outputs, strict=True):
        assert_same_bits(twin, in_place)


# What a step leaves alone


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_requests_keep_every_bit(layout: str) -> None:
    state = prefilled(layout, {0: 5, 1: 3, 2: 9})
    kept, others = reserved(state), {r: requests_own(state, r) for r in (1, 3)}
    for step in range(3):
        _, state = jit_decode_step(params(), state, decode_batch({2: 3, 0: 8 + step}, 4))
        state = jit_commit(state)
    batch = prefill_batch(state.config, {2: prompt(11), 0: prompt(2)}, ROWS)
    _, state = jit_prefill(params(), state, batch)
    for r, before in others.items():
        assert_own_equal(requests_own(state, r), before)
    for found, before in zip(reserved(state), kept, strict=True):
        assert_same_bits(found, before, "slot 0, ring row 0, page 0")
    np.testing.assert_array_equal(state.position, [10, 3, 23, 0])
    for r in (0, 2):
        for layer in range(3):
            assert np.isfinite(recurrent_state(state, layer, r)).all()
            assert np.isfinite(conv_window(state, layer, r)).all()
        assert all(np.isfinite(x).all() for x in cached_kv(state, 0, r))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_padding_changes_nothing(layout: str) -> None:
    state = prefilled(layout, {0: 5})
    before = host_copy(state)
    nobody = Batch(jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, -1, jnp.int32), jnp.zeros(REQUESTS, jnp.int32))
    _, state = jit_prefill(params(), state, nobody)
    _, state = jit_decode_step(params(), state, decode_batch({}, 4))
    state = jit_commit(state)
    for found, expected in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        assert_same_bits(found, expected)


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_in_unused_places_has_no_effect(layout: str) -> None:
    def run(start: State) -> list[np.ndarray]:
        batch = prefill_batch(start.config, {2: prompt(9)}, ROWS)
        logits, state = jit_prefill(params(), start, batch)
        outputs = [np.asarray(logits[2])]
        # request 0 begins by a decode step
        for tokens in ({0: 4, 2: 3}, {0: 5, 2: 60}):
            logits, state = jit_decode_step(params(), state, decode_batch(tokens, 4))
            state = jit_commit(state)
            outputs.append(np.asarray(logits)[2:])
        return outputs

    clean = run(init_state(serving(layout)))
    dirty = run(poisoned(init_state(serving(layout))))
    for found, expected in zip(dirty, clean, strict=True):
        assert np.isfinite(found).all()
        assert_same_bits(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_request_alone_is_request_in_a_batch(layout: str) -> None:
    # In one compiled program: alone with padding, and together with others.
    lengths = {0: 5, 1: 3, 2: 9, 3: 1}
    tokens = {0: 8, 1: 6, 2: 3, 3: 190}
    together, state = jit_decode_step(params(), prefilled(layout, lengths), decode_batch(tokens, 4))
    owned = {r: requests_own(state, r) for r in lengths}
    for row, r in enumerate(tokens):
        request = jnp.where(jnp.arange(4) == row, r, -1)
        batch = Batch(jnp.asarray(list(tokens.values()), jnp.int32), request)
        alone, state = jit_decode_step(params(), prefilled(layout, lengths), batch)
        assert_same_bits(alone[row], together[row], f"request {r}")
        assert_own_equal(requests_own(state, r), owned[r])


def test_a_request_without_pages_writes_no_keys() -> None:
    state = init_state(serving("in_place"), lengths=[8, 0, 56])
    before = reserved(state), [np.array(x) for x in (*state.keys, *state.values)]
    batch = prefill_batch(state.config, {1: prompt(5)}, ROWS)
    _, state = jit_prefill(params(), state, batch)
    for found, expected in zip(reserved(state), before[0], strict=True):
        assert_same_bits(found, expected)
    for found, expected in zip((*state.keys, *state.values), before[1], strict=True):
        assert_same_bits(found, expected)


def test_logits_rows_choose_rows() -> None:
    batch = prefill_batch(serving("in_place"), {1: prompt(6)}, ROWS)

    def run(*rows: int) -> np.ndarray:
        chosen = dataclasses.replace(batch, logits_rows=jnp.asarray(rows, jnp.int32))
        return np.asarray(jit_prefill(params(), init_state(serving("in_place")), chosen)[0])

    first, second = run(0, 1, 2, 3), run(5, 2, 0, 2)
    assert first.shape == (4, 192)
    assert_same_bits(second[1:], first[[2, 0, 2]])
    assert np.abs(second[0] - first).max(axis=1).min() > 1

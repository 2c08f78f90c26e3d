"""Prompt lookup against a search written apart, and the count of drafts that acceptance makes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.generation.adapt import DRAFT_COST, FADING, Trials, best_count, new_trials, observe
from gdnjax.generation.lookup import LONGEST, look_up

WIDTH, MOST = 12, 4

run_look_up = jax.jit(look_up, static_argnums=2)
run_best_count = jax.jit(best_count, static_argnums=2)
run_observe = jax.jit(observe)


def by_hand(text: list[int], count: int) -> list[int]:
    for n in range(LONGEST, 0, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[-n:]:
                longer = list(text)
                for i in range(count):
                    longer.append(longer[end + 1 + i])
                return longer[len(text) :]
    return []


def looked_up(texts: list[list[int]], count: int = MOST) -> list[list[int]]:
    # What stands behind a text's end is what rejected drafts left there.
    history = np.tile(np.arange(WIDTH) % 2, (4, 1)).astype(np.int32)
    for row, text in enumerate(texts):
        history[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts] + [0] * (4 - len(texts)), np.int32)
    drafts, available = run_look_up(jnp.asarray(history), jnp.asarray(lengths), count)
    assert drafts.shape == (4, count) and drafts.dtype == available.dtype == jnp.int32
    return [np.asarray(drafts)[i, : int(available[i])].tolist() for i in range(len(texts))]


@given(st.lists(st.lists(st.integers(0, 2), max_size=WIDTH), min_size=4, max_size=4))
def test_lookup_is_the_search_by_hand(texts: list[list[int]]) -> None:
    assert looked_up(texts) == [by_hand(text, MOST) for text in texts]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([], []),
        ([7], []),
        ([7, 8], []),
        ([7, 7], [7, 7, 7, 7]),
        # three tokens before two, though the two were seen later
        ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], [4, 9, 2, 3]),
        # of the same length, the latest
        ([3, 4, 8, 3, 5, 9, 3], [5, 9, 3, 5]),
        # the text runs into its own end
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        # nothing but the last token itself
        ([1, 2, 3, 4], []),
        # a text that fills the history
        ([5, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 5], [1, 2, 3, 4]),
    ],
)
def test_lookups(text: list[int], drafts: list[int]) -> None:
    assert by_hand(text, MOST) == drafts
    assert looked_up([[], text, [0]])[1] == drafts


# Counts


def test_the_best_count_is_the_formulas() -> None:
    most = np.array([0, 1, 4, 7, 7, 7], np.int32)
    rate = np.array([1.0, 0.9, 0.9, 0.0, 0.5, 1.0])
    judged = 1e6
    trials = Trials(jnp.asarray(rate * judged, jnp.float32), jnp.full(6, judged, jnp.float32))
    expected = []
    for m, a in zip(most, rate, strict=True):
        worth = [sum(a**i for i in range(k + 1)) / (1 + DRAFT_COST * k) for k in range(m + 1)]
        expected.append(int(np.argmax(worth)))
    assert run_best_count(trials, jnp.asarray(most), 7).tolist() == expected
    assert expected == [0, 1, 4, 0, 2, 7]


def test_a_new_request_drafts() -> None:
    assert int(run_best_count(new_trials(1), jnp.array([4]), 4)[0]) >= 1


def test_rejections_end_drafting_and_it_is_tried_again() -> None:
    trials, counts = new_trials(1), []
    for _ in range(200):
        count = run_best_count(trials, jnp.array([4]), 4)
        counts.append(int(count[0]))
        trials = run_observe(trials, count, jnp.zeros(1, jnp.int32))
    assert counts[0] > 0
    # Plain steps mostly, and a draft now and then for as long as they are all rejected.
    late = counts[50:]
    assert max(late) == 1 and 0 < sum(late) <= len(late) / 5
    # From there, accepted drafts lead to the most.
    for _ in range(100):
        count = run_best_count(trials, jnp.array([4]), 4)
        trials = run_observe(trials, count, count)
    assert count.tolist() == [4]


def test_what_stands_behind_a_rejected_draft_is_not_judged() -> None:
    trials = run_observe(new_trials(4), jnp.array([4, 4, 4, 0]), jnp.array([0, 2, 4, 0]))
    assert trials.judged.tolist() == [1, 3, 4, 0]
    assert trials.accepted.tolist() == [0, 2, 4, 0]
    again = run_observe(trials, jnp.array([0, 0, 1, 0]), jnp.zeros(4, jnp.int32))
    np.testing.assert_allclose(again.judged, [FADING, 3 * FADING, 4 * FADING + 1, 0], rtol=1e-6)

"""The number of drafts that an engine's steps verify, against a clock that the test turns."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.engine.pace import ENOUGH, PATIENCE, REVISIT, Fate, Pace, tokens, widths_of

ROWS = 4


class Device:
    """Steps that take as long as `cost` says."""

    def __init__(self, cost: Callable[[int], float]):
        self.cost, self.now = cost, 0.0

    def clock(self) -> float:
        return self.now

    def run(self, pace: Pace, steps: int, wishes: Sequence[tuple[int, float]], disturbed: bool = False) -> list[int]:
        """The widths of so many steps."""
        taken = []
        for _ in range(steps):
            width = pace.choose(ROWS, wishes)
            pace.begin(ROWS, width)
            self.now += self.cost(width)
            if disturbed:
                pace.disturb()
                self.now += 100.0
            pace.end()
            taken.append(width)
        return taken


def wishes(rate: float, most: int = 3, requests: int = ROWS) -> list[tuple[int, float]]:
    return [(most, rate)] * requests


def test_widths_are_few_and_hold_all_drafts() -> None:
    assert [widths_of(most) for most in (1, 2, 3, 4, 7)] == [[1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_the_tokens_that_are_expected() -> None:
    assert tokens(1, wishes(0.9)) == ROWS
    assert tokens(4, wishes(0.5)) == pytest.approx(ROWS * (1 + 0.5 + 0.25 + 0.125))
    assert tokens(4, [(0, 0.5), (1, 0.5), (7, 1.0)]) == pytest.approx(1 + 1.5 + 4)


def test_a_request_is_known_by_its_own_drafts_and_forgets_them() -> None:
    fate = Fate()
    assert fate.rate == 0.5
    for _ in range(60):
        fate.note(3, 3)
    assert fate.rate > 0.97
    for _ in range(30):
        fate.note(3, 0)
    assert fate.rate < 0.5
    for _ in range(200):
        fate.note(0, 0)
    assert fate.rate == pytest.approx(0.5, abs=0.01)


def test_what_stands_behind_a_rejected_draft_was_not_judged() -> None:
    fate = Fate()
    fate.note(7, 1)
    assert (fate.accepted, fate.judged) == (1, 2)


@pytest.mark.parametrize(
    ("draft", "rate", "best"), [(0.0, 0.5, 4), (0.15, 0.9, 4), (0.15, 0.1, 1), (1.0, 0.9, 1), (0.3, 0.5, 2)]
)
def test_the_width_with_the_most_tokens_a_second(draft: float, rate: float, best: int) -> None:
    device = Device(lambda width: 1 + draft * (width - 1))
    pace = Pace(3, device.clock)
    assert collections.Counter(device.run(pace, 3 * ENOUGH, wishes(rate))) == dict.fromkeys((1, 2, 4), ENOUGH)
    assert set(device.run(pace, 50, wishes(rate))) == {best}


def test_one_slow_step_is_not_believed() -> None:
    slow = iter([9.0])
    device = Device(lambda width: next(slow, 1.0) if width == 4 else 1.0)
    assert device.run(Pace(3, device.clock), 3 * ENOUGH + 1, wishes(0.9))[-1] == 4


def test_a_device_that_changes_is_looked_at_again() -> None:
    device = Device(lambda width: 1.0)
    pace = Pace(3, device.clock)
    assert device.run(pace, 20, wishes(0.9))[-1] == 4
    # Others have come to share it: drafts are dear now.
    device.cost = lambda width: float(width**2)
    assert set(device.run(pace, 12, wishes(0.9))[-3:]) == {1}
    device.cost = lambda width: 1.0
    taken = device.run(pace, 8 * REVISIT, wishes(0.9))
    assert taken[-1] == 4
    # To look costs little while nothing changes.
    taken = device.run(pace, 4 * REVISIT, wishes(0.9))
    assert 2 <= sum(width != 4 for width in taken) <= 2 * 4


def test_disturbed_steps_are_not_timed_and_not_waited_for() -> None:
    device = Device(lambda width: 1 + 0.1 * width)
    pace = Pace(3, device.clock)
    taken = device.run(pace, 3 * PATIENCE, wishes(0.9), disturbed=True)
    assert collections.Counter(taken) == dict.fromkeys((1, 2, 4), PATIENCE)
    # Nothing is known; all that may be had is taken.
    assert device.run(pace, 1, wishes(0.9), disturbed=True) == [4]
    # What is timed then counts at once.
    assert set(device.run(pace, 5, wishes(0.9))) == {4}


@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 7), st.floats(0, 1)), min_size=1, max_size=5), st.data())
def test_no_step_is_wider_than_what_it_is_for(most: int, wanted: list[tuple[int, float]], data: st.DataObject) -> None:
    wanted = [(min(drafts, most), rate) for drafts, rate in wanted]
    device = Device(lambda width: data.draw(st.floats(0.1, 10)))
    pace = Pace(most, device.clock)
    widest = 1 + max(drafts for drafts, _ in wanted)
    for width in device.run(pace, 20, wanted):
        assert width in pace.widths
        assert all(other >= widest for other in pace.widths if other >= width) or width < widest

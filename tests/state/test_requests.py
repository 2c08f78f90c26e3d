"""A step planned from the one before is the step planned from every request, whatever happens in between."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gdnjax.state.requests import PoolError, Requests
from tests.generation.small import SMALL

LAYOUTS = [("in_place", 0, "record"), ("twin", 0, "record"), ("twin", 2, "record"), ("in_place", 2, "slots")]


class Pair(RuleBasedStateMachine):
    """Two of the same, one of which never remembers the last step."""

    layout = LAYOUTS[0]

    @initialize()
    def begin(self) -> None:
        layout, speculate, kind = self.layout
        config = SMALL.replace(
            max_requests=3, state_layout=layout, speculate=speculate, speculative_state=kind, max_length=16
        )
        self.one, self.other = Requests(config), Requests(config)
        self.most = config.verify_rows if speculate else 1

    def both(self, call: str, *arguments: object, **named: object) -> object:
        self.other._forget()
        found = []
        for requests in (self.one, self.other):
            try:
                found.append(getattr(requests, call)(*arguments, **named))
            except (PoolError, ValueError) as error:
                found.append(str(error))
        assert found[0] == found[1]
        self.other._forget()
        for name in ("read", "write", "pending"):
            assert getattr(self.one, name) == getattr(self.other, name)
        assert [vars(self.one.get(r)) for r in self.one.live] == [vars(self.other.get(r)) for r in self.other.live]
        return found[0]

    @precondition(lambda self: self.one.free)
    @rule(limit=st.integers(2, 12))
    def admit(self, limit: int) -> None:
        self.both("admit", self.one.next(), limit, 0)

    @precondition(lambda self: self.one.live)
    @rule(data=st.data(), call=st.sampled_from(["restart", "end"]))
    def change(self, data: st.DataObject, call: str) -> None:
        self.both(call, data.draw(st.sampled_from(self.one.live)))

    @precondition(lambda self: self.one.live and not self.one.pending)
    @rule(
        data=st.data(),
        steps=st.integers(1, 4),
        walk=st.booleans(),
        ones=st.booleans(),
        end=st.sampled_from(["commit", "commit", "discard", ""]),
    )
    def step(self, data: st.DataObject, steps: int, walk: bool, ones: bool, end: str) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.one.live), min_size=1, unique=True))
        counts = {r: data.draw(st.integers(1, 3 if walk else self.most)) for r in chosen}
        for turn in range(steps):
            plan = self.both("plan", counts, walk)
            if isinstance(plan, str):
                return
            self.both("check_plans", [plan])
            self.both("ran", [plan])
            self.both("check_plans", [plan])  # out of date now
            if walk or (end == "" and turn == steps - 1):
                return
            self.both("discard" if end == "discard" else "commit")
            counts = dict.fromkeys(counts, 1) if ones else counts

    @precondition(lambda self: self.one.pending)
    @rule(call=st.sampled_from(["commit", "discard"]))
    def resolve(self, call: str) -> None:
        self.both(call)

    @precondition(lambda self: self.one.live)
    @rule(data=st.data(), walk=st.booleans())
    def plan_and_leave(self, data: st.DataObject, walk: bool) -> None:
        self.both("plan", {data.draw(st.sampled_from(self.one.live)): 1}, walk)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_repeated_step_is_planned_like_any_other(layout: tuple[str, int, str]) -> None:
    machine = type("Machine", (Pair,), {"layout": layout})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=20, deadline=None))


def test_a_repeated_step_looks_at_no_request() -> None:
    requests = Requests(SMALL.replace(max_requests=3, max_length=16))
    for limit in (8, 4):
        requests.admit(requests.next(), limit, 0)
    counts = dict.fromkeys(requests.live, 1)
    looked = 0
    for step in range(4):
        found: list[int] = []
        requests.get = found.append if step else requests.get  # type: ignore[method-assign, assignment]
        plan = requests.plan(counts, keep_in_place=False)
        looked += len(found)
        requests.check_plans([plan])
        requests.ran([plan])
        requests.commit()
    assert plan.positions == (3, 3) and not looked
    del requests.get  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="its limit is 4"):
        requests.plan(counts, keep_in_place=False)

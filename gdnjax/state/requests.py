"""The live requests: numbers, positions, slots and plans, as the host knows them without the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from gdnjax.config import Config
from gdnjax.state.pages import NoRoom
from gdnjax.state.pytree import first_of_step, first_slots


class PoolError(RuntimeError):
    """A call that makes no sense in the state the pool is in; the message says why. Nothing has changed."""


class PoolFull(NoRoom):
    """All `max_requests` requests are live."""


@dataclasses.dataclass
class Live:
    """One live request.

    * `epoch` tells it from others that have had its number, and from itself before a reset.
    * `pending`: rows of its step that has run and is neither committed nor discarded.
    * `lag`: tokens of `position` that its record holds and its slot does not.
    * `moved`: the device has committed the pending step, with a count that is not known here yet.
    """

    epoch: int
    limit: int
    position: int = 0
    pending: int = 0
    lag: int = 0
    moved: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Rows and slots of one step, chosen on the host; entry i belongs to `requests[i]`.

    * `counts`: tokens it takes. `positions`: position of the first of them.
    * `read_slots`, `write_slots`: equal where the step updates in place; the first where it writes several.
    * `keep_in_place`: a walk (prefill, or a window of one): it updates the current slot and is current
      once it has run. Otherwise a decode or verify step, current once committed.
    """

    requests: tuple[int, ...]
    counts: tuple[int, ...]
    positions: tuple[int, ...]
    read_slots: tuple[int, ...]
    write_slots: tuple[int, ...]
    keep_in_place: bool
    epochs: tuple[int, ...]

    @property
    def writes(self) -> dict[int, tuple[int, int]]:
        """First and end of the positions that each request writes."""
        return {r: (p, p + n) for r, p, n in zip(self.requests, self.positions, self.counts, strict=True)}

    def rows(self, count: int) -> np.ndarray:
        """The request of each row of a batch of `count` rows, `[count]` int32, padded with -1.

        Raises:
            ValueError: fewer rows than tokens.
        """
        tokens = sum(self.counts)
        if tokens > count:
            raise ValueError(f"{tokens} tokens in {count} rows; it takes at least as many rows")
        rows = np.full(count, -1, np.int32)
        rows[:tokens] = np.repeat(np.asarray(self.requests, np.int32), self.counts)
        return rows


class Requests:
    """Numbers 0 to `max_requests` - 1, or every `every`-th of them, and what is live under them. Every method changes
    all or nothing."""

    def __init__(self, config: Config, every: int = 1):
        self.config = config
        self._numbers = range(0, config.max_requests, every)
        self._free = list(reversed(self._numbers))
        self._live: dict[int, Live] = {}
        self._epochs = 0
        self._forget()
        # By number, live or not: the device's vectors keep their last order too.
        self.read, self.write = (slots.tolist() for slots in first_slots(config))

    @property
    def live(self) -> tuple[int, ...]:
        """Live requests, in order of admission."""
        return tuple(self._live)

    @property
    def free(self) -> int:
        """How many more could be live."""
        return len(self._free)

    @property
    def most(self) -> int:
        """How many can be live at once."""
        return len(self._numbers)

    @property
    def names(self) -> dict[int, int]:
        """Live request -> how many were admitted or restarted before it: unlike a number, never anybody else's."""
        return {number: one.epoch - 1 for number, one in self._live.items()}

    @property
    def pending(self) -> tuple[int, ...]:
        """Requests of the decode step that has run and is neither committed nor discarded."""
        return tuple(number for number, one in self._live.items() if one.pending)

    def get(self, request: int) -> Live:
        """Raises PoolError if `request` is not live."""
        one = self._live.get(request)
        if one is None:
            raise PoolError(f"request {request} is not live; live requests: {sorted(self._live)}")
        return one

    def get_current(self, request: int) -> Live:
        """A request whose current state is still there.

        Raises:
            PoolError: not live, or a step of its that is not committed has updated its state in place, or was
                committed on the device.
        """
        one = self.get(request)
        if one.moved:
            raise PoolError(
                f"request {request} has a step that the device has committed; tell how many rows it took with "
                "commit(accepted, on_device=True) first"
            )
        if one.pending and self.config.state_layout == "in_place":
            raise PoolError(
                f"request {request} has a step that is not committed and has updated its state in place; commit it "
                "first, or use state_layout = 'twin'"
            )
        return one

    # Admission

    def next(self) -> int:
        """The number that `admit` would give. Raises PoolFull if there is none."""
        if not self._free:
            raise PoolFull(f"all max_requests = {self.most} requests are live; wait for one to end, or raise it")
        return self._free[-1]

    def admit(self, request: int, limit: int, position: int) -> int:
        """Makes the number that `next` has given live."""
        self._forget()
        self._free.remove(request)
        self._epochs += 1
        self._live[request] = Live(self._epochs, limit, position)
        return request

    def restart(self, request: int) -> None:
        """Takes a request back to no tokens."""
        limit = self.get(request).limit
        self._forget()
        self._cleared(request)
        self._epochs += 1
        self._live[request] = Live(self._epochs, limit)

    def end(self, request: int) -> None:
        """Frees a number."""
        self._forget()
        self._cleared(request)
        del self._live[request]
        self._free.append(request)

    def _cleared(self, request: int) -> None:
        # As `clear` leaves the device's slots: behind a step that it has committed, they have changed places.
        if self.get(request).moved:
            self._change_places(request)
        self.read[request] = first_of_step(self.config, self.read[request])

    def _change_places(self, request: int) -> None:
        free = first_of_step(self.config, self.read[request])
        self.read[request], self.write[request] = self.write[request], free

    # Steps

    def _forget(self) -> None:
        # Nearly every decode step is the one before again, one token later; nobody need look at each request for it.
        # So the last one is known, until anything else happens: planned, run, committed; and how many tokens fit behind
        # those that it found, into the request with least room.
        self._planned: Plan | None = None
        self._ran: Plan | None = None
        self._committed: Plan | None = None
        self._room = 0

    def _again(self, counts: Mapping[int, int]) -> Plan | None:
        # The plan of the step that was committed last, one token later, if that is what is asked for.
        last = self._committed
        if last is None or self._room < 2 or tuple(counts) != last.requests or tuple(counts.values()) != last.counts:
            return None
        return Plan(
            requests=last.requests,
            counts=last.counts,
            positions=tuple(position + 1 for position in last.positions),
            read_slots=last.write_slots,
            write_slots=last.read_slots,
            keep_in_place=False,
            epochs=last.epochs,
        )

    def plan(self, counts: Mapping[int, int], keep_in_place: bool) -> Plan:
        """The plan of a step of so many tokens of each request.

        Raises:
            ValueError: no tokens, or a request that would outgrow its limit.
            PoolError: a request that is not live or has a step that is not committed.
        """
        if not keep_in_place and (again := self._again(counts)) is not None:
            self._planned = again
            return again
        self._committed = None
        if not counts or min(counts.values()) < 1:
            raise ValueError(f"a step of {dict(counts)} tokens by request; it takes at least one token of one request")
        ones = [self.get(request) for request in counts]
        for (request, count), one in zip(counts.items(), ones, strict=True):
            if one.pending:
                raise PoolError(f"request {request} has a step that is not committed; commit or discard it first")
            if one.position + count > one.limit:
                raise ValueError(
                    f"request {request} has {one.position} tokens and would get {count} more; its limit is {one.limit}"
                )
        self._room = min(one.limit - one.position for one in ones)
        self._planned = Plan(
            requests=tuple(counts),
            counts=tuple(counts.values()),
            positions=tuple(one.position for one in ones),
            read_slots=tuple(self.read[request] for request in counts),
            write_slots=tuple((self.read if keep_in_place else self.write)[request] for request in counts),
            keep_in_place=keep_in_place,
            epochs=tuple(one.epoch for one in ones),
        )
        return self._planned

    def check_plans(self, plans: Sequence[Plan]) -> None:
        """Refuses plans that cannot run now as one step.

        Raises:
            PoolError: out of date, a request twice, or two decode steps.
        """
        if len(plans) == 1 and plans[0] is self._planned:
            return
        decodes = [plan for plan in plans if not plan.keep_in_place]
        if len(decodes) > 1 or (decodes and self.pending):
            raise PoolError("two decode steps at once; commit or discard the first")
        requests = [request for plan in plans for request in plan.requests]
        if len(set(requests)) != len(requests):
            raise PoolError(f"requests = {requests}; one step takes each request once")
        for plan in plans:
            for request, position, epoch in zip(plan.requests, plan.positions, plan.epochs, strict=True):
                one = self._live.get(request)
                if one is None or one.epoch != epoch or one.position != position or one.pending:
                    raise PoolError(f"the plan is out of date for request {request}; plan again")

    def ran(self, plans: Sequence[Plan], moved: bool = False) -> None:
        """The plans' step has run: walks are current, decode rows are pending. `moved`: see `Live`."""
        ran = plans[0] if len(plans) == 1 and plans[0] is self._planned and not plans[0].keep_in_place else None
        room = self._room - (self._committed is not None)
        self._forget()
        self._ran, self._room = ran, room
        for plan in plans:
            for request, count in zip(plan.requests, plan.counts, strict=True):
                one = self._live[request]
                if plan.keep_in_place:
                    one.position, one.lag = one.position + count, 0
                else:
                    one.pending, one.moved = count, moved

    def check_accepted(self, accepted: Mapping[int, int] | None) -> None:
        """Refuses counts that `commit` cannot take.

        Raises:
            ValueError: counts without speculation, or for other requests than have a step pending.
        """
        if accepted is None:
            return
        if not self.config.speculate:
            raise ValueError(f"accepted = {dict(accepted)} with speculate = 0; a plain step is committed as it is")
        if set(accepted) != set(self.pending):
            raise ValueError(
                f"accepted = {dict(accepted)}; it takes a count for each request of the step: {sorted(self.pending)}"
            )

    def commit(self, accepted: Mapping[int, int] | None = None) -> None:
        """Pending rows become current, all or as many as `accepted` says: the position advances, the slots change
        places."""
        several, records = self.config.step_slots > 1, self.config.records
        ran, room = self._ran, self._room
        self._forget()
        if ran is not None and accepted is None and not several and set(ran.counts) == {1}:
            self._committed, self._room = ran, room
        moves = several or self.config.state_layout == "twin"
        for request, one in self._live.items():
            if one.pending:
                count = one.pending if accepted is None else max(1, min(accepted[request], one.pending))
                one.position, one.pending, one.moved = one.position + count, 0, False
                one.lag = count if records else 0
                if moves:
                    self._change_places(request)
                    self.read[request] += count - 1 if several else 0

    def discard(self) -> None:
        """Pending rows are dropped."""
        self._forget()
        for one in self._live.values():
            one.pending = 0

    def check(self) -> None:
        """Raises AssertionError where the bookkeeping contradicts itself."""
        numbers = sorted([*self._live, *self._free])
        assert numbers == list(self._numbers), f"numbers of requests: {numbers}"
        read, write = ([first_of_step(self.config, slot) for slot in slots] for slots in (self.read, self.write))
        assert write == self.write, "a step writes slots of one request"
        slots = read + write if self.config.state_layout == "twin" else read
        owned = list(range(1, self.config.slots, self.config.step_slots))
        assert sorted(slots) == owned, "each slot but 0 belongs to one request"
        for request, one in self._live.items():
            assert 0 <= one.position + one.pending <= one.limit, f"request {request}: position {one.position}"

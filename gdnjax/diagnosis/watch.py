"""The one place that every step passes, traced and guarded if the environment says so, and otherwise for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gdnjax.config import Config
from gdnjax.diagnosis.guard import EVERY, check_guards, guarded, spaced
from gdnjax.diagnosis.trace import Tracer
from gdnjax.state.pytree import State

T = TypeVar("T")


class Watch:
    """Watches one state through its life.

    * `GDNJAX_TRACE=PATH`: every step writes checksums into a file (`gdnjax.diagnosis.trace`).
    * `GDNJAX_GUARD=1`: guard rows are checked after every step (`gdnjax.diagnosis.guard`).

    The environment is read here and nowhere else. Without either, the calls return what they are given.

    Attributes:
        config: the state's config: the given one, or with guards one of more requests and pages.
        every: the state's requests that are somebody's are 0, `every`, 2 `every`...; the pages 1, 1 + `every`...
        on: whether steps have to be seen by the host.

    Raises:
        ValueError: GDNJAX_GUARD is neither 0 nor 1, or GDNJAX_TRACE cannot be written.
        ConfigError: limits that leave no room for guards.
    """

    def __init__(self, config: Config):
        guard, path = os.environ.get("GDNJAX_GUARD") or "0", os.environ.get("GDNJAX_TRACE")
        if guard not in ("0", "1"):
            raise ValueError(f"GDNJAX_GUARD = {guard!r}; it takes 0 or 1")
        self._guards = guard == "1"
        self.config, self.every = (spaced(config), EVERY) if self._guards else (config, 1)
        self._tracer = Tracer(path, config.layer_types) if path else None
        self.on = self._guards or self._tracer is not None
        self._steps = 0

    def begin(self, state: State) -> State:
        """A fresh state of `config`, with its guards."""
        return guarded(state) if self._guards else state

    def spread(self, items: Sequence[T], nothing: T) -> list[T]:
        """Items by request of the state: `nothing` for requests that are guards."""
        return [x for item in items for x in (item, *[nothing] * (self.every - 1))]

    def after_step(self, kind: str, state: State, names: Mapping[int, int] | None = None) -> None:
        """A step has run and is current.

        Args:
            kind: one of `gdnjax.diagnosis.guard.KINDS`, or several joined by ", ".
            state: what it returned; it stays usable.
            names: request of the state -> what it is called in a trace, the live ones; None numbers all of them
                without the guards.

        Raises:
            StrayWriteError: the step has written a guard.
        """
        if self._guards:
            check_guards(state, self._steps, kind)
        if self._tracer is not None:
            own = range(0, self.config.max_requests, self.every)
            names = {number: i for i, number in enumerate(own)} if names is None else names
            self._tracer.write(self._steps, kind, state, names)
        self._steps += 1

    def after_call(self, name: str, state: State) -> None:
        """A call of the pool has changed the state between two steps.

        Raises:
            StrayWriteError: it has written a guard.
        """
        if self._guards:
            check_guards(state, self._steps, name)

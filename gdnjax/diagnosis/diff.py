"""Where two traces part: the first step, request, layer and array."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from gdnjax.diagnosis.trace import ARRAYS, Entry, Run, TraceError

Key = tuple[str, int, int, int]
"""(array, request, token as of which it is, tokens behind)."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A checksum that differs.

    * `run`, `step`, `kind`: in the first trace. `other_step`: the step of the second one.
    * `token`: as of which token of the request the array is. `layer`: of the model.
    """

    run: int
    step: int
    other_step: int
    kind: str
    request: int
    token: int
    layer: int
    layer_type: str
    array: str


@dataclasses.dataclass(frozen=True)
class Lone:
    """A request at a position that one trace (`first` or `second`) has and the other one lacks."""

    trace: str
    run: int
    step: int
    request: int
    position: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """What `diff` found.

    * `place`: the first checksum that differs, in the first trace's order.
    * `lone`: the first request and position that only one trace has; None where both have the same.
    * `compared`, `differing`: checksums. `runs`: of each trace.
    """

    place: Place | None
    lone: Lone | None
    compared: int
    differing: int
    runs: tuple[int, int]

    @property
    def equal(self) -> bool:
        """Whether both ran the same steps with the same values."""
        return self.place is None and self.lone is None and self.runs[0] == self.runs[1]


def diff(first: tuple[Run, ...], second: tuple[Run, ...]) -> Difference:
    """Compares two traces run by run, each request at each token, whatever step or place they were in.

    A state that lags behind, since a record holds the last tokens, is compared as what it is: the state of an earlier
    token. Records are compared where both lag by as many tokens. Positions that one trace lacks do not hide what
    differs behind them.

    Raises:
        TraceError: runs of models with other layers, or without a step.
    """
    places, lone = [], []
    compared = 0
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one.layers != other.layers:
            raise TraceError(
                f"run {number}: {len(one.layers)} and {len(other.layers)} layers, or of other types; a diff takes two "
                "runs of one model"
            )
        there: dict[Key, tuple[Entry, tuple[int, ...]]] = {}
        for entry, key, sums in _sums(other):
            there.setdefault(key, (entry, sums))
        for entry, key, sums in _sums(one):
            if key in there:
                compared += len(sums)
                places += _differing(number, one, entry, key, sums, *there[key])
        lone += _lone("first", number, one, other)
        lone += _lone("second", number, other, one)
    if not compared and not lone:
        raise TraceError("neither trace has a step in which a request moved; there is nothing to compare")
    order = {array: i for i, array in enumerate(ARRAYS)}
    place = min(places, key=lambda p: (p.run, p.step, p.layer, order[p.array], p.request), default=None)
    earliest = min(lone, key=lambda x: (x.run, x.step), default=None)
    return Difference(place, earliest, compared, len(places), (len(first), len(second)))


def _sums(run: Run) -> Iterator[tuple[Entry, Key, tuple[int, ...]]]:
    for entry in run.entries:
        for array, sums in entry.sums.items():
            behind = entry.behind if array == "record" else 0
            token = entry.position - (entry.behind if array == "state" else 0)
            yield entry, (array, entry.request, token, behind), sums


def _differing(
    number: int, run: Run, entry: Entry, key: Key, sums: tuple[int, ...], other: Entry, others: tuple[int, ...]
) -> Iterator[Place]:
    array, request, token, _ = key
    for i, (a, b) in enumerate(zip(sums, others, strict=True)):
        if a != b:
            layer = run.layer(array, i)
            kind = run.layers[layer]
            yield Place(number, entry.step, other.step, entry.kind, request, token, layer, kind, array)


def _lone(name: str, number: int, run: Run, other: Run) -> Iterator[Lone]:
    there = {(entry.request, entry.position) for entry in other.entries}
    missing = (e for e in run.entries if (e.request, e.position) not in there)
    return (Lone(name, number, e.step, e.request, e.position) for e in itertools.islice(missing, 1))

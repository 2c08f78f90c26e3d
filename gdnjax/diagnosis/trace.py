"""The file that a traced run writes: lines of JSON, one a step and request, read back and checked.

A run (one call of `generate`, one pool) begins with a line that says which layers there are. Each following line is
an `Entry`: a request after a step that has moved it. Lines of several runs of one process follow each other.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from gdnjax.diagnosis.checksums import checksums
from gdnjax.state.pytree import State

FORMAT_VERSION = 1
MOST_BYTES = 128 * 2**20
"""Of a file. A run that writes more goes on without a trace."""
MOST_LINE = 2**20
LAYER_TYPES = ("linear_attention", "full_attention")
ARRAYS = {"window": LAYER_TYPES[0], "record": LAYER_TYPES[0], "state": LAYER_TYPES[0]} | dict.fromkeys(
    ("keys", "values"), LAYER_TYPES[1]
)
"""What has a checksum, in the order in which a layer computes it, and in which type of layer."""

log = logging.getLogger("gdnjax.diagnosis")


class TraceError(ValueError):
    """A file that is no trace."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A request after a step; see `Checksums`.

    * `step`: number of the step in its run. `kind`: what it did (`decode`).
    * `request`: in `generate` the prompt's number, in a pool how many were admitted before.
    * `sums`: array -> one checksum a layer of its type.
    """

    step: int
    kind: str
    request: int
    position: int
    behind: int
    sums: Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Run:
    """The layers' types, and the entries in the order in which they were written."""

    layers: tuple[str, ...]
    entries: tuple[Entry, ...]

    def layer(self, array: str, number: int) -> int:
        """The model's layer that checksum `number` of an array belongs to."""
        return [i for i, kind in enumerate(self.layers) if kind == ARRAYS[array]][number]


class Tracer:
    """Writes one run.

    Raises:
        ValueError: a file that cannot be written.
    """

    def __init__(self, path: str, layers: tuple[str, ...]):
        self._path = os.path.abspath(path)
        try:
            self._run = next(_runs(self._path))
        except OSError as error:
            raise ValueError(
                f"GDNJAX_TRACE = {path!r}: {error.strerror}; it takes a file that can be written"
            ) from None
        self._seen: dict[int, tuple[int, int]] = {}
        self._append({"gdnjax_trace": FORMAT_VERSION, "run": self._run, "layers": layers})

    def write(self, step: int, kind: str, state: State, names: Mapping[int, int]) -> None:
        """Writes the requests that a step has moved. Waits for the device.

        names: request of the state -> what it is called in the trace.
        """
        sums = jax.device_get(checksums(state))
        lines = []
        for number, name in names.items():
            position = int(sums.position[number])
            # Of a step that is not committed, nothing is current; an in-place one has overwritten what was.
            if not position or sums.pending[number] or self._seen.get(number) == (name, position):
                continue
            self._seen[number] = name, position
            line: dict[str, Any] = {"run": self._run, "step": step, "kind": kind, "request": name}
            line |= {"position": position, "behind": int(sums.behind[number])}
            line |= {a: x[number].tolist() for a in ARRAYS if (x := getattr(sums, a)) is not None}
            lines.append(line)
        self._append(*lines)

    def _append(self, *lines: Mapping[str, Any]) -> None:
        with open(self._path, "ab") as file:
            data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            if file.tell() + len(data) <= MOST_BYTES:
                file.write(data)
            else:
                _say_full(self._path)


@functools.cache
def _runs(path: str) -> Iterator[int]:
    """Numbers of a file's runs. A process empties it once: what it traces later is appended."""
    open(path, "wb").close()
    return itertools.count()


@functools.cache
def _say_full(path: str) -> None:
    log.warning("%s has %d MiB: what follows is not traced", path, MOST_BYTES >> 20)


def read_trace(path: str) -> tuple[Run, ...]:
    """The runs of a trace. A last line without its end (the run was killed) is left out.

    Raises:
        TraceError: not a trace, one of another version, damaged, or too large.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise TraceError(f"{path}: more than {MOST_BYTES:,} bytes; a trace has no more")
    runs: list[tuple[tuple[str, ...], list[Entry]]] = []
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            _read_line(line, runs)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    if not runs:
        raise TraceError(f"{path}: no run in it; it takes a file that GDNJAX_TRACE has written")
    return tuple(Run(layers, tuple(entries)) for layers, entries in runs)


def _read_line(line: bytes, runs: list[tuple[tuple[str, ...], list[Entry]]]) -> None:
    value = json.loads(line) if len(line) <= MOST_LINE else None
    if not isinstance(value, dict):
        raise ValueError("not a line of a trace; it takes a file that GDNJAX_TRACE has written")
    if not runs or "gdnjax_trace" in value:
        if value.get("gdnjax_trace") != FORMAT_VERSION:
            found = str(value.get("gdnjax_trace"))[:100]
            raise ValueError(f"gdnjax_trace = {found}; this version reads {FORMAT_VERSION}, on the first line")
        layers = value.get("layers")
        if value.get("run") != len(runs) or not isinstance(layers, list) or not set(map(str, layers)) <= {*LAYER_TYPES}:
            raise ValueError(f"not the beginning of run {len(runs)}")
        runs.append((tuple(map(str, layers)), []))
        return
    run = _number(value, "run", 0, len(runs) - 1)
    layers, entries = runs[run]
    kind = str(value.get("kind"))
    if not re.fullmatch(r"[a-z, ]{1,40}", kind):
        raise ValueError(f"kind = {kind[:100]!r}; it takes words such as decode")
    position = _number(value, "position", 1)
    sums = {name: _sums(value[name], name, layers) for name in ARRAYS if name in value}
    if missing := ARRAYS.keys() - sums.keys() - {"record"}:
        raise ValueError(f"no {', '.join(sorted(missing))}")
    behind = _number(value, "behind", 0, position)
    entries.append(Entry(_number(value, "step", 0), kind, _number(value, "request", 0), position, behind, sums))


def _number(value: dict[str, Any], key: str, least: int, most: int = 2**53) -> int:
    found = value.get(key)
    if type(found) is not int or not least <= found <= most:
        raise ValueError(f"{key} = {str(found)[:100]}; it takes an integer from {least} to {most}")
    return found


def _sums(found: Any, name: str, layers: tuple[str, ...]) -> tuple[int, ...]:
    count = layers.count(ARRAYS[name])
    if not isinstance(found, list) or len(found) != count or not all(type(x) is int and 0 <= x < 2**32 for x in found):
        raise ValueError(f"{name} = {str(found)[:100]}; it takes {count} integers under 2^32, one a layer")
    return tuple(found)

"""One request's state apart from the pool: taken, given to another request, saved and loaded.

The directory on disk:

* `gdnjax.json`: format version, the config that the state belongs to, the position, arrays, files.
* `state/`: Orbax: `recurrent.N` and `conv.N` by GDN layer, `keys.N` and `values.N` by attention layer.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.state.checkpoint import FREE, check_arrays, check_config, config_values
from gdnjax.state.device import PAGES_PER_COPY, Carried, run_carried, run_read_pages
from gdnjax.state.pytree import State, state_shapes
from gdnjax.weights.files import MANIFEST, CheckpointError, new_directory
from gdnjax.weights.manifest import Arrays, read_manifest, write_manifest
from gdnjax.weights.orbax_store import LazyArray, read_arrays, write_arrays

SNAPSHOT_FORMAT_VERSION = 1
_FOLDER = "state"

# A request moves between pools of other sizes and layouts: only what its own arrays mean must be the same.
_FREE = FREE | frozenset("max_requests max_length kv_tokens page_size state_layout speculate speculative_state".split())


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A request's committed state, on the host.

    * `position`: tokens that it contains, at least one.
    * `carried`: its recurrent state, and its rings as wide as they are without speculation.
    * `keys`, `values`: per attention layer `[position, G, D]`.
    """

    config: Config
    position: int
    carried: Carried
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]

    def carried_by(self, config: Config) -> Carried:
        """What a request of a pool of `config` carries in its place."""
        return _with_rings(self.carried, self.position, config.ring_columns)


def _with_rings(carried: Carried, position: int, columns: int) -> Carried:
    """With rings of so many columns, in which the last inputs before `position` stand where they belong."""

    def resized(ring: np.ndarray) -> np.ndarray:
        kept = np.arange(max(0, position - min(columns, len(ring))), position)
        new = np.zeros((columns, ring.shape[1]), ring.dtype)
        new[kept % columns] = ring[kept % len(ring)]
        return new

    conv: Any = tuple(resized(np.asarray(ring)) for ring in carried.conv)
    return dataclasses.replace(carried, conv=conv)


def groups(pages: Sequence[int]) -> list[np.ndarray]:
    """Pages in groups of `PAGES_PER_COPY`, the last one filled up with page 0."""
    padded = [*pages, *[0] * (-len(pages) % PAGES_PER_COPY)]
    return [np.asarray(padded[i : i + PAGES_PER_COPY], np.int32) for i in range(0, len(padded), PAGES_PER_COPY)]


def take(state: State, request: int, position: int, pages: Sequence[int]) -> Snapshot:
    """A request's state, fetched from the device: with a record, replayed before.

    pages: those of its first `position` tokens, at least one.
    """
    pieces = [jax.device_get(run_read_pages(state, group)) for group in groups(pages)]
    keys, values = (
        tuple(np.concatenate(layers)[:position] for layers in zip(*(piece[which] for piece in pieces), strict=True))
        for which in (0, 1)
    )
    carried = jax.device_get(run_carried(state, np.int32(request)))
    carried = _with_rings(carried, position, state.config.linear_conv_kernel_dim)
    return Snapshot(state.config, position, carried, keys, values)


def kv_pieces(
    snapshot: Snapshot, pages: Sequence[int], page_size: int
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]]:
    """What `write_pages` takes, call by call, to write a snapshot's keys and values into `pages`."""
    rows = PAGES_PER_COPY * page_size
    for number, group in enumerate(groups(pages)):

        def piece(array: np.ndarray, start: int = number * rows) -> np.ndarray:
            part = array[start : start + rows]
            return np.pad(part, [(0, rows - len(part)), (0, 0), (0, 0)])

        yield group, tuple(map(piece, snapshot.keys)), tuple(map(piece, snapshot.values))


def check_fits(snapshot: Snapshot, config: Config) -> None:
    """Refuses a snapshot of another model or another dtype.

    Raises:
        CheckpointError: names the first key that differs.
    """
    check_config(config_values(snapshot.config, _FREE), config, "the snapshot", _FREE)


def save_snapshot(path: str | os.PathLike[str], snapshot: Snapshot) -> None:
    """Writes a snapshot into the new directory `path`: all of it, or nothing.

    Raises:
        CheckpointError: `path` exists.
    """
    arrays = _named(snapshot)
    listed = {name: (np.dtype(array.dtype), tuple(array.shape)) for name, array in arrays.items()}
    lazy = {name: LazyArray(array.shape, array.dtype, lambda a=array: a) for name, array in arrays.items()}
    with new_directory(pathlib.Path(path)) as temporary:
        write_arrays(temporary / _FOLDER, lazy)
        values = {"config": config_values(snapshot.config, _FREE), "position": snapshot.position}
        write_manifest(temporary, "snapshot", SNAPSHOT_FORMAT_VERSION, _FOLDER, listed, **values)


def load_snapshot(path: str | os.PathLike[str], config: Config) -> Snapshot:
    """The snapshot that `save_snapshot` wrote, for a pool of `config`.

    Raises:
        CheckpointError: another format version, damaged files, or a config of another model or dtype.
    """
    directory = pathlib.Path(path)
    manifest = read_manifest(directory, "snapshot", SNAPSHOT_FORMAT_VERSION, _FOLDER)
    check_config(manifest.values.get("config"), config, directory / MANIFEST, _FREE)
    position = manifest.values.get("position")
    if not isinstance(position, int) or isinstance(position, bool) or not 1 <= position <= config.max_length:
        raise CheckpointError(
            f"{directory / MANIFEST}: position = {position!r}; it takes an integer from 1 to max_length = "
            f"{config.max_length}"
        )
    declared = _declared(config, position)
    check_arrays(manifest.tensors, declared, directory / MANIFEST)
    arrays = dict(read_arrays(directory / _FOLDER, declared))

    def layers(field: str) -> tuple[Any, ...]:
        return tuple(array for name, array in arrays.items() if name.split(".")[0] == field)

    return Snapshot(config, position, Carried(layers("recurrent"), layers("conv")), layers("keys"), layers("values"))


def _named(snapshot: Snapshot) -> dict[str, Any]:
    fields = {
        "recurrent": snapshot.carried.recurrent,
        "conv": snapshot.carried.conv,
        "keys": snapshot.keys,
        "values": snapshot.values,
    }
    return {f"{field}.{layer}": array for field, arrays in fields.items() for layer, array in enumerate(arrays)}


def _declared(config: Config, position: int) -> Arrays:
    whole = state_shapes(config.replace(speculate=0, speculative_state="record"))
    lead = {"recurrent": (), "conv": (), "keys": (position,), "values": (position,)}
    return {
        f"{field}.{layer}": (np.dtype(s.dtype), (*first, *s.shape[1:]))
        for field, first in lead.items()
        for layer, s in enumerate(getattr(whole, field))
    }

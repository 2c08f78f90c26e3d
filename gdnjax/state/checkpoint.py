"""The serving state on disk: saved and restored bit for bit, to be continued where it stopped.

The directory:

* `gdnjax.json`: format version, the config that the state belongs to, arrays, files.
* `state/`: Orbax, the state's arrays by field and layer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.state.pytree import State, state_shapes
from gdnjax.weights.files import CheckpointError, new_directory
from gdnjax.weights.manifest import MANIFEST, Arrays, read_manifest, write_manifest
from gdnjax.weights.orbax_store import read_arrays, write_arrays

STATE_FORMAT_VERSION = 1
_FOLDER = "state"

# Nothing in the state depends on these: they may differ between the run that saved and the one that goes on.
FREE = frozenset(
    """generation platform_overrides prefill_tokens kernels attention_pin attention_segment memory_fraction
    prefix_cache_bytes prefix_interval initializer_range language_model_only tie_word_embeddings
    mtp_num_hidden_layers max_position_embeddings""".split()
)


def save_state(path: str | os.PathLike[str], state: State) -> None:
    """Writes a state into the new directory `path`: all of it, or nothing. The state stays usable.

    Raises:
        CheckpointError: `path` exists.
    """
    arrays = _named(state)
    listed = {name: (np.dtype(array.dtype), tuple(array.shape)) for name, array in arrays.items()}
    with new_directory(pathlib.Path(path)) as temporary:
        write_arrays(temporary / _FOLDER, arrays)
        config = config_values(state.config)
        write_manifest(temporary, "state", STATE_FORMAT_VERSION, _FOLDER, listed, config=config)


def restore_state(path: str | os.PathLike[str], config: Config, sharding: jax.sharding.Sharding | None = None) -> State:
    """The state that `save_state` wrote.

    Args:
        path: the directory.
        config: the config to go on with. What shapes the state or gives it its meaning must be as it was;
            sampling defaults and `prefill_tokens` may differ.
        sharding: for all arrays; None is the default device.

    Raises:
        CheckpointError: another format version, damaged files, a config that does not fit, arrays of another
            dtype or shape, or positions, slots or pages outside the config's limits.
    """
    directory = pathlib.Path(path)
    manifest = read_manifest(directory, "state", STATE_FORMAT_VERSION, _FOLDER)
    check_config(manifest.values.get("config"), config, directory / MANIFEST)
    shapes = state_shapes(config)
    declared: Arrays = {name: (np.dtype(a.dtype), tuple(a.shape)) for name, a in _named(shapes).items()}
    check_arrays(manifest.tensors, declared, directory / MANIFEST)
    placed = None if sharding is None else dict.fromkeys(declared, sharding)
    # Uncommitted without a sharding, as `init_state` makes them: no function is compiled a second time.
    arrays = {
        n: jax.device_put(a) if sharding is None else a for n, a in read_arrays(directory / _FOLDER, declared, placed)
    }
    _check_numbers(arrays, config, directory)
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in declared])


def _named(state: State) -> dict[str, Any]:
    # in the order of the pytree's leaves: by field, then by layer
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def config_values(config: Config, free: frozenset[str] = FREE) -> dict[str, Any]:
    """The keys of a config that a saved state depends on, as JSON gives them back."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in free}
    return json.loads(json.dumps(values))  # tuples become lists, as they come back


def check_config(saved: Any, config: Config, path: pathlib.Path | str, free: frozenset[str] = FREE) -> None:
    """Raises CheckpointError, naming the first key in which the saved config differs from `config`."""
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: config = {str(saved)[:100]}; it takes an object")
    here = config_values(config, free)
    for key in sorted(here.keys() | saved.keys()):
        if key not in saved or key not in here or saved[key] != here[key]:
            raise CheckpointError(
                f"{path}: the state was saved with {key} = {str(saved.get(key))[:200]}, the config has "
                f"{here.get(key)!r}; restore it with the config it was saved with"
            )


def check_arrays(stored: Arrays, declared: Arrays, path: pathlib.Path) -> None:
    """Raises CheckpointError, naming the first array that is not as the config declares it."""
    for name in sorted(stored.keys() | declared.keys()):
        if stored.get(name) != declared.get(name):
            found, takes = (
                "nothing" if entry is None else f"{entry[0]} {list(entry[1])}"
                for entry in (stored.get(name), declared.get(name))
            )
            raise CheckpointError(f"{path}: {name!r} is {found}; the config takes {takes}")


def _check_numbers(arrays: dict[str, Any], config: Config, directory: pathlib.Path) -> None:
    # Indices clamp on a device instead of failing, so a bad one would read another request's state.
    limits = {
        "read_slot": config.slots - 1,
        "write_slot": config.slots - config.step_slots,
        "position": config.pages_per_request * config.page_size,
        "pending": config.pages_per_request * config.page_size,
        "page_table": config.kv_pages,
    }
    if config.records:
        limits |= {"record.recorded.live": config.verify_rows, "record.recorded.parity": 1}
    for name, limit in limits.items():
        values = np.asarray(arrays[name])
        if values.min() < 0 or values.max() > limit:
            wrong = int(values[(values < 0) | (values > limit)][0])
            raise CheckpointError(f"{directory}: {name} holds {wrong}; it takes 0 to {limit}: the state is corrupt")

"""Import and export of Hugging Face safetensors checkpoints, one tensor at a time."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gdnjax.config import Config
from gdnjax.weights.declaration import Params, from_tensor_names
from gdnjax.weights.files import CheckpointError, new_directory
from gdnjax.weights.hf_names import NameStyle, Plan, file_name, plan_tensors
from gdnjax.weights.placement import place, run_targets
from gdnjax.weights.safetensors_format import INDEX_FILE, NUMPY, SINGLE_FILE, read_directory

SHARD_BYTES = 5 * 10**9
"""Largest shard that is written, as Hugging Face cuts them; one tensor above it gets a shard of its own."""

TensorSpec = tuple[str, np.dtype, tuple[int, ...]]
"""(name, dtype, shape)"""

_FINITE_STEP = 2**22


def plan_directory(directory: str | os.PathLike[str], config: Config) -> Plan:
    """The tensors of a checkpoint directory, checked against the config; reads headers only.

    Raises:
        CheckpointError: a bad file, or tensors that do not match the declaration.
    """
    path = pathlib.Path(directory)
    return plan_tensors(read_directory(path), config, path)


def read_tensors(directory: str | os.PathLike[str], config: Config) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of a Hugging Face checkpoint, one at a time.

    All names, shapes and dtypes are checked by this call, before the first tensor is read. Host memory
    holds no more than the array that was given out last and the one being read.

    Args:
        directory: holds `model.safetensors`, or `model.safetensors.index.json` and its shards.
        config: its config.

    Returns:
        (declared name, array in the dtype of the file: float32 or bfloat16), in the order of the files.

    Raises:
        CheckpointError: here for a bad file or tensors that do not match the config; while iterating, for a
            tensor with a NaN or an infinity.
    """
    return read_plan(plan_directory(directory, config))


def read_plan(plan: Plan, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """`read_tensors` of a plan; `names` chooses another order."""
    for name in plan.tensors if names is None else names:
        array = plan.tensors[name].read()
        check_finite(name, array, plan.tensors[name].path)
        yield name, array
        del array  # else it would live on while the next one is read


def check_finite(name: str, array: np.ndarray, source: object) -> None:
    """Raises CheckpointError if a float32 or bfloat16 array holds a NaN or an infinity."""
    # The exponent bits are all ones exactly for those. Integer work on a slice at a time: quick, and without
    # a mask as long as the array.
    word, exponent = (np.uint16, 0x7F80) if array.dtype.itemsize == 2 else (np.uint32, 0x7F800000)
    bits = array.reshape(-1).view(word)
    for start in range(0, bits.size, _FINITE_STEP):
        piece = bits[start : start + _FINITE_STEP] & word(exponent)
        if piece.max() == exponent:
            at = np.unravel_index(start + int(piece.argmax()), array.shape)
            where = f"[{', '.join(map(str, at))}]"
            raise CheckpointError(
                f"{source}: tensor {name!r} is {array[at]} at {where}; it takes finite numbers: the file is corrupt or "
                "its training diverged"
            )


def load_safetensors(
    directory: str | os.PathLike[str], config: Config, dtype: str | None = None, shardings: Any = None
) -> Params:
    """Params on the device(s), straight from a Hugging Face checkpoint, tensor by tensor.

    Each tensor is moved in the dtype of its file and then cast on the device to the dtype it runs in:
    float32 for `A_log`, `dt_bias` and `linear_attn.norm.weight`, `dtype` for all others.

    Args:
        directory: see `read_tensors`.
        config: its config.
        dtype: float32 or bfloat16; None is `config.dtype`.
        shardings: one sharding for all arrays, or a pytree of them like params
            (`gdnjax.weights.sharding.shardings`); None is the default device.

    Raises:
        CheckpointError: see `read_tensors`.
    """
    targets = run_targets(config, dtype, shardings)
    params = {}
    for name, array in read_tensors(directory, config):
        params[name] = place(array, targets[name])
    return from_tensor_names(config, params)


def write_safetensors(
    directory: str | os.PathLike[str],
    tensors: Iterable[tuple[str, Any]],
    names: NameStyle = "flat",
    files: Mapping[str, bytes | pathlib.Path] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes a new Hugging Face checkpoint directory: all of it, or nothing.

    Arrays are written bit for bit in their own dtype, and come to the host one at a time.

    Args:
        directory: must not exist.
        tensors: (declared name, float32 or bfloat16 array of NumPy or JAX):
            `gdnjax.weights.declaration.tensor_names(params).items()`.
        names: prefix of the text model in the files: `flat` (`model.`) or `language_model`
            (`model.language_model.`).
        files: more files for the directory, by name: contents, or a path to copy (`config.json`).
        shard_bytes: most bytes of tensors a file.

    Raises:
        CheckpointError: the directory exists, a name stands twice, another dtype.
        ValueError: unknown `names`.
    """
    pairs = list(tensors)
    arrays = dict(pairs)
    if len(arrays) != len(pairs):
        twice = [name for name, count in collections.Counter(name for name, _ in pairs).items() if count > 1]
        raise CheckpointError(f"tensor names that stand twice: {', '.join(twice)}")
    specs = file_order([(name, np.dtype(array.dtype), tuple(array.shape)) for name, array in pairs])
    with new_directory(pathlib.Path(directory)) as target:
        write_shards(target, specs, ((name, np.asarray(arrays[name])) for name, _, _ in specs), names, shard_bytes)
        for name, content in (files or {}).items():
            if isinstance(content, bytes):
                (target / name).write_bytes(content)
            else:
                shutil.copyfile(content, target / name)


def file_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """The order in which `write_shards` takes tensors: wide dtypes first, so that every tensor is aligned."""
    return sorted(specs, key=lambda spec: -spec[1].itemsize)


def write_shards(
    directory: pathlib.Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, np.ndarray]],
    names: NameStyle = "flat",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes `model.safetensors`, or shards and their index, into an existing directory.

    Args:
        directory: where to.
        specs: what will be written, in `file_order`.
        tensors: the arrays, in the same order; taken one at a time.
        names: see `write_safetensors`.
        shard_bytes: see `write_safetensors`.

    Raises:
        CheckpointError: a dtype other than float32 and bfloat16, no tensors.
        ValueError: unknown `names`; arrays that are not those of `specs`.
    """
    shards = _cut(specs, shard_bytes)
    source = iter(tensors)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        total += _write_shard(directory / file, shard, source, names)
        weight_map.update({file_name(name, names): file for name, _, _ in shard})
    for name, _ in source:
        raise ValueError(f"got {name!r} after the last array of specs")
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _cut(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    if not specs:
        raise CheckpointError("no tensors to write")
    shards: list[list[TensorSpec]] = []
    size = 0
    for spec in specs:
        if spec[1] not in NUMPY.values():
            raise CheckpointError(f"tensor {spec[0]!r} is {spec[1]}; it takes float32 or bfloat16")
        if not shards or size + _nbytes(spec) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += _nbytes(spec)
    return shards


def _nbytes(spec: TensorSpec) -> int:
    count = spec[1].itemsize
    for dimension in spec[2]:
        count *= dimension
    return count


def _write_shard(
    path: pathlib.Path, specs: list[TensorSpec], source: Iterator[tuple[str, np.ndarray]], names: NameStyle
) -> int:
    dtypes = {numpy: name for name, numpy in NUMPY.items()}
    # Hugging Face refuses a file that does not say which framework's layout it has.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in specs:
        begin, end = end, end + _nbytes((name, dtype, shape))
        header[file_name(name, names)] = {"dtype": dtypes[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in specs:
            given, array = next(source)
            if (given, array.dtype, array.shape) != (name, dtype, shape):
                raise ValueError(f"got {given!r} {array.dtype} {array.shape}, the header says {name!r} {dtype} {shape}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            del array
    return end

"""`gdnjax.json`: what a checkpoint directory of this project holds, next to the Orbax folder itself.

Orbax does not notice a changed byte in an array, and its errors for missing files name neither file nor
array. The manifest lists every array and every file with its size and checksum, so that damage is found
before anything goes to a device.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gdnjax.config import ConfigError
from gdnjax.config.huggingface import read_json
from gdnjax.weights.files import MANIFEST, CheckpointError
from gdnjax.weights.orbax_store import stored_arrays

_READ_BYTES = 2**22

Arrays = dict[str, tuple[np.dtype, tuple[int, ...]]]
"""dtype and shape by name"""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A manifest: its arrays by name, and all its other keys."""

    tensors: Arrays
    values: Mapping[str, Any]


def write_manifest(
    directory: pathlib.Path, kind: str, version: int, folder: str, arrays: Arrays, **values: Any
) -> None:
    """Writes `gdnjax.json` for the Orbax folder `directory / folder`, which is there already.

    Args:
        directory: the checkpoint directory.
        kind: `weights` or `state`.
        version: format version of that kind.
        folder: name of the Orbax folder.
        arrays: what it holds.
        **values: more keys, JSON values.
    """
    root = directory / folder
    files = [path for path in sorted(root.rglob("*")) if path.is_file()]
    content = {
        "format_version": version,
        "kind": kind,
        **values,
        "tensors": {name: {"dtype": dtype.name, "shape": list(shape)} for name, (dtype, shape) in arrays.items()},
        "files": {
            file.relative_to(directory).as_posix(): {"bytes": file.stat().st_size, "crc32": checksum}
            for file, checksum in zip(files, _checksums(files), strict=True)
        },
    }
    (directory / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: pathlib.Path, kind: str, version: int, folder: str) -> Manifest:
    """Reads `gdnjax.json`, and checks the files it lists and the arrays that Orbax says it has.

    Raises:
        CheckpointError: no manifest, another kind or version, a missing or cut file, or an array that is
            missing, too many, or of another dtype or shape.
    """
    path = directory / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{directory}: no {MANIFEST} there; it takes a checkpoint made by gdnjax")
    try:
        values = read_json(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    for key, takes in (("kind", kind), ("format_version", version)):
        if values.get(key) != takes or isinstance(values.get(key), bool):
            raise CheckpointError(
                f"{path}: {key} = {str(values.get(key))[:100]!r}; this version of gdnjax takes {takes!r}: make the "
                "checkpoint again from its source, or use the version that wrote it"
            )
    tensors = _tensors(values.get("tensors"), path)
    _check_files(values.get("files"), directory, folder, path)
    _check_stored(tensors, stored_arrays(directory / folder), path, folder)
    return Manifest(tensors, values)


def _tensors(value: Any, path: pathlib.Path) -> Arrays:
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: tensors = {str(value)[:100]}; it takes an object")
    arrays: Arrays = {}
    for name, entry in value.items():
        try:
            dtype, shape = np.dtype(str(entry["dtype"])), entry["shape"]
            if not all(type(d) is int and d >= 0 for d in shape):
                raise ValueError
            arrays[name] = (dtype, tuple(shape))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: tensor {name!r} = {str(entry)[:200]}; it takes a dtype and a shape"
            ) from None
    return arrays


def _check_files(files: Any, directory: pathlib.Path, folder: str, path: pathlib.Path) -> None:
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: files = {str(files)[:100]}; it takes file name -> bytes and crc32")
    listed = {}
    for name, entry in files.items():
        parts = pathlib.PurePosixPath(name).parts
        if not parts or parts[0] != folder or ".." in parts or "\0" in name:
            raise CheckpointError(f"{path}: lists the file {name!r}; it takes files in {folder}/")
        if not isinstance(entry, dict) or set(entry) != {"bytes", "crc32"}:
            raise CheckpointError(f"{path}: file {name!r} = {str(entry)[:100]}; it takes bytes and crc32")
        file = directory.joinpath(*parts)
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; copy the checkpoint again")
        size = file.stat().st_size
        if size != entry["bytes"]:
            takes = str(entry["bytes"])[:50]
            raise CheckpointError(f"{file}: {size} bytes, {MANIFEST} says {takes}: truncated or changed; copy it again")
        listed[file] = entry["crc32"]
    for (file, takes), checksum in zip(listed.items(), _checksums(list(listed)), strict=True):
        if checksum != takes:
            takes = str(takes)[:50]
            raise CheckpointError(f"{file}: crc32 {checksum}, {MANIFEST} says {takes}: corrupt; copy it again")


def _checksums(files: list[pathlib.Path]) -> list[str]:
    # zlib works without the interpreter's lock, so threads read at the speed of the disk.
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_checksum, files))


def _checksum(path: pathlib.Path) -> str:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def _check_stored(declared: Arrays, stored: Arrays, path: pathlib.Path, folder: str) -> None:
    problems = [f"{folder}/ lacks {name!r}" for name in declared if name not in stored]
    problems += [f"{folder}/ holds {name!r}, which is not listed" for name in stored if name not in declared]
    for name in declared.keys() & stored.keys():
        if declared[name] != stored[name]:
            (dtype, shape), (listed, wanted) = stored[name], declared[name]
            problems.append(f"{name!r} is {dtype} {list(shape)} in {folder}/, listed as {listed} {list(wanted)}")
    if problems:
        raise CheckpointError(f"{path}: " + "\n".join(sorted(problems)))

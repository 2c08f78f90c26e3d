"""The safetensors file format, read as the untrusted input that it is.

A file is 8 bytes of header length, a JSON header, then the tensors' bytes back to back. Everything the
header claims is checked against the file before anything of that size is allocated.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from gdnjax.weights.files import CheckpointError, inside

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The largest published models need less than 1 MiB.
MAX_HEADER_BYTES = 16 * 2**20

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
NUMPY = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""The dtypes that weights may have, by their name in the file."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: where its bytes are, nothing read yet."""

    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> np.ndarray:
        """The tensor, in memory of its own: no part of the file stays mapped.

        Raises:
            CheckpointError: a dtype outside `NUMPY`, or a file that has shrunk since its header was read.
        """
        if self.dtype not in NUMPY:
            raise CheckpointError(f"{self.path}: a tensor of dtype {self.dtype}; it takes {' or '.join(NUMPY)}")
        array = np.empty(self.shape, NUMPY[self.dtype])
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.offset)
            target = array.reshape(-1).view(np.uint8).data
            while target:
                count = file.readinto(target)
                if not count:
                    raise CheckpointError(f"{self.path}: ends at byte {file.tell():,}, it was longer a moment ago")
                target = target[count:]
        return array


def read_header(path: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of one file by the name they have in it.

    Raises:
        CheckpointError: truncated, too long, overlapping, or otherwise not a valid safetensors file.
    """
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors file (truncated?); copy it again")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: header of {length:,} bytes; it takes at most {MAX_HEADER_BYTES:,} (not a safetensors file?)"
            )
        if 8 + length > size:
            raise CheckpointError(f"{path}: {size:,} bytes, the header needs {8 + length:,}: truncated; copy it again")
        header = _json(file.read(length), path)
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, 8 + length, path) for name, entry in header.items()}
    _check_layout(tensors, 8 + length, size, path)
    return tensors


def _json(text: bytes, path: pathlib.Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = next(key for i, (key, _) in enumerate(pairs) if key in dict(pairs[:i]))
            raise CheckpointError(f"{path}: the name {twice!r} stands twice in it")
        return values

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: no valid JSON header: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a {type(value).__name__}; it takes a JSON object")
    return value


def _tensor(name: str, entry: Any, start: int, path: pathlib.Path) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: its entry takes exactly dtype, shape and data_offsets, not {str(entry)[:200]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise CheckpointError(f"{where}: dtype = {str(dtype)[:50]!r}; it takes one of {', '.join(NUMPY)}")
    if not _naturals(shape) or len(shape) > 8:
        raise CheckpointError(f"{where}: shape = {str(shape)[:200]}; it takes up to 8 integers >= 0")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets = {str(offsets)[:200]}; it takes two integers, begin <= end")
    bits = BITS[dtype]
    for dimension in shape:
        bits *= dimension
    if bits != 8 * (offsets[1] - offsets[0]):
        held = offsets[1] - offsets[0]
        raise CheckpointError(f"{where}: {dtype} {shape} takes {bits // 8:,} bytes, data_offsets span {held:,}")
    return StoredTensor(path, dtype, tuple(shape), start + offsets[0], offsets[1] - offsets[0])


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 2**63 for v in value)


def _check_layout(tensors: dict[str, StoredTensor], start: int, size: int, path: pathlib.Path) -> None:
    end = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            raise CheckpointError(f"{path}: tensor {name!r} {what} (it begins at byte {tensor.offset:,}, not {end:,})")
        end += tensor.nbytes
    if size < end:
        raise CheckpointError(f"{path}: {size:,} bytes, its tensors need {end:,}: truncated; copy it again")
    if size > end:
        raise CheckpointError(f"{path}: {size:,} bytes, its tensors end at {end:,}: corrupt; copy it again")


def read_directory(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint directory, of `model.safetensors` or of the shards that an index lists.

    Raises:
        CheckpointError: no or two ways to read it, a bad index, shard or header, a tensor in two shards.
    """
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(f"{directory}: both {SINGLE_FILE} and {INDEX_FILE}; remove the one that is out of date")
    if index.exists():
        return _read_shards(directory)
    if not single.exists():
        raise CheckpointError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; it takes a safetensors checkpoint")
    return read_header(inside(directory, SINGLE_FILE))


def _read_shards(directory: pathlib.Path) -> dict[str, StoredTensor]:
    path = inside(directory, INDEX_FILE)
    size = path.stat().st_size
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: {size:,} bytes; it takes at most {MAX_HEADER_BYTES:,}")
    weight_map = _json(path.read_bytes(), path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map = {str(weight_map)[:100]}; it takes tensor name -> file name")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path}: {name!r} is in {str(file)[:200]!r}; it takes a .safetensors file")
    tensors: dict[str, StoredTensor] = {}
    files = sorted(set(weight_map.values()))
    for file in files:
        shard = inside(directory, file)
        for name, tensor in read_header(shard).items():
            if name in tensors:
                raise CheckpointError(
                    f"{shard}: tensor {name!r} is also in {tensors[name].path.name}; remove one of them"
                )
            if name not in weight_map:
                raise CheckpointError(f"{shard}: holds tensor {name!r}, which {INDEX_FILE} does not list")
            tensors[name] = tensor
    absent = [f"{n!r} ({file})" for n, file in weight_map.items() if n not in tensors or tensors[n].path.name != file]
    if absent:
        raise CheckpointError(f"{path}: tensors that are not in the shards it names: {', '.join(absent)}")
    return tensors

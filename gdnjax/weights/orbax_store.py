"""Named arrays in an Orbax directory: written and read a few at a time, without any cast.

The tree is one flat dict, so an array's key is its name. Orbax's stock checkpointers read what this
writes. Orbax is imported here only, and only by the functions that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gdnjax.weights.files import CheckpointError

# What one Orbax call reads or writes: enough for full speed, little beside the memory of a host.
_GROUP_BYTES = 2**28
# A chunk is what is read whole: smaller than a large tensor, so that a shard of it does not read all of it.
_CHUNK_BYTES = 2**26


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array to write whose values are read when its turn comes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def write_arrays(path: pathlib.Path, arrays: Mapping[str, LazyArray | jax.Array]) -> None:
    """Writes a new Orbax directory; `LazyArray`s are read one group of `_GROUP_BYTES` at a time, in order."""
    import orbax.checkpoint as ocp
    from orbax.checkpoint import type_handlers

    class StreamingHandler(type_handlers.NumpyHandler):
        """Orbax's handler of NumPy arrays, fed with a few of them at a time: it would hold all at once."""

        async def serialize(self, values: Sequence[Any], infos: Sequence[Any], args: Any = None) -> list[Any]:
            args = args or [ocp.SaveArgs()] * len(values)
            for group in _groups([value.nbytes for value in values]):
                read = [values[i].read() for i in group]
                futures = await super().serialize(read, [infos[i] for i in group], [args[i] for i in group])
                for future in futures:
                    future.result()
                del read
            return []

    registry = type_handlers.create_type_handler_registry(
        (LazyArray, StreamingHandler(deepcopy_host_arrays=False)), (jax.Array, type_handlers.ArrayHandler())
    )
    # Weights hardly compress, and compressing is slower than a disk.
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    save_args = {name: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES) for name in arrays}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(dict(arrays), save_args=save_args))
    # Orbax notes there which folder it wrote, a temporary one on the machine that ran it.
    note = path / "commit_success.txt"
    if note.exists():
        note.write_text("Checkpoint commit was successful.\n", encoding="utf-8")


def stored_arrays(path: pathlib.Path) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """dtype and shape of every array in an Orbax directory, by name.

    Raises:
        CheckpointError: not a readable Orbax directory, or one that holds something else than a flat dict.
    """
    import orbax.checkpoint as ocp

    with _readable(path), ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path.absolute()).item_metadata.tree
        if not isinstance(tree, dict):
            raise CheckpointError(f"{path}: holds a {type(tree).__name__}; it takes a flat dict of arrays")
        arrays = {}
        for name, leaf in tree.items():
            dtype, shape = getattr(leaf, "dtype", None), getattr(leaf, "shape", None)
            if dtype is None or shape is None:
                raise CheckpointError(f"{path}: {name!r} is a {type(leaf).__name__}; it takes an array")
            arrays[str(name)] = (np.dtype(dtype), tuple(shape))
        return arrays


def read_arrays(
    path: pathlib.Path,
    arrays: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    shardings: Mapping[str, jax.sharding.Sharding] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Arrays of an Orbax directory in the order of `arrays`, in the dtype they are stored in.

    Args:
        path: the Orbax directory.
        arrays: what to read, with the dtype and shape it must have.
        shardings: where each array goes; None: to the host, as NumPy arrays.

    Raises:
        CheckpointError: files that cannot be read, or an array of another dtype or shape.
    """
    import orbax.checkpoint as ocp

    names = list(arrays)
    with _readable(path), ocp.PyTreeCheckpointer() as checkpointer:
        for group in _groups([math.prod(shape) * dtype.itemsize for dtype, shape in arrays.values()]):
            wanted = {names[i]: 0 for i in group}
            restore_args = {}
            for name in wanted:
                if shardings is None:
                    restore_args[name] = ocp.RestoreArgs(restore_type=np.ndarray)
                else:
                    shape = arrays[name][1]
                    restore_args[name] = ocp.ArrayRestoreArgs(sharding=shardings[name], global_shape=shape)
            values = checkpointer.restore(
                path.absolute(),
                args=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args, partial_restore=True),
            )
            for name in wanted:
                value = values.pop(name)
                if (value.dtype, value.shape) != arrays[name]:
                    dtype, shape = arrays[name]
                    raise CheckpointError(
                        f"{path}: {name!r} is {value.dtype} {list(value.shape)}; it takes {dtype} {list(shape)}"
                    )
                yield name, value
                del value


def _groups(sizes: Sequence[int]) -> Iterator[list[int]]:
    group: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if group and total + size > _GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(i)
        total += size
    if group:
        yield group


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
    # Orbax and TensorStore raise nearly any type for a damaged directory, with messages of many lines.
    try:
        yield
    except (CheckpointError, MemoryError, GeneratorExit):
        raise
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0][:400]
        raise CheckpointError(
            f"{path}: not a readable Orbax checkpoint ({type(error).__name__}: {first}); copy it or convert it again"
        ) from error

"""The checkpoint directory of this project, and the conversion between it and Hugging Face's.

The directory:

* `config.json`, `generation_config.json`, tokenizer files: copies of the source's.
* `gdnjax.json`: format version, how the source names its tensors, tensors, files.
* `weights/`: Orbax, one array a Hugging Face tensor.

Arrays have the dtype of the file they came from, so that a conversion there and back changes no bit.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gdnjax.config import Config, from_directory
from gdnjax.weights.declaration import FORMAT_VERSION, Params, abstract_params, from_tensor_names, tensor_names
from gdnjax.weights.files import MANIFEST, CheckpointError, inside, is_checkpoint, new_directory
from gdnjax.weights.hf_names import PREFIXES
from gdnjax.weights.manifest import Arrays, Manifest, read_manifest, write_manifest
from gdnjax.weights.orbax_store import LazyArray, read_arrays, write_arrays
from gdnjax.weights.placement import place, run_targets
from gdnjax.weights.safetensors_format import NUMPY
from gdnjax.weights.safetensors_io import TensorSpec, file_order, plan_directory, read_plan, write_shards

WEIGHTS = "weights"

COPIED = (
    "config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja chat_template.json vocab.json merges.txt"
).split()
"""Files that a conversion copies, byte for byte, where the source has them."""

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all) after every tensor."""


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    to: str = "orbax",
    progress: Progress | None = None,
    language_model_only: bool = False,
    **overrides: Any,
) -> None:
    """Converts a checkpoint directory: all of it, or nothing.

    Every tensor is written in the dtype it has, bit for bit. Everything goes into a hidden directory beside
    `dst` that gets its name at the end; a run that is killed leaves only that one, and the next run removes it.

    Args:
        src: a Hugging Face directory, or, for `to="safetensors"`, one in this project's format.
        dst: must not exist.
        to: `orbax`, this project's format, or `safetensors`, Hugging Face's.
        progress: called with (tensors done, tensors in all) after every tensor.
        language_model_only: leave a vision tower out; a source with one is refused otherwise.
        **overrides: keys of `Config` that win over `config.json`, against which the tensors are checked.

    Raises:
        CheckpointError: `dst` exists, a bad file, tensors that do not match the config.
        ConfigError: a `config.json` that cannot work.
        ValueError: another `to`.
    """
    if to not in ("orbax", "safetensors"):
        raise ValueError(f"to = {to!r}; it takes 'orbax' or 'safetensors'")
    source, target = pathlib.Path(src), pathlib.Path(dst)
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such directory; it takes a checkpoint directory")
    if is_checkpoint(source) and to == "orbax":
        raise CheckpointError(f"{source} is in this format already; take to='safetensors', or copy it")
    if language_model_only:  # else config.json decides
        overrides["language_model_only"] = True
    config = from_directory(source, **overrides)
    if to == "orbax":
        _to_orbax(source, target, config, progress)
    else:
        _to_safetensors(source, target, config, progress)


def _to_orbax(source: pathlib.Path, target: pathlib.Path, config: Config, progress: Progress | None) -> None:
    plan = plan_directory(source, config)
    report = _Report(len(plan.tensors), progress)

    def lazy(name: str) -> LazyArray:
        def read() -> np.ndarray:
            ((_, array),) = read_plan(plan, [name])
            report()
            return array

        return LazyArray(plan.tensors[name].shape, NUMPY[plan.tensors[name].dtype], read)

    arrays = {name: lazy(name) for name in plan.tensors}
    with new_directory(target) as temporary:
        write_arrays(temporary / WEIGHTS, arrays)
        listed = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        write_manifest(temporary, "weights", FORMAT_VERSION, WEIGHTS, listed, name_style=plan.name_style)
        _copy_files(source, temporary)


def _to_safetensors(source: pathlib.Path, target: pathlib.Path, config: Config, progress: Progress | None) -> None:
    if is_checkpoint(source):
        manifest = _manifest(source, config)
        style, specs = manifest.values["name_style"], _specs(manifest.tensors)
        tensors = read_arrays(source / WEIGHTS, {name: manifest.tensors[name] for name, _, _ in specs})
    else:
        plan = plan_directory(source, config)
        style, specs = plan.name_style, _specs({n: (NUMPY[t.dtype], t.shape) for n, t in plan.tensors.items()})
        tensors = read_plan(plan, [name for name, _, _ in specs])
    report = _Report(len(specs), progress)

    def reported() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in tensors:
            yield name, array
            report()

    with new_directory(target) as temporary:
        write_shards(temporary, specs, reported(), style)
        _copy_files(source, temporary)


def _specs(arrays: Arrays) -> list[TensorSpec]:
    return file_order((name, dtype, shape) for name, (dtype, shape) in arrays.items())


class _Report:
    def __init__(self, total: int, progress: Progress | None):
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)


def _copy_files(source: pathlib.Path, target: pathlib.Path) -> None:
    for name in COPIED:
        if (source / name).exists():
            shutil.copyfile(inside(source, name), target / name)


def restore(dst: str | os.PathLike[str], config: Config, dtype: str | None = None, shardings: Any = None) -> Params:
    """Params on the device(s), straight from a directory in this project's format.

    Arrays arrive in the dtype they are stored in, each shard on its device, and are then cast on the device
    to the dtype they run in: float32 for `A_log`, `dt_bias` and `linear_attn.norm.weight`, `dtype` for all
    others. That is the only cast.

    Args:
        dst: what `convert` wrote.
        config: its config.
        dtype: float32 or bfloat16; None is `config.dtype`.
        shardings: one sharding for all arrays, or a pytree of them like params
            (`gdnjax.weights.sharding.shardings`); None is the default device.

    Raises:
        CheckpointError: another format version, damaged files, or an array that is missing, too many, or of
            another dtype or shape than `gdnjax.json` or the config says.
    """
    directory = pathlib.Path(dst)
    targets = run_targets(config, dtype, shardings)
    arrays = _manifest(directory, config).tensors
    placed = {name: target.sharding for name, target in targets.items() if target.sharding is not None}
    params = {}
    for name, array in read_arrays(directory / WEIGHTS, {name: arrays[name] for name in targets}, placed or None):
        params[name] = place(array, targets[name])
    return from_tensor_names(config, params)


def _manifest(directory: pathlib.Path, config: Config) -> Manifest:
    manifest = read_manifest(directory, "weights", FORMAT_VERSION, WEIGHTS)
    path = directory / MANIFEST
    style = manifest.values.get("name_style")
    if not isinstance(style, str) or style not in PREFIXES:
        raise CheckpointError(f"{path}: name_style = {str(style)[:100]!r}; it takes {' or '.join(map(repr, PREFIXES))}")
    problems = _against_config(manifest.tensors, config)
    if problems:
        raise CheckpointError(f"{path}: " + "\n".join(problems))
    return manifest


def _against_config(arrays: Arrays, config: Config) -> list[str]:
    declared = tensor_names(abstract_params(config))
    problems = [f"lacks {name!r}, which the config declares" for name in declared if name not in arrays]
    for name, (dtype, shape) in arrays.items():
        if name not in declared:
            problems.append(f"holds {name!r}, which the config does not declare")
        elif shape != tuple(declared[name].shape):
            problems.append(f"{name!r} has shape {list(shape)}; the config declares {list(declared[name].shape)}")
        if dtype not in NUMPY.values():
            problems.append(f"{name!r} has dtype {dtype}; it takes float32 or bfloat16")
    return problems

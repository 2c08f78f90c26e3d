"""The checkpoint directory: conversion there and back, restoring, refusals, damage, kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from gdnjax.weights import orbax_store
from gdnjax.weights.declaration import FORMAT_VERSION, tensor_names
from gdnjax.weights.files import CheckpointError, new_directory
from gdnjax.weights.manifest import MANIFEST, write_manifest
from gdnjax.weights.orbax_io import WEIGHTS, convert, restore
from gdnjax.weights.orbax_store import LazyArray, read_arrays, stored_arrays, write_arrays
from gdnjax.weights.safetensors_io import load_safetensors, plan_directory, read_tensors
from tests.helpers import assert_same_bits

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE_MODEL = "model.language_model."
NORM = "model.norm.weight"
NORM_SPEC = (np.dtype(ml_dtypes.bfloat16), (32,))


def assert_same(found: Any, wanted: Any) -> None:
    found, wanted = dict(found), dict(wanted)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_same_bits(found[name], array, name)


def write_own(path: Path, arrays: dict[str, np.ndarray], listed: dict[str, np.ndarray] | None = None) -> Path:
    """A directory with any arrays in it, and a manifest that lists those or others."""
    path.mkdir()
    lazy = {n: LazyArray(a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()}
    write_arrays(path / WEIGHTS, lazy)
    entries = {n: (a.dtype, a.shape) for n, a in (arrays if listed is None else listed).items()}
    write_manifest(path, "weights", FORMAT_VERSION, WEIGHTS, entries, name_style="flat")
    return path


def refuses(path: Path, config: Any, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        restore(path, config)
    assert str(path) in str(caught.value)
    return str(caught.value)


# Conversion


@pytest.mark.newest
@pytest.mark.parametrize("prefix", ["model.", LANGUAGE_MODEL])
@pytest.mark.parametrize(("tied", "mtp"), [(False, True), (True, False)])
def test_there_and_back_changes_no_bit(make, tmp_path: Path, prefix: str, tied: bool, mtp: bool) -> None:
    checkpoint = make(prefix=prefix, tied=tied, mtp=mtp)
    checkpoint.tensors["model.layers.0.linear_attn.dt_bias"][:] = [-0.0, 1e-40, 3e38, -1e-40]
    source, own, back = checkpoint.write_shards(), tmp_path / "own", tmp_path / "back"
    verbatim = {"generation_config.json": b'{"temperature": 0.6 }\n', "tokenizer.json": b"\xff{}", "merges.txt": b"a b"}
    for name, content in verbatim.items():
        (source / name).write_bytes(content)
    (source / "pytorch_model.bin").write_bytes(b"not copied")
    verbatim["config.json"] = (source / "config.json").read_bytes()

    convert(source, own)
    assert_same(read_arrays(own / WEIGHTS, stored_arrays(own / WEIGHTS)), checkpoint.tensors)
    convert(own, back, to="safetensors")
    assert_same(read_tensors(back, checkpoint.config), checkpoint.tensors)
    assert_same({n: t.read() for n, t in plan_directory(back, checkpoint.config).tensors.items()}, checkpoint.tensors)
    names = json.loads((back / "model.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert names.keys() - {"__metadata__"} == checkpoint.stored().keys()
    for directory, more in ((own, {MANIFEST, WEIGHTS}), (back, {"model.safetensors"})):
        assert {path.name for path in directory.iterdir()} == {*verbatim, *more}
        assert all((directory / name).read_bytes() == content for name, content in verbatim.items())


def test_stock_orbax_reads_the_weights(make, tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    checkpoint = make()
    convert(checkpoint.write(), tmp_path / "own")
    with ocp.PyTreeCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "own" / WEIGHTS), checkpoint.tensors)


def test_safetensors_to_safetensors(make, tmp_path: Path) -> None:
    checkpoint = make(prefix=LANGUAGE_MODEL)
    convert(checkpoint.write_shards(), tmp_path / "back", to="safetensors")
    assert_same(read_tensors(tmp_path / "back", checkpoint.config), checkpoint.tensors)
    assert b'"model.language_model.norm.weight"' in (tmp_path / "back" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_progress_counts_every_tensor(make, tmp_path: Path, to: str) -> None:
    checkpoint, seen = make(), []
    convert(checkpoint.write(), tmp_path / "out", to=to, progress=lambda done, total: seen.append((done, total)))
    count = len(checkpoint.tensors)
    assert seen == [(i + 1, count) for i in range(count)]


def test_vision_tower_is_left_out_when_told(make, tmp_path: Path) -> None:
    checkpoint = make(prefix=LANGUAGE_MODEL)
    source = checkpoint.write({"model.visual.pos_embed.weight": np.ones(2, np.float32)})
    with pytest.raises(CheckpointError, match="language_model_only"):
        convert(source, tmp_path / "own")
    convert(source, tmp_path / "own", language_model_only=True)
    assert_same(read_arrays(tmp_path / "own" / WEIGHTS, stored_arrays(tmp_path / "own" / WEIGHTS)), checkpoint.tensors)


def test_groups_and_chunks_cut_nothing_off(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orbax_store, "_GROUP_BYTES", 3000)  # less than the largest tensors
    monkeypatch.setattr(orbax_store, "_CHUNK_BYTES", 700)
    checkpoint = make()
    convert(checkpoint.write(), tmp_path / "own")
    convert(tmp_path / "own", tmp_path / "back", to="safetensors")
    assert_same(read_tensors(tmp_path / "back", checkpoint.config), checkpoint.tensors)
    restored = restore(tmp_path / "own", checkpoint.config, "float32")
    assert_same(tensor_names(restored), {n: a.astype(np.float32) for n, a in checkpoint.tensors.items()})


# Restoring


@pytest.mark.newest
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_restore_casts_on_the_device_and_only_there(make, tmp_path: Path, dtype: str | None) -> None:
    checkpoint = make()
    checkpoint.tensors[NORM] = checkpoint.tensors[NORM].astype(np.float32) + np.float32(2**-20)
    convert(checkpoint.write(), tmp_path / "own")
    config = checkpoint.config if dtype is None else checkpoint.config.replace(dtype="float32")
    restored = tensor_names(restore(tmp_path / "own", config, dtype))
    for name, array in restored.items():
        kept = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        assert array.dtype == ("float32" if kept else dtype or "bfloat16"), name
        assert isinstance(array, jax.Array)
    assert_same(restored, {n: checkpoint.tensors[n].astype(a.dtype) for n, a in restored.items()})
    assert_same(tensor_names(load_safetensors(checkpoint.path, config, dtype)), restored)


def test_restore_into_a_default_device_and_a_given_sharding(make, tmp_path: Path) -> None:
    checkpoint = make()
    convert(checkpoint.write(), tmp_path / "own")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for given in (None, sharding):
        for read, path in ((restore, tmp_path / "own"), (load_safetensors, checkpoint.path)):
            params = read(path, checkpoint.config, shardings=given)
            leaves = jax.tree.leaves(params)
            assert all(leaf.sharding.device_set == sharding.device_set for leaf in leaves)
            assert all(leaf.committed is (given is not None) for leaf in leaves)
    partial = {"model": {"norm": {"weight": sharding}}}
    with pytest.raises(CheckpointError, match=r"shardings and the config's weights differ in lm_head\.weight"):
        restore(tmp_path / "own", checkpoint.config, shardings=partial)


def test_leaves_that_do_not_fit(make, tmp_path: Path) -> None:
    checkpoint = make()
    good = checkpoint.tensors
    without = {name: array for name, array in good.items() if name != NORM}
    extra = {**good, "model.more.weight": np.ones(2, np.float32)}
    float32 = {**good, NORM: good[NORM].astype(np.float32)}
    longer = {**good, NORM: np.ones(33, good[NORM].dtype)}
    half = {**good, NORM: good[NORM].astype(np.float16)}
    cases = [
        (without, None, f"lacks '{NORM}', which the config declares"),
        (without, good, f"weights/ lacks '{NORM}'"),
        (extra, None, "holds 'model.more.weight', which the config does not declare"),
        (extra, good, "weights/ holds 'model.more.weight', which is not listed"),
        (float32, good, rf"'{NORM}' is float32 \[32\] in weights/, listed as bfloat16"),
        (longer, good, rf"'{NORM}' is bfloat16 \[33\] in weights/, listed as bfloat16 \[32\]"),
        (longer, None, rf"'{NORM}' has shape \[33\]; the config declares \[32\]"),
        (half, None, f"'{NORM}' has dtype float16; it takes float32 or bfloat16"),
    ]
    for number, (stored, listed, message) in enumerate(cases):
        path = write_own(tmp_path / str(number), stored, listed)
        refuses(path, checkpoint.config, message)
        (path / "config.json").write_bytes((checkpoint.path / "config.json").read_bytes())
        with pytest.raises(CheckpointError, match=message):
            convert(path, tmp_path / "back", to="safetensors")
        assert not (tmp_path / "back").exists()


def test_draft_head_must_be_declared(make, tmp_path: Path) -> None:
    checkpoint = make(mtp=True)
    convert(checkpoint.write(), tmp_path / "own")
    refuses(
        tmp_path / "own", checkpoint.config.replace(mtp_num_hidden_layers=0), "holds 'mtp.fc.weight', which the config"
    )


# Damage


@pytest.fixture
def own(make, tmp_path: Path) -> tuple[Path, Any]:
    checkpoint = make()
    convert(checkpoint.write(), tmp_path / "own")
    return tmp_path / "own", checkpoint.config


def test_truncated_missing_and_changed_files(own) -> None:
    path, config = own
    files = [file for file in sorted((path / WEIGHTS).rglob("*")) if file.is_file()]
    assert len(files) > 4
    for file in files:
        whole = file.read_bytes()
        for cut in {0, 1, len(whole) // 2, len(whole) - 1} if whole else ():
            file.write_bytes(whole[:cut])
            assert str(file) in refuses(path, config, "truncated or changed; copy it again")
        for at in {0, len(whole) // 3, len(whole) - 1} if whole else ():
            damaged = bytearray(whole)
            damaged[at] ^= 64
            file.write_bytes(damaged)
            assert str(file) in refuses(path, config, "corrupt; copy it again")
        file.unlink()
        assert str(file) in refuses(path, config, "missing; copy the checkpoint again")
        file.write_bytes(whole)
    assert restore(path, config)


def test_what_orbax_itself_cannot_read_is_a_clear_error(own) -> None:
    path, _ = own
    metadata = path / WEIGHTS / "_METADATA"
    metadata.write_bytes(metadata.read_bytes()[:-50])
    for read in (lambda: stored_arrays(path / WEIGHTS), lambda: list(read_arrays(path / WEIGHTS, {NORM: NORM_SPEC}))):
        with pytest.raises(CheckpointError, match=r"weights: not a readable Orbax checkpoint \(\w+: "):
            read()


def test_arrays_of_another_dtype_or_shape_are_never_cast(own) -> None:
    path, _ = own
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for spec in ((np.dtype(np.float32), (32,)), (NORM_SPEC[0], (31,)), (NORM_SPEC[0], (33,)), (NORM_SPEC[0], (4, 8))):
        for placed in (None, {NORM: sharding}):
            with pytest.raises(CheckpointError, match=r"norm\.weight|not a readable Orbax checkpoint"):
                list(read_arrays(path / WEIGHTS, {NORM: spec}, placed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "format_version = '2'; this version of gdnjax takes 1"),
        ({"format_version": True}, "format_version = 'True'"),
        ({"format_version": None}, "format_version = 'None'"),
        ({"kind": "state"}, "kind = 'state'; this version of gdnjax takes 'weights'"),
        ({"name_style": "nested"}, "name_style = 'nested'; it takes 'flat' or 'language_model'"),
        ({"name_style": ["flat"]}, "name_style"),
        ({"tensors": []}, r"tensors = \[\]; it takes an object"),
        ({"tensors": {NORM: {"dtype": "bfloat16", "shape": [-1]}}}, f"'{NORM}' = .*; it takes a dtype and a shape"),
        ({"tensors": {NORM: {"dtype": "bfloat17", "shape": [1]}}}, f"'{NORM}' = .*; it takes a dtype and a shape"),
        ({"tensors": {NORM: 1}}, f"'{NORM}' = 1; it takes a dtype and a shape"),
        ({"tensors": {}}, "weights/ holds"),
        ({"files": {}}, "files = {}; it takes file name"),
        ({"files": {"weights/../../x": {"bytes": 1, "crc32": ""}}}, r"lists the file 'weights/\.\./\.\./x'"),
        ({"files": {"/etc/hostname": {"bytes": 1, "crc32": ""}}}, "lists the file '/etc/hostname'"),
        ({"files": {"weights/_METADATA": 3}}, "it takes bytes and crc32"),
    ],
)
def test_hostile_manifests(own, change: dict[str, Any], message: str) -> None:
    path, config = own
    values = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**values, **change}))
    refuses(path, config, message)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "null"])
def test_manifests_that_are_no_objects(own, content: str) -> None:
    path, config = own
    (path / MANIFEST).write_text(content)
    refuses(path, config, r"gdnjax\.json: (not valid JSON|holds a)")


def test_a_directory_without_manifest(make) -> None:
    checkpoint = make()
    refuses(checkpoint.write(), checkpoint.config, r"no gdnjax\.json there")


# All or nothing


def test_refusals_leave_the_destination_as_it_is(make, tmp_path: Path) -> None:
    checkpoint = make()
    source = checkpoint.write()
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(path.name for path in tmp_path.iterdir())
    for name in ("file", "folder", "link"):
        for to in ("orbax", "safetensors"):
            with pytest.raises(CheckpointError, match=f"{name} exists; it takes a path that does not"):
                convert(source, tmp_path / name, to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "file").read_text() == "kept" and not any((tmp_path / "folder").iterdir())
    with pytest.raises(ValueError, match="to = 'pickle'; it takes 'orbax' or 'safetensors'"):
        convert(source, tmp_path / "out", to="pickle")
    with pytest.raises(CheckpointError, match="no such directory"):
        convert(tmp_path / "gone", tmp_path / "out")
    convert(source, tmp_path / "own")
    with pytest.raises(CheckpointError, match="in this format already"):
        convert(tmp_path / "own", tmp_path / "out")


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_an_error_on_the_way_leaves_nothing(make, tmp_path: Path, to: str) -> None:
    checkpoint = make()
    last = max(plan_directory(checkpoint.write(), checkpoint.config).tensors.items(), key=lambda item: item[1].offset)[
        0
    ]
    checkpoint.tensors[last].reshape(-1)[-1] = np.nan
    checkpoint.write()
    with pytest.raises(CheckpointError, match=f"tensor '{last}' is nan"):
        convert(checkpoint.path, tmp_path / "out", to=to)

    def interrupt(done: int, _: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint.path, tmp_path / "out", to=to, progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.path.name]


STUCK = """
import sys, time
from gdnjax.weights import orbax_store
from gdnjax.weights.orbax_io import convert
orbax_store._GROUP_BYTES = 2000  # so that some of it is on disk when it stops

def progress(done, total):
    if done == total - 3:
        print("stuck", flush=True)
        time.sleep(600)

convert(sys.argv[1], sys.argv[2], to=sys.argv[3], progress=progress)
"""


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_kill_9_leaves_no_destination_and_a_rerun_works(make, tmp_path: Path, to: str) -> None:
    checkpoint = make()
    source, target = checkpoint.write(), tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STUCK, str(source), str(target), to]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "stuck\n"
            (leftover,) = tmp_path.glob(".out.partial-*")
            assert any(path.is_file() for path in leftover.rglob("*"))
            # A run beside one that is alive leaves it alone.
            convert(source, target, to=to)
            assert leftover.exists()
            target.rename(tmp_path / "first")
        finally:
            child.kill()
    assert not target.exists() and leftover.exists()
    convert(source, target, to=to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "hf", "out"]
    params = restore(target, checkpoint.config) if to == "orbax" else load_safetensors(target, checkpoint.config)
    assert_same(
        tensor_names(params), {n: checkpoint.tensors[n].astype(a.dtype) for n, a in tensor_names(params).items()}
    )


def test_a_destination_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="out exists"), new_directory(tmp_path / "a" / "out") as temporary:
        (temporary / "x").write_text("new")
        (tmp_path / "a" / "out").mkdir()
        (tmp_path / "a" / "out" / "x").write_text("old")
    assert (tmp_path / "a" / "out" / "x").read_text() == "old"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]


# What it costs

QUIET = """
import sys
import gdnjax.weights.orbax_io as io, gdnjax.state.checkpoint, gdnjax.weights.safetensors_io
assert not any(name.split(".")[0] == "orbax" for name in sys.modules), "orbax is imported before it is used"
from gdnjax.config import from_directory
io.convert(sys.argv[1], sys.argv[2])
config = from_directory(io.pathlib.Path(sys.argv[2]))
io.restore(sys.argv[2], config)
io.convert(sys.argv[2], sys.argv[2] + "-back", to="safetensors")
"""


@pytest.mark.newest
def test_import_is_light_and_nothing_is_printed(make, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", QUIET, str(make().write()), str(tmp_path / "own")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


MEMORY = """
import sys
from gdnjax.weights import orbax_store
from gdnjax.weights.orbax_io import convert
orbax_store._GROUP_BYTES = 2**24

def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

small, large, out = sys.argv[1:]
convert(small, out + "-small")
convert(out + "-small", out + "-small-back", to="safetensors")
before = peak()
convert(large, out)
convert(out, out + "-back", to="safetensors")
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_of_a_conversion_there_and_back(make, tmp_path: Path) -> None:
    from gdnjax.config import from_directory
    from gdnjax.weights.declaration import abstract_params

    small, large = make("small"), make("large", tied=True)
    layers = {"num_hidden_layers": 12, "layer_types": ["linear_attention"] * 12}
    large.json = {**large.json, **layers, "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 4096}
    large.write_config()
    shapes = tensor_names(abstract_params(from_directory(large.path)))
    large.tensors = {name: np.ones(s.shape, ml_dtypes.bfloat16) for name, s in shapes.items()}
    total = sum(array.nbytes for array in large.tensors.values())
    assert total > 300e6
    command = [sys.executable, "-c", MEMORY, str(small.write()), str(large.write_shards()), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150e6

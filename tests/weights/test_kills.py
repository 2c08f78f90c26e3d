"""Kill -9 at any moment of writing a checkpoint, a snapshot of a request or a shape: whole, or not there at all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gdnjax.cli.bench import write_layout
from gdnjax.config import from_preset
from gdnjax.state.snapshot import load_snapshot, save_snapshot
from gdnjax.weights.declaration import tensor_names
from gdnjax.weights.orbax_io import convert, restore
from tests.helpers import assert_same_bits
from tests.state.pools import Driver, micro, tokens

ROOT = Path(__file__).resolve().parents[2]
REPORT = {"device": "a device", "twin_gain": 0.2, "recommended_layout": "twin"}

# Writes without an end; the first line says that everything is imported and compiled.
WRITER = """
import sys
from pathlib import Path
from tests.weights.test_kills import REPORT, convert, load_snapshot, micro, save_snapshot, write_layout

source, taken, out = map(Path, sys.argv[1:])
snapshot, number = load_snapshot(taken, micro()), 0
while True:
    save_snapshot(out / f"s{number}", snapshot)
    convert(source, out / f"c{number}")
    write_layout(str(out / f"y{number}.yaml"), "tiny", REPORT)
    number += 1
    print(number, flush=True)
"""


# A file is written, and not yet safe on the disk.
STUCK = """
import os, sys, time
from tests.weights.test_kills import REPORT, write_layout

def stuck(_):
    print("stuck", flush=True)
    time.sleep(600)

os.fsync = stuck
write_layout(sys.argv[1], "tiny", REPORT)
"""


def test_a_shape_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", STUCK, str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "stuck\n"
        finally:
            child.kill()
    assert not path.exists()
    write_layout(str(path), "tiny", REPORT)
    assert from_preset(str(path)).for_platform("cpu").state_layout == "twin"


@pytest.mark.parametrize("seed", range(2))
def test_what_was_being_written_is_whole_or_not_there(make, tmp_path: Path, seed: int) -> None:
    checkpoint = make()
    source, taken, out = checkpoint.write(), tmp_path / "taken", tmp_path / "out"
    out.mkdir()
    d = Driver(micro())
    snapshot = d.pool.snapshot(d.start(tokens(14)))
    save_snapshot(taken, snapshot)

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(source), str(taken), str(out)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == "1\n"
            time.sleep(random.Random(seed).uniform(0.0, 0.3))
        finally:
            child.kill()

    def check(path: Path) -> None:
        if path.name.startswith("s"):
            found = load_snapshot(path, micro())
            assert found.position == 14
            assert_same_bits(found.keys[0], snapshot.keys[0])
            assert_same_bits(found.carried.recurrent[0], snapshot.carried.recurrent[0])
        elif path.name.startswith("c"):
            for name, array in tensor_names(restore(path, checkpoint.config)).items():
                assert_same_bits(array, checkpoint.tensors[name].astype(array.dtype), name)
        else:
            assert from_preset(str(path)).for_platform("cpu").state_layout == "twin"

    there = {path.name for path in out.iterdir() if path.name[0] in "scy"}
    for name in there:
        check(out / name)
    # A second try needs no cleaning up, and leaves nothing of the first one.
    rest = max(int(name[1:].partition(".")[0]) for name in there)
    for name in (f"s{rest}", f"c{rest}", f"y{rest}.yaml", f"s{rest + 1}", f"c{rest + 1}", f"y{rest + 1}.yaml"):
        if name not in there:
            {
                "s": lambda path: save_snapshot(path, snapshot),
                "c": lambda path: convert(source, path),
                "y": lambda path: write_layout(str(path), "tiny", REPORT),
            }[name[0]](out / name)
            check(out / name)
    assert not list(out.glob(".*.partial-*"))

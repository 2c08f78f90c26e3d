"""A request's snapshot: given back, to another pool, to and from disk, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdnjax.state import snapshot as module
from gdnjax.state.requests import PoolError
from gdnjax.state.snapshot import Snapshot, load_snapshot, save_snapshot
from gdnjax.weights.files import CheckpointError
from tests.helpers import assert_same_bits
from tests.state.pools import MICRO, Driver, bookkeeping, micro, tokens


def taken() -> tuple[Driver, int, Snapshot]:
    """A request after two walks and an odd number of steps, in more pages than one group, and its snapshot."""
    d = Driver(micro())
    r = begin(d)
    return d, r, d.pool.snapshot(r)


def begin(d: Driver) -> int:
    r = d.start(tokens(14))
    d.walk({r: tokens(16, 1)})
    d.feed(r, [3, 4, 5])
    return r


def assert_same(found: Snapshot, wanted: Snapshot) -> None:
    assert found.position == wanted.position
    for field in ("keys", "values"):
        for a, b in zip(getattr(found, field), getattr(wanted, field), strict=True):
            assert_same_bits(a, b, field)
    for field in ("recurrent", "conv"):
        for a, b in zip(getattr(found.carried, field), getattr(wanted.carried, field), strict=True):
            assert_same_bits(a, b, field)


@pytest.mark.newest
def test_restored_it_goes_on_as_it_would_have(tmp_path: Path) -> None:
    d, r, snapshot = taken()
    assert snapshot.position == 33 and snapshot.keys[0].shape == (33, 1, 8)
    d.feed(r, [9, 9])  # what happens afterwards is not in it
    save_snapshot(tmp_path / "one", snapshot)
    d.pool.release(r)
    d.start(tokens(11, 4))  # somebody else has its number and its pages now
    loaded = load_snapshot(tmp_path / "one", micro())
    assert_same(loaded, snapshot)

    alone = Driver(micro())
    s = begin(alone)
    wanted = alone.feed(s, [7, 8, 9, 10, 11])
    # the layout is free: the values are the same
    other = Driver(micro("in_place"))
    other.start(tokens(6, 9))
    for pool, source in ((d, snapshot), (d, loaded), (other, loaded)):
        restored = pool.pool.restore(source, 40, reserve=20)
        assert pool.pool.position(restored) == 33
        pool.pool.check(device=True)
        found = pool.feed(restored, [7, 8, 9, 10, 11])
        for a, b in zip(found, wanted, strict=True):
            assert_same_bits(a, b)
        for name, values in alone.current(s).items():
            assert_same_bits(pool.current(restored)[name], values, name)
    again = d.pool.snapshot(d.pool.live[-1])
    assert_same(again, alone.pool.snapshot(s))


def test_refusals(tmp_path: Path) -> None:
    d, _, snapshot = taken()
    empty = d.pool.acquire(8)
    with pytest.raises(PoolError, match=f"request {empty} has no tokens yet"):
        d.pool.snapshot(empty)
    before = bookkeeping(d.pool)
    with pytest.raises(ValueError, match=r"limit = 32; it takes 33 "):
        d.pool.restore(snapshot, 32)
    with pytest.raises(CheckpointError, match=r"the snapshot: .* state_dtype = bfloat16, the config has 'float32'"):
        d.pool.restore(dataclasses.replace(snapshot, config=MICRO.replace(state_dtype="bfloat16")), 40)
    assert bookkeeping(d.pool) == before

    path = tmp_path / "one"
    save_snapshot(path, snapshot)
    with pytest.raises(CheckpointError, match="one exists; it takes a path that does not"):
        save_snapshot(path, snapshot)
    with pytest.raises(CheckpointError, match=r"saved with vocab_size = 32, the config has 64"):
        load_snapshot(path, MICRO.replace(vocab_size=64))
    with pytest.raises(CheckpointError, match=r"position = 33; it takes an integer from 1 to max_length = 16"):
        load_snapshot(path, MICRO.replace(max_length=16))
    manifest = json.loads((path / "gdnjax.json").read_text())
    for value in (-1, 0, True, "33", None, 32):
        (path / "gdnjax.json").write_text(json.dumps({**manifest, "position": value}))
        with pytest.raises(CheckpointError, match=r"position = |'keys.0' is float32 \[33, 1, 8\]; .* \[32, 1, 8\]"):
            load_snapshot(path, MICRO)
    (path / "gdnjax.json").write_text(json.dumps({**manifest, "kind": "state"}))
    with pytest.raises(CheckpointError, match=r"kind = 'state'; .* takes 'snapshot'"):
        load_snapshot(path, MICRO)


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, snapshot = taken()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_manifest", fails)
    with pytest.raises(OSError, match="no space left"):
        save_snapshot(tmp_path / "one", snapshot)
    assert list(tmp_path.iterdir()) == []


def test_pages_go_in_groups() -> None:
    found = module.groups(list(range(1, 11)))
    np.testing.assert_array_equal(found, [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 0, 0, 0, 0, 0, 0]])
    assert module.groups([]) == []

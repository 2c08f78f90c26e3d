"""The serving state on disk: the same bits, the same continuation, and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config
from gdnjax.state import Batch, State, init_state
from gdnjax.state.checkpoint import restore_state, save_state
from gdnjax.weights.declaration import init_params
from gdnjax.weights.files import CheckpointError
from tests.helpers import assert_same_bits, jit_commit, jit_decode_step

TINY = Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=3,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=4,
    linear_value_head_dim=4,
    dtype="float32",
    max_requests=2,
    max_length=16,
    page_size=4,
)


def random_state(config: Config, seed: int = 0) -> State:
    """A state whose arrays are all different and full of odd bits."""
    rng = np.random.default_rng(seed)

    def fill(array: Any) -> jax.Array:
        if array.dtype == jnp.int32:
            return array
        values = rng.normal(size=array.shape).astype(np.float32)
        values.reshape(-1)[:3] = [-0.0, 1e-40, 3e38]
        return jnp.asarray(values.astype(array.dtype))

    state = jax.tree.map(fill, init_state(config))
    return dataclasses.replace(state, position=jnp.asarray([3, 9]), pending=jnp.asarray([0, 1]))


def assert_same(found: State, wanted: State) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for i, (a, b) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)):
        assert_same_bits(a, b, f"leaf {i}")


@pytest.mark.newest
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"state_layout": "twin"},
        {"dtype": "bfloat16", "state_dtype": "bfloat16", "kv_tokens": 20},
        {"state_layout": "twin", "speculate": 2},
    ],
)
def test_bits_come_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = TINY.replace(**changes)
    state = random_state(config.replace(kv_tokens=None)) if "kv_tokens" not in changes else random_state(config)
    save_state(tmp_path / "state", state)
    restored = restore_state(tmp_path / "state", config)
    assert_same(restored, state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(restored)]
    assert len(set(pointers)) == len(pointers)  # donating them all must be possible
    assert not any(leaf.committed for leaf in jax.tree.leaves(restored))


@pytest.mark.newest
def test_a_restored_state_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    config = TINY.replace(num_hidden_layers=2, layer_types=TINY.layer_types[:2], state_layout="twin")
    params = init_params(config, jax.random.key(0))
    state, batch = init_state(config), Batch(jnp.asarray([9, 10]), jnp.asarray([1, 0]))
    for _ in range(5):
        _, state = jit_decode_step(params, jit_commit(state), batch)  # saved with a step pending
    save_state(tmp_path / "state", state)
    compiled, ends = jit_decode_step._cache_size(), []
    for start in (state, restore_state(tmp_path / "state", config)):
        logits, current = None, start
        for _ in range(3):
            logits, current = jit_decode_step(params, jit_commit(current), batch)
        ends.append((logits, current))
    assert jit_decode_step._cache_size() == compiled
    assert_same_bits(ends[0][0], ends[1][0])
    assert_same(ends[0][1], ends[1][1])


def test_a_config_that_means_another_state(tmp_path: Path) -> None:
    save_state(tmp_path / "state", random_state(TINY))
    for changes in (
        {"rope_theta": 2e4},
        {"page_size": 8},
        {"state_layout": "twin"},
        {"dtype": "bfloat16"},
        {"state_dtype": "bfloat16"},
        {"max_requests": 3},
        {"max_length": 12},
        {"rms_norm_eps": 1e-5},
        {"speculate": 2},
    ):
        (key, value), *_ = changes.items()
        with pytest.raises(CheckpointError, match=f"saved with {key} = .*, the config has {value!r}"):
            restore_state(tmp_path / "state", TINY.replace(**changes))
    free = TINY.replace(prefill_tokens=7, generation={"temperature": 0.5}, language_model_only=True)
    restored = restore_state(tmp_path / "state", free)
    assert restored.config == free
    assert_same(dataclasses.replace(restored, config=TINY), random_state(TINY))


def test_numbers_outside_the_limits(tmp_path: Path) -> None:
    limits = {"read_slot": 2, "write_slot": 2, "position": 16, "pending": 16, "page_table": 8}
    for field, limit in limits.items():
        state = random_state(TINY)
        array = np.asarray(getattr(state, field)).copy()
        for value in (limit + 1, -1):
            array.reshape(-1)[-1] = value
            path = tmp_path / f"{field}{value}"
            save_state(path, dataclasses.replace(state, **{field: jnp.asarray(array)}))
            with pytest.raises(CheckpointError, match=f"{field} holds {value}; it takes 0 to {limit}"):
                restore_state(path, TINY)
        array.reshape(-1)[-1] = limit
        save_state(tmp_path / field, dataclasses.replace(state, **{field: jnp.asarray(array)}))
        restore_state(tmp_path / field, TINY)


def test_numbers_of_speculation_outside_the_limits(tmp_path: Path) -> None:
    config = TINY.replace(speculate=2)
    state = random_state(config)
    assert state.record is not None
    for field, limit in {"live": 3, "parity": 1}.items():
        recorded = dataclasses.replace(state.record.recorded, **{field: jnp.asarray([0, limit + 1])})
        record = dataclasses.replace(state.record, recorded=recorded)
        save_state(tmp_path / field, dataclasses.replace(state, record=record))
        with pytest.raises(CheckpointError, match=rf"record.recorded.{field} holds {limit + 1}; it takes 0 to {limit}"):
            restore_state(tmp_path / field, config)
    # A step writes three slots from `write_slot` on.
    config = TINY.replace(speculate=2, speculative_state="slots")
    save_state(tmp_path / "slots", dataclasses.replace(random_state(config), write_slot=jnp.asarray([1, 5])))
    with pytest.raises(CheckpointError, match="write_slot holds 5; it takes 0 to 4"):
        restore_state(tmp_path / "slots", config)


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    state = random_state(TINY)
    cases = {
        r"'conv\.1' is nothing; the config takes float32 \[3, 4, 16\]": {"conv": state.conv[:1]},
        r"'keys\.1' is float32 .*; the config takes nothing": {"keys": state.keys * 2},
        r"'position' is float32 \[2\]; the config takes int32 \[2\]": {"position": jnp.ones(2)},
        r"'pending' is int32 \[3\]; the config takes int32 \[2\]": {"pending": jnp.zeros(3, jnp.int32)},
    }
    for number, (message, changes) in enumerate(cases.items()):
        save_state(tmp_path / str(number), dataclasses.replace(state, **changes))
        with pytest.raises(CheckpointError, match=message):
            restore_state(tmp_path / str(number), TINY)


def test_damage_and_versions(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save_state(path, random_state(TINY))
    with pytest.raises(CheckpointError, match="state exists"):
        save_state(path, random_state(TINY))
    for file in sorted(path.rglob("*")):
        if not file.is_file() or not file.stat().st_size:
            continue
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(CheckpointError, match=str(file)):
            restore_state(path, TINY)
        file.write_bytes(whole)
    manifest = path / "gdnjax.json"
    values = json.loads(manifest.read_text())
    for change, message in (
        ({"format_version": 0}, "format_version = '0'"),
        ({"kind": "weights"}, "kind = 'weights'"),
        ({"config": None}, "config = None; it takes an object"),
        ({"config": {}}, "saved with"),
    ):
        manifest.write_text(json.dumps({**values, **change}))
        with pytest.raises(CheckpointError, match=message):
            restore_state(path, TINY)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"no gdnjax\.json there"):
        restore_state(path, TINY)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]

"""Rules from logical axes to mesh axes, and a model that runs sharded over two devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from gdnjax import axes as ax
from gdnjax.weights import sharding
from gdnjax.weights.declaration import abstract_params, logical_axes, tensor_names
from gdnjax.weights.sharding import shardings

ROOT = Path(__file__).resolve().parents[2]


def specs(config: Any, size: int = 2, rules: Any = None) -> dict[str, PartitionSpec]:
    mesh = AbstractMesh((size,), ("model",))
    return {name: s.spec for name, s in tensor_names(shardings(config, mesh, rules)).items()}


def test_default_rules(make) -> None:
    config = make(mtp=True).config.replace(num_key_value_heads=2)
    found = specs(config)
    assert found.keys() == tensor_names(abstract_params(config)).keys()
    row, column, whole = PartitionSpec("model", None), PartitionSpec(None, "model"), PartitionSpec(None, None)
    expected = {
        "model.embed_tokens.weight": row,
        "lm_head.weight": row,
        "model.norm.weight": PartitionSpec(None),
        "model.layers.0.linear_attn.in_proj_qkv.weight": whole,
        "model.layers.0.linear_attn.conv1d.weight": PartitionSpec(None, None, None),
        "model.layers.0.linear_attn.in_proj_z.weight": row,
        "model.layers.0.linear_attn.in_proj_a.weight": row,
        "model.layers.0.linear_attn.in_proj_b.weight": row,
        "model.layers.0.linear_attn.A_log": PartitionSpec("model"),
        "model.layers.0.linear_attn.dt_bias": PartitionSpec("model"),
        "model.layers.0.linear_attn.norm.weight": PartitionSpec(None),
        "model.layers.0.linear_attn.out_proj.weight": column,
        "model.layers.1.self_attn.q_proj.weight": row,
        "model.layers.1.self_attn.k_proj.weight": row,
        "model.layers.1.self_attn.v_proj.weight": row,
        "model.layers.1.self_attn.o_proj.weight": column,
        "model.layers.1.self_attn.q_norm.weight": PartitionSpec(None),
        "model.layers.0.mlp.gate_proj.weight": row,
        "model.layers.0.mlp.up_proj.weight": row,
        "model.layers.0.mlp.down_proj.weight": column,
        "mtp.fc.weight": whole,
    }
    assert {name: found[name] for name in expected} == expected


def test_what_does_not_divide_is_replicated_by_whole_heads(make) -> None:
    config = make().config  # 2 query heads, 1 key head, 4 value heads, 48 words, 48 MLP rows
    found = specs(config, 2)
    assert found["model.layers.1.self_attn.q_proj.weight"] == PartitionSpec("model", None)
    assert found["model.layers.1.self_attn.k_proj.weight"] == PartitionSpec(None, None)
    found = specs(config, 4)  # q_proj has 64 rows, but only two heads
    assert found["model.layers.1.self_attn.q_proj.weight"] == PartitionSpec(None, None)
    assert found["model.layers.0.linear_attn.in_proj_z.weight"] == PartitionSpec("model", None)
    found = specs(config, 5)
    assert all(axis is None for spec in found.values() for axis in spec)


def test_given_rules_replace_the_defaults(make) -> None:
    found = specs(make().config, rules={ax.HIDDEN: "model", ax.VOCAB: None})
    assert found["lm_head.weight"] == PartitionSpec(None, "model")
    assert found["model.norm.weight"] == PartitionSpec("model")
    assert found["model.layers.0.linear_attn.A_log"] == PartitionSpec(None)


def test_refused_rules(make) -> None:
    config = make().config
    with pytest.raises(ValueError, match="rule for 'heads'; it takes one of conv_tap, gdn_heads"):
        specs(config, rules={"heads": "model"})
    with pytest.raises(ValueError, match="rule 'vocab': mesh axis 'tensor'; it takes 'model' or None"):
        specs(config, rules={ax.VOCAB: "tensor"})
    with pytest.raises(ValueError, match="twice over mesh axis 'model'; set one of these to None"):
        specs(config, rules={ax.VOCAB: "model", ax.HIDDEN: "model"})


def test_a_mesh_without_the_model_axis_replicates(make) -> None:
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
    found = tensor_names(shardings(make().config, mesh)).values()
    assert all(axis is None for s in found for axis in s.spec)


def test_every_declared_axis_is_known(make) -> None:
    declared = {axis for names in tensor_names(logical_axes(make(mtp=True).config)).values() for axis in names}
    assert declared == sharding.LOGICAL_AXES


TWO_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh
from pathlib import Path
from gdnjax.config import from_directory
from gdnjax.model import forward
from gdnjax.weights.declaration import tensor_names
from gdnjax.weights.orbax_io import convert, restore
from gdnjax.weights.safetensors_io import load_safetensors
from gdnjax.weights.sharding import shard, shardings

source, own = sys.argv[1:]
convert(source, own)
config = from_directory(Path(source), dtype="float32")
mesh = Mesh(np.asarray(jax.devices()), ("model",))
assert mesh.size == 2
placed = shardings(config, mesh)
tokens = jnp.asarray([[1, 2, 3, 4, 5, 6, 7]])
run = jax.jit(forward, static_argnames="config")
one = restore(own, config)
expected = np.asarray(run(one, config, tokens))
assert np.abs(expected).max() > 0.1
split = 0
runs = [read(path, config, shardings=placed) for read, path in ((restore, own), (load_safetensors, source))]
runs.append(shard(one, config, mesh))
for params in runs:
    for name, array in tensor_names(params).items():
        assert array.sharding == tensor_names(placed)[name], name
        # the shards together are the whole, in order
        assert np.array_equal(np.asarray(array), np.asarray(tensor_names(one)[name])), name
        split += any(s.data.shape != array.shape for s in array.addressable_shards)
    assert np.abs(np.asarray(run(params, config, tokens)) - expected).max() < 5e-4
print(split)
"""


def test_two_devices_compute_what_one_computes(make, tmp_path: Path) -> None:
    source = make(mtp=True).write()
    # unoptimized code: compiling takes most of the time
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TWO_DEVICES, str(source), str(tmp_path / "own")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3 * 20

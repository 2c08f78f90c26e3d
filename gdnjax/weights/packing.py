"""Joins weights that share an input, so that one product reads what several would.

A pure function of params: checkpoints, sharding and quantization work on the unpacked form and never
have to take a packed array apart. The model's functions take either form.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from gdnjax.config import Config
from gdnjax.weights.declaration import Params

# packed name -> the projections it joins, along their output rows
GROUPS = {
    "linear_attn": {"in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")},
    "self_attn": {"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj")},
}


def pack(params: Params, config: Config, mesh: Mesh | None = None) -> Params:
    """Params with the projections of `GROUPS` concatenated, other leaves shared with the input.

    Args:
        params: the unpacked pytree.
        config: its config.
        mesh: must be None or have one device: a packed row order for several shards is not there yet.

    Raises:
        ValueError: a mesh of more than one device, or params of another config.
    """
    layers = len(params["model"]["layers"])
    if layers != config.num_hidden_layers:
        raise ValueError(f"params have {layers} layers; the config has num_hidden_layers = {config.num_hidden_layers}")
    if mesh is not None and mesh.size > 1:
        raise ValueError(f"mesh has {mesh.size} devices; packed weights take a mesh of one (use the unpacked params)")
    packed = dict(params)
    packed["model"] = {**params["model"], "layers": _layers(params["model"]["layers"])}
    if "mtp" in params:
        packed["mtp"] = {**params["mtp"], "layers": _layers(params["mtp"]["layers"])}
    return packed


def _layers(layers: Any) -> dict[int, Any]:
    return {index: {name: _group(name, part) for name, part in layers[index].items()} for index in layers}


def _group(name: str, part: Any) -> Any:
    if name not in GROUPS:
        return part
    joined = {
        target: {"weight": jnp.concatenate([part[source]["weight"] for source in sources])}
        for target, sources in GROUPS[name].items()
    }
    taken = {source for sources in GROUPS[name].values() for source in sources}
    return {**{key: value for key, value in part.items() if key not in taken}, **joined}

"""Which weights are split over a mesh, and how: rules from logical axes to mesh axes."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from gdnjax import axes as ax
from gdnjax.config import Config
from gdnjax.weights.declaration import Params, abstract_params, from_tensor_names, logical_axes, tensor_names

Rules = Mapping[str, str | None]
"""Mesh axis (None: not split) by logical axis; an axis without an entry is not split."""

DEFAULT_RULES: Rules = {
    ax.VOCAB: "model",
    ax.MLP: "model",
    ax.GDN_VALUE: "model",
    ax.GDN_HEADS: "model",
    ax.QUERY_GATE: "model",
    ax.QUERY: "model",
    ax.KEY_VALUE: "model",
    # A plain slice of all q, all k, all v would give one device queries and another values.
    ax.GDN_QKV: None,
    ax.HIDDEN: None,
}
"""Tensor parallelism over the mesh axis `model`."""

LOGICAL_AXES = frozenset(
    (
        *DEFAULT_RULES,
        ax.GDN_VALUE_DIM,
        ax.CONV_TAP,
        ax.HEAD_DIM,
        ax.MTP_PAIR,
    )
)


def shardings(config: Config, mesh: Mesh | AbstractMesh, rules: Rules | None = None) -> Params:
    """A `NamedSharding` for every weight, as a pytree like params.

    A dimension is split if its axis has a rule and the mesh axis divides the number of whole heads in it
    (or of elements, for axes without heads); else it is replicated.

    Args:
        config: declares the weights.
        mesh: the devices. Without a `model` axis the default rules replicate everything.
        rules: None is `DEFAULT_RULES`; others replace them as a whole.

    Raises:
        ValueError: a rule for an unknown logical axis, to an axis that the mesh lacks, or rules that split
            two dimensions of one array over the same mesh axis.
    """
    if rules is None:
        rules = {name: axis for name, axis in DEFAULT_RULES.items() if axis in mesh.axis_names}
    _check(rules, mesh)
    axes, shapes = tensor_names(logical_axes(config)), tensor_names(abstract_params(config))
    heads = {
        ax.GDN_VALUE: config.linear_num_value_heads,
        ax.GDN_HEADS: config.linear_num_value_heads,
        ax.QUERY_GATE: config.num_attention_heads,
        ax.QUERY: config.num_attention_heads,
        ax.KEY_VALUE: config.num_key_value_heads,
    }
    placed = {}
    for name, names in axes.items():
        spec = []
        for logical, size in zip(names, shapes[name].shape, strict=True):
            axis = rules.get(logical)
            divides = axis is not None and heads.get(logical, size) % mesh.shape[axis] == 0
            spec.append(axis if divides else None)
        used = [axis for axis in spec if axis is not None]
        if len(set(used)) != len(used):
            raise ValueError(
                f"rules split {name} ({', '.join(names)}) twice over mesh axis {used[0]!r}; set one of these to None"
            )
        placed[name] = NamedSharding(mesh, PartitionSpec(*spec))
    return from_tensor_names(config, placed)


def _check(rules: Rules, mesh: Mesh | AbstractMesh) -> None:
    for logical, axis in rules.items():
        if logical not in LOGICAL_AXES:
            raise ValueError(f"rule for {logical!r}; it takes one of {', '.join(sorted(LOGICAL_AXES))}")
        if axis is not None and axis not in mesh.axis_names:
            takes = ", ".join(map(repr, mesh.axis_names))
            raise ValueError(f"rule {logical!r}: mesh axis {axis!r}; it takes {takes} or None")


def shard(params: Params, config: Config, mesh: Mesh, rules: Rules | None = None) -> Params:
    """Params that are on a device already, moved to `shardings(config, mesh, rules)`."""
    return jax.tree.map(jax.device_put, params, shardings(config, mesh, rules))

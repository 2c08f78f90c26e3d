"""Where each weight goes and in which dtype it runs, and the one cast between a file's dtype and that."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.weights.declaration import abstract_params, tensor_names
from gdnjax.weights.files import CheckpointError


class Target(NamedTuple):
    """A weight as it runs."""

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None


def run_targets(config: Config, dtype: Any = None, shardings: Any = None) -> dict[str, Target]:
    """Every weight's shape, run dtype and sharding, by name.

    Args:
        config: declares the weights. `A_log`, `dt_bias` and `linear_attn.norm.weight` are float32 whatever
            the dtype.
        dtype: dtype of the others; None is `config.dtype`.
        shardings: one sharding for all, a pytree of them like params, or None for the default device.

    Raises:
        ConfigError: a dtype that is neither float32 nor bfloat16.
        CheckpointError: a pytree of shardings that lacks an array or has one too many.
    """
    if dtype is not None:
        config = config.replace(dtype=dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    declared = tensor_names(abstract_params(config))
    by_name = _by_name(shardings, list(declared))
    return {name: Target(tuple(a.shape), a.dtype, by_name[name]) for name, a in declared.items()}


def _by_name(shardings: Any, names: list[str]) -> dict[str, jax.sharding.Sharding | None]:
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return dict.fromkeys(names, shardings)
    by_name = tensor_names(shardings)
    if set(by_name) != set(names):
        different = sorted(set(by_name) ^ set(names))
        raise CheckpointError(
            f"shardings and the config's weights differ in {', '.join(different)}; "
            "make them with gdnjax.weights.sharding.shardings(config, mesh)"
        )
    return by_name


def place(array: np.ndarray | jax.Array, target: Target) -> jax.Array:
    """The array on its device(s) and in its run dtype, cast there, and done when this returns.

    Waiting keeps the host from queueing up one tensor after another that no transfer has taken yet.
    """
    # Without a sharding the array stays uncommitted, like those of `init_state`: jit compiles a function
    # once more when one of its arguments changes from uncommitted to committed between calls.
    placed = jax.device_put(array) if target.sharding is None else jax.device_put(array, target.sharding)
    return jax.block_until_ready(placed if placed.dtype == target.dtype else placed.astype(target.dtype))

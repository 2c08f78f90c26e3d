"""A small model of two layers of each type, and pools over it."""

from __future__ import annotations

import functools

import jax

from gdnjax.config import Config
from gdnjax.weights.declaration import Params, init_params
from tests.state.pools import MICRO, Driver

LAYERS = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DEEP = MICRO.replace(num_hidden_layers=4, layer_types=LAYERS, prefix_cache_bytes=0)


@functools.cache
def deep_params() -> Params:
    return jax.jit(init_params, static_argnums=0)(DEEP, jax.random.key(3))


def deep(config: Config = DEEP) -> Driver:
    """A pool driven by token ids. Requests are numbered as the pool does, with guards or without."""
    driver = Driver(config)
    driver.params, driver.config = deep_params(), driver.pool.config
    return driver

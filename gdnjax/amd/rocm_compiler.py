"""XLA's ROCm compiler, for a device that exists only as a description.

Uses parts of JAX outside its public interface, all of them in this file. The process must have been
started with the stand-in libraries (`gdnjax.amd.stubs`) in LD_LIBRARY_PATH.
"""

from __future__ import annotations

import functools
import importlib.util
import pathlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gdnjax.amd.targets import Target

PLUGIN = "jax_plugins.xla_rocm7"


def plugin_library() -> pathlib.Path:
    """The plugin's shared library. Raises OSError if it isn't installed."""
    # Not imported: the plugin's own module looks for a GPU.
    try:
        spec = importlib.util.find_spec(PLUGIN)
    except ModuleNotFoundError:
        spec = None
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        path = pathlib.Path(folder) / "xla_rocm_plugin.so"
        if path.is_file():
            return path
    raise OSError("XLA's ROCm compiler is not installed")


@functools.cache
def _load() -> Any:
    from jaxlib import xla_client

    plugin = xla_client.load_pjrt_plugin_dynamically("rocm", str(plugin_library()))
    xla_client.initialize_pjrt_plugin("rocm")
    return plugin


def described_device(target: Target) -> Mesh:
    """A mesh of one device that can be compiled for and not run on."""
    from jaxlib import xla_client

    topology = xla_client.make_c_api_device_topology(_load(), "", target_config=target.text_proto, topology="1x1x1")
    devices: Any = topology._make_compile_only_devices()  # pyright: ignore[reportAttributeAccessIssue]
    return Mesh(np.array(devices), ("device",))


def compile_program(function: Any, arguments: tuple[Any, ...], static: dict[str, Any], target: Target) -> Any:
    """Compiles a jitted function.

    Args:
        function: the result of `jax.jit`.
        arguments: pytrees of `jax.ShapeDtypeStruct`, by position.
        static: static arguments, by name.
        target: what to compile for.

    Returns:
        A `jax.stages.Compiled` to look at; it cannot be called.
    """
    mesh = described_device(target)
    placement = NamedSharding(mesh, PartitionSpec())

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement)

    placed = jax.tree.map(place, arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = function.trace(*placed, **static).lower(lowering_platforms=("rocm",))
    return lowered.compile()

"""Lowering for ROCm without a device, and the Triton kernels that a lowered function holds."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh

TRITON_CALL = "__gpu$xla.gpu.triton"


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """One launch of a Pallas kernel: its name, its Triton IR as text, and its warps a program."""

    name: str
    text: str
    num_warps: int


def lower(function: Callable[..., Any], arguments: Sequence[Any], arch: str) -> Any:
    """The StableHLO module of `function`, lowered for a device of kind `arch`.

    Args:
        function: takes the arguments by position.
        arguments: pytrees of `jax.ShapeDtypeStruct`.
        arch: such as `gfx942`; picks the number of warps.
    """
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice(arch, None, platform="gpu"))
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("rocm",))
    return lowered.compiler_ir("stablehlo")


def triton_kernels(module: Any) -> list[TritonKernel]:
    """Every Triton kernel of a lowered function, in order."""
    return [_read(operation) for operation in _operations(module.operation) if _is_triton_call(operation)]


def _operations(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region:
            for child in block:
                yield child.operation
                yield from _operations(child.operation)


def _is_triton_call(operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return ir.StringAttr(operation.attributes["call_target_name"]).value == TRITON_CALL


def _read(operation: Any) -> TritonKernel:
    settings = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    context = ir.Context()
    # jaxlib's own build of Triton's dialects: no part of jax's public interface, and without type stubs.
    dialect: Any = importlib.import_module("jaxlib.triton.dialect")
    dialect.register_dialect(context)
    context.load_all_available_dialects()
    inner = ir.Module.parse(ir.StringAttr(settings["ir"]).value_bytes, context)
    # Triton's parser takes no module with a name.
    del inner.operation.attributes["sym_name"]
    return TritonKernel(
        name=ir.StringAttr(settings["name"]).value,
        text=str(inner),
        num_warps=ir.IntegerAttr(settings["num_warps"]).value,
    )

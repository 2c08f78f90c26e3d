"""The only module that imports Pallas's Triton backend. Every kernel is launched through `launch`.

The backend is deprecated since JAX 0.11 and reaches AMD and NVIDIA GPUs; another one would replace this
module and the kernels, not the operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

load = triton.load
store = triton.store


@dataclasses.dataclass(frozen=True)
class Warps:
    """Warps of one program, by lanes a warp: 64 on AMD gfx9, 32 on AMD gfx11 and gfx12 and on NVIDIA."""

    wave64: int
    wave32: int


def device_kind() -> str:
    """The kind of the device that is compiled for: that of the abstract mesh if one is in use."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return str(abstract.device_kind)
    return jax.devices()[0].device_kind


def has_wave64(kind: str) -> bool:
    """Whether a device kind such as `gfx942:sramecc+:xnack-` runs 64 lanes a warp."""
    return kind.lower().startswith("gfx9")


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    *,
    name: str,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: Warps,
    aliases: Mapping[int, int] | None = None,
    cost: pl.CostEstimate | None = None,
    interpret: bool = False,
) -> list[jax.Array]:
    """Runs a kernel that sees every operand and output whole.

    Args:
        kernel: takes one ref an operand, then one an output.
        operands: arrays, no more than 2^31 - 1 elements each.
        name: appears in profiles and in the compiled program.
        grid: at most three axes.
        out_shape: shapes and dtypes of the outputs.
        warps: see `Warps`.
        aliases: operand index -> output index that shares its buffer.
        cost: operations and bytes, for XLA's scheduler.
        interpret: run on any device as plain JAX.

    Raises:
        ValueError: an array whose offsets 32-bit index arithmetic cannot hold.
    """
    for array in [*operands, *out_shape]:
        if array.size >= 2**31:
            raise ValueError(
                f"{name}: an array of shape {array.shape} has {array.size:,} elements; kernels index with 32 bits and "
                "take fewer than 2^31: use fewer slots or pages, or the reference"
            )
    options: dict[str, Any] = {"interpret": True}
    if not interpret:
        count = warps.wave64 if has_wave64(device_kind()) else warps.wave32
        # One stage: pipelining crashed or miscompiled on gfx950 in public reports.
        options = {"compiler_params": triton.CompilerParams(num_warps=count, num_stages=1)}
    call = pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=list(out_shape),
        input_output_aliases=dict(aliases or {}),
        cost_estimate=cost,
        name=name,
        **options,
    )
    return call(*operands)

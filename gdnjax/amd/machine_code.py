"""A kernel's machine code, made by the `triton` package's AMD backend, and what it says of itself.

XLA bundles a Triton of its own, which compiles the kernel on a real machine: registers and spills there
can differ from those counted here.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import tempfile
from typing import Any

from gdnjax.amd.lower import TritonKernel
from gdnjax.amd.targets import Target

# 16 bytes a lane, global memory only: gfx9 and gfx11/gfx12 spell it differently.
WIDE_LOAD = re.compile(r"^\s*(?:global|buffer|flat)_load_(?:lds_)?(?:dwordx4|b128)\b", re.MULTILINE)
WIDE_STORE = re.compile(r"^\s*(?:global|buffer|flat)_store_(?:dwordx4|b128)\b", re.MULTILINE)

OLD_HINTS = re.compile(
    r"(?= cacheModifier = | evictionPolicy = )"
    r"(?: cacheModifier = (?P<cache>\w+))?(?: evictionPolicy = (?P<eviction>\w+))?"
)


@dataclasses.dataclass(frozen=True)
class MachineCode:
    """* `vgprs`: vector registers a lane, accumulation registers included.
    * `spills`: vector registers that went to memory.
    * `lds_bytes`: LDS of a workgroup.
    * `occupancy`: waves that one SIMD holds, as registers and LDS allow.
    * `wide_loads`, `wide_stores`: instructions that move 16 bytes a lane from or to global memory.
    """

    vgprs: int
    spills: int
    lds_bytes: int
    occupancy: int
    wide_loads: int
    wide_stores: int


def compile_kernel(kernel: TritonKernel, target: Target) -> MachineCode:
    """Compiles one kernel; whatever Triton raises is passed on."""
    # Loaded by name: only the extra `amd` installs it.
    triton: Any = importlib.import_module("triton")
    gpu: Any = importlib.import_module("triton.backends.compiler").GPUTarget("hip", target.arch, target.wave)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"{kernel.name}.ttir"
        path.write_text(current_syntax(kernel.text))
        options = {"num_warps": kernel.num_warps, "num_stages": 1}
        compiled = triton.compile(str(path), target=gpu, options=options)
    return measure(compiled.asm["amdgcn"], compiled.metadata.shared, kernel.num_warps, target)


def current_syntax(text: str) -> str:
    """Triton IR in the syntax of triton 3.9: jaxlib 0.10 writes loads' and stores' cache hints in an older one."""

    def rewrite(match: re.Match[str]) -> str:
        cache, eviction = match["cache"] or "none", match["eviction"] or "evict_normal"
        return f" {{cachePolicy = #tt.cache_policy<cache_modifier = {cache}, eviction_policy = {eviction}>}}"

    return OLD_HINTS.sub(rewrite, text)


def measure(assembly: str, dynamic_lds: int, num_warps: int, target: Target) -> MachineCode:
    """Reads the figures off the assembly.

    Args:
        assembly: of one kernel, with the metadata and comments of LLVM's AMDGPU backend.
        dynamic_lds: bytes of LDS that are asked for at launch, which the assembly does not know of.
        num_warps: waves of a workgroup.
        target: bounds the LDS.
    """
    lds = max(dynamic_lds, _number(r"\.group_segment_fixed_size:\s*(\d+)", assembly))
    occupancy = _number(r"; Occupancy:\s*(\d+)", assembly)
    if lds:
        occupancy = min(occupancy, max(1, target.lds // lds * num_warps // target.simds))
    return MachineCode(
        vgprs=_number(r"\.vgpr_count:\s*(\d+)", assembly),
        spills=_number(r"\.vgpr_spill_count:\s*(\d+)", assembly),
        lds_bytes=lds,
        occupancy=occupancy,
        wide_loads=len(WIDE_LOAD.findall(assembly)),
        wide_stores=len(WIDE_STORE.findall(assembly)),
    )


def _number(pattern: str, assembly: str) -> int:
    found = re.findall(pattern, assembly)
    if len(found) != 1:
        raise ValueError(f"the assembly has {len(found)} entries {pattern!r}, not one: another version of triton?")
    return int(found[0])

"""Lowering for ROCm on this machine, and the kernels found in it."""

from __future__ import annotations

import pytest

from gdnjax.amd.kernels import KERNELS
from gdnjax.amd.lower import lower, triton_kernels
from gdnjax.amd.machine_code import current_syntax
from tests.amd.stand_in import ARGUMENTS, scale_rows, too_large, twice

pytestmark = pytest.mark.newest


@pytest.mark.parametrize(("arch", "warps"), [("gfx942", 2), ("gfx90a", 2), ("gfx1100", 4), ("gfx1201", 4)])
def test_the_architecture_picks_the_warps(arch: str, warps: int) -> None:
    (kernel,) = triton_kernels(lower(scale_rows, ARGUMENTS, arch))
    assert (kernel.name, kernel.num_warps) == ("scale_rows", warps)
    assert "tt.func public @scale_rows" in kernel.text
    # Triton's parser takes no name here
    assert kernel.text.startswith("module {")


def test_every_launch_is_found() -> None:
    assert [k.name for k in triton_kernels(lower(twice, ARGUMENTS, "gfx942"))] == ["scale_rows", "scale_rows"]
    assert triton_kernels(lower(lambda x: x + 1, ARGUMENTS, "gfx942")) == []


def test_a_kernel_that_cannot_be_lowered_raises() -> None:
    with pytest.raises(Exception, match=r"power of 2|powers of 2|power of two"):
        lower(too_large, ARGUMENTS, "gfx942")


@pytest.mark.parametrize("name", KERNELS)
def test_every_operation_launches_kernels(name: str) -> None:
    # One shape of each here: all of them are what the command is for.
    case = next(iter(KERNELS[name].cases(4)))
    kernels = triton_kernels(lower(case.function, case.arguments, "gfx942"))
    assert kernels
    for kernel in kernels:
        assert current_syntax(kernel.text).count("cachePolicy") == kernel.text.count(" = evict_")


@pytest.mark.parametrize("name", KERNELS)
def test_every_operation_has_the_real_shapes(name: str) -> None:
    names = {case.shape.split(",")[0] for case in KERNELS[name].cases(4)}
    assert {"0.8B", "2B", "4B", "9B", "27B"} <= names


def test_old_hints_are_rewritten() -> None:
    load = "%1 = tt.load %0 cacheModifier = ca evictionPolicy = evict_first : !p"
    store = "tt.store %0, %1 evictionPolicy = evict_last : !p"
    both, eviction = current_syntax(f"{load}\n{store}").splitlines()
    hints = "{cachePolicy = #tt.cache_policy<cache_modifier = %s, eviction_policy = %s>}"
    assert both == f"%1 = tt.load %0 {hints % ('ca', 'evict_first')} : !p"
    assert eviction == f"tt.store %0, %1 {hints % ('none', 'evict_last')} : !p"
    assert current_syntax(both) == both

"""Figures read off assembly, thunk sequences and HLO, and the rules over them."""

from __future__ import annotations

from typing import Any

import pytest

from gdnjax.amd import rules
from gdnjax.amd.compiled import launches, whole_array_writes
from gdnjax.amd.machine_code import MachineCode, measure
from gdnjax.amd.report import KERNEL_COLUMNS, PROGRAM_COLUMNS, markdown, merged
from gdnjax.amd.targets import TARGETS

ASSEMBLY = """
        s_load_dwordx4 s[0:3], s[4:5], 0x0
        global_load_dwordx4 v[0:3], v4, s[0:1]
        global_load_dwordx2 v[0:1], v4, s[0:1]
        buffer_load_dwordx4 v[8:11], v4, s[0:3], 0 offen
        ds_read_b128 v[0:3], v5
        scratch_load_dwordx4 v[0:3], off, s0
        global_store_dwordx4 v4, v[0:3], s[0:1]
        global_store_dword v4, v0, s[0:1]
; Occupancy: 7
    .group_segment_fixed_size: 256
    .sgpr_spill_count: 9
    .vgpr_count:     72
    .vgpr_spill_count: 3
"""
RDNA = ASSEMBLY.replace("dwordx4", "b128").replace("dwordx2", "b64")

# The form of XLA's dump: a loop in a program, and a loop in that loop.
THUNKS = """\
001: kCopy         [source       | next=002 (3)] kCopy
002: kCustomKernel [source       | next=003 (2)] loop_broadcast_fusion_1 grid: [4, 1, 1] threads: [256, 1, 1]
003: kWhile        [prev=002 (1) | sink        ]   
condition:
    004: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    005: kCustomKernel [source       | next=006 (1)] attention_prologue grid: [64, 10, 1] threads: [64, 1, 1]
    006: kWhile        [prev=005 (1) | next=009 (1)]   
condition:
        007: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        008: kCopy         [source       | sink        ] kCopy
    009: kGemm         [prev=006 (1) | sink        ] kGemm
010: kMemzero      [prev=003 (1) | sink        ] kMemzero
"""

HLO = """
%fused (p0: f32[129,16,128,128], p1: f32[64,16,128,128]) -> f32[129,16,128,128] {
  %p0 = f32[129,16,128,128]{3,2,1,0} parameter(0)
  ROOT %s = f32[129,16,128,128]{3,2,1,0} scatter(%p0, %i, %p1), to_apply=%add
}
ENTRY %main {
  %pool = f32[129,16,128,128]{3,2,1,0} parameter(0)
  %small = s32[64]{0} copy(%x)
  %k = (bf16[64,16,128]{2,1,0}, f32[129,16,128,128]{3,2,1,0}) custom-call(%pool), custom_call_target="triton"
  %g = f32[129,16,128,128]{3,2,1,0} get-tuple-element(%k), index=1
  %f = f32[129,16,128,128]{3,2,1,0} fusion(%g, %u), kind=kInput, calls=%fused
"""
POOL = 129 * 16 * 128 * 128


@pytest.mark.parametrize(("arch", "assembly"), [("gfx942", ASSEMBLY), ("gfx1201", RDNA)])
def test_the_assembly_is_read(arch: str, assembly: str) -> None:
    code = measure(assembly, 0, 4, TARGETS[arch])
    assert code == MachineCode(vgprs=72, spills=3, lds_bytes=256, occupancy=7, wide_loads=2, wide_stores=1)


@pytest.mark.parametrize(
    ("arch", "lds", "warps", "occupancy"),
    [("gfx942", 16384, 4, 4), ("gfx942", 32768, 1, 1), ("gfx950", 32768, 4, 5), ("gfx1201", 16384, 4, 7)],
)
def test_lds_bounds_the_occupancy(arch: str, lds: int, warps: int, occupancy: int) -> None:
    code = measure(ASSEMBLY, lds, warps, TARGETS[arch])
    assert (code.lds_bytes, code.occupancy) == (lds, occupancy)


def test_assembly_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="another version of triton"):
        measure(ASSEMBLY.replace(".vgpr_spill_count", ".spills"), 0, 4, TARGETS["gfx942"])


def test_launches_are_counted() -> None:
    # Everything but the two loops themselves; and of the loop alone, what one iteration launches.
    assert launches(THUNKS, loop=False) == 8
    assert launches(THUNKS, loop=True) == 5


@pytest.mark.parametrize(
    ("text", "loop"), [("", False), ("nothing: here", False), (THUNKS[: THUNKS.index("003")], True)]
)
def test_a_thunk_sequence_of_another_form_is_refused(text: str, loop: bool) -> None:
    with pytest.raises(ValueError, match=r"no thunk|0 outermost loops"):
        launches(text, loop)


def test_an_update_in_place_is_no_copy() -> None:
    assert not whole_array_writes(HLO, {POOL})


@pytest.mark.parametrize(
    "line",
    [
        "%c = f32[129,16,128,128]{3,2,1,0} copy(%pool)",
        "%c = (f32[129,16,128,128]{3,2,1,0}, f32[129,16,128,128]{3,2,1,0}, u32[]) copy-start(%pool)",
        "ROOT %c = bf16[129,16,128,128]{3,2,1,0} convert(%pool)",
        "%c = f32[2064,128,128]{2,1,0:T(8,128)} transpose(%pool), dimensions={0,2,1}",
        "%c = f32[129,16,128,128]{3,2,1,0} select(%p, %pool, %zeros)",
    ],
)
def test_a_copy_is_found(line: str) -> None:
    assert whole_array_writes(f"{HLO}  {line}\n", {POOL}).total() == 1
    assert not whole_array_writes(f"{HLO}  {line}\n", {POOL - 1})


@pytest.mark.parametrize(
    ("side", "arch", "spilled", "broken"),
    [
        ("decode", "gfx942", 0, False),
        ("decode", "gfx942", 1, True),
        ("decode", "gfx1100", 1, True),
        ("prefill", "gfx942", 1, True),
        ("prefill", "gfx950", 1, True),
        ("prefill", "gfx1201", 1, False),
        ("prefill", "gfx90a", 1, False),
    ],
)
def test_the_rule_on_spills(side: rules.Side, arch: str, spilled: int, broken: bool) -> None:
    message = rules.spills(side, {"name": "k", "shape": "9B", "arch": arch, "spills": spilled})
    assert (message is not None) == broken
    if message is not None:
        assert message == f"k, 9B, {arch}: spills 1 registers"


def test_the_rule_on_copies() -> None:
    row = {"program": "prefill", "config": "9b", "arch": "gfx942", "pool_copies": 0}
    assert rules.copies(row) is None
    assert "2 times" in str(rules.copies({**row, "pool_copies": 2}))


def kernel_row(shape: str, **changes: Any) -> dict[str, Any]:
    values = dict(vgprs=8, spills=0, lds_bytes=0, occupancy=8, wide_loads=1, wide_stores=1)
    return {"name": "k", "arch": "gfx942", "shape": shape, **values, **changes}


def test_tables() -> None:
    same = [kernel_row(shape) for shape in ("9B", "9B, bf16 state")]
    rows = merged([kernel_row("0.8B"), kernel_row("27B", vgprs=9), *same])
    assert [(row["shape"], row["vgprs"]) for row in rows] == [("0.8B 9B; bf16 state: 9B", 8), ("27B", 9)]
    lines = markdown(KERNEL_COLUMNS, rows).splitlines()
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[2].startswith("| k      | gfx942 | 0.8B 9B; bf16 state: 9B | 8 ")
    program = dict(
        program="prefill", config="9b", arch="gfx942", rows=64, kernels_per_step=7, pool_copies=0,
        alias_bytes=3 * 2**30, temp_bytes=2**19,
    )  # fmt: skip
    assert "| 3,072.0 MiB | 0.5 MiB" in markdown(PROGRAM_COLUMNS, [program])

"""What a worker reports of a kernel or a program, with stand-ins for the compilers that only the extra installs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gdnjax.amd import rules, worker
from gdnjax.amd.jobs import Job
from gdnjax.amd.kernels import KERNELS, Case, Kernel
from gdnjax.amd.lower import TritonKernel
from gdnjax.amd.machine_code import MachineCode
from gdnjax.amd.programs import serving_config, state_sizes
from gdnjax.amd.targets import Target
from gdnjax.state import state_shapes
from tests.amd.stand_in import ARGUMENTS, scale_rows, too_large, twice

GOOD = MachineCode(vgprs=72, spills=0, lds_bytes=0, occupancy=7, wide_loads=2, wide_stores=1)
SPILLING = MachineCode(vgprs=256, spills=3, lds_bytes=0, occupancy=2, wide_loads=2, wide_stores=1)

Compile = Callable[[TritonKernel, Target], MachineCode]


def reports_of(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cases: list[Case],
    compiler: Compile,
    side: rules.Side = "decode",
    quick: bool = False,
) -> list[tuple[str, Any]]:
    def listed(rows: int) -> Iterator[Case]:
        assert rows == 32
        yield from cases

    monkeypatch.setitem(KERNELS, "stand_in", Kernel(side, listed))
    monkeypatch.setattr("gdnjax.amd.machine_code.compile_kernel", compiler)
    reported: list[tuple[str, Any]] = []
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        job = Job("kernel", "stand_in", "gfx1201", 32, quick=quick)
        worker.compile_kernels(job, lambda kind, value: reported.append((kind, value)))
    return reported


def test_every_launch_of_every_shape_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[TritonKernel] = []

    def compiler(kernel: TritonKernel, target: Target) -> MachineCode:
        seen.append(kernel)
        assert target.arch == "gfx1201"
        return GOOD

    cases = [Case("one", scale_rows, ARGUMENTS), Case("two", twice, ARGUMENTS)]
    reported = reports_of(monkeypatch, tmp_path, cases, compiler)
    row = {
        "name": "scale_rows", "arch": "gfx1201", "shape": "one", "vgprs": 72, "spills": 0, "lds_bytes": 0,
        "occupancy": 7, "wide_loads": 2, "wide_stores": 1,
    }  # fmt: skip
    assert reported == [("kernel", row)] + [("kernel", {**row, "shape": "two"})] * 2
    assert {kernel.num_warps for kernel in seen} == {4}


def test_a_quick_job_takes_some_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ["0.8B", "2B", "9B, bf16 state", "27B", "397B", "tiny, bf16 state"]
    cases = [Case(name, scale_rows, ARGUMENTS) for name in names]
    reported = reports_of(monkeypatch, tmp_path, cases, lambda *_: GOOD, quick=True)
    assert [row["shape"] for _, row in reported] == ["0.8B", "9B, bf16 state", "27B"]


@pytest.mark.parametrize(("side", "failures"), [("decode", 1), ("prefill", 0)])
def test_spills_are_a_failure_by_side(
    side: rules.Side, failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = [Case("one", scale_rows, ARGUMENTS)]
    kinds = [kind for kind, _ in reports_of(monkeypatch, tmp_path, cases, lambda *_: SPILLING, side)]
    assert kinds == ["kernel"] + ["failure"] * failures


class Compiled:
    """Stands for a compiled program."""

    alias_size_in_bytes, temp_size_in_bytes = 300, 20

    def __init__(self, hlo: str) -> None:
        self._hlo = hlo

    def as_text(self) -> str:
        return self._hlo

    def memory_analysis(self) -> Compiled:
        return self


@pytest.mark.parametrize("copies", [0, 2])
def test_a_program_is_a_row_and_its_copies_a_failure(
    copies: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (elements, *_) = state_sizes(state_shapes(serving_config("tiny", 4)))
    hlo = "".join(f"%c{i} = f32[{elements}]{{0}} copy(%pool)\n" for i in range(copies))

    def compiler(function: Any, arguments: tuple[Any, ...], static: dict[str, Any], target: Target) -> Compiled:
        assert target.arch == "gfx950"
        (folder,) = re.findall(r"--xla_dump_to=(\S+)", os.environ["XLA_FLAGS"])
        Path(folder, "module_0001.jit_step.thunk_sequence.txt").write_text("001: kGemm [] kGemm\n002: kCopy [] kCopy\n")
        return Compiled(hlo)

    # Set here first, so that what the worker sets for itself ends with the test.
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr("gdnjax.amd.rocm_compiler.compile_program", compiler)
    reported: list[tuple[str, Any]] = []
    with (tmp_path / "stderr").open("w+") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        job = Job("program", "decode_step", "gfx950", 4, "tiny")
        worker.compile_program(job, lambda kind, value: reported.append((kind, value)))
    row = {
        "program": "decode_step", "config": "tiny", "arch": "gfx950", "rows": 4, "kernels_per_step": 2,
        "pool_copies": copies, "alias_bytes": 300, "temp_bytes": 20,
    }  # fmt: skip
    assert reported[0] == ("program", row)
    assert [kind for kind, _ in reported[1:]] == ["failure"] * (copies > 0)


def test_what_does_not_build_leaves_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def compiler(kernel: TritonKernel, target: Target) -> MachineCode:
        if "256" not in kernel.text:
            raise AssertionError
        print("k.ttir:1:2: error: expected ':'\nsomething else", file=sys.stderr)
        raise RuntimeError("Parse failed.\nmore")

    cases = [Case("odd", too_large, ARGUMENTS), Case("plain", lambda x: x + 1, ARGUMENTS)]
    reported = reports_of(monkeypatch, tmp_path, [*cases, Case("one", scale_rows, ARGUMENTS)], compiler)
    assert {kind for kind, _ in reported} == {"failure"}
    first, second, third = (text for _, text in reported)
    assert first.startswith("stand_in, odd, gfx1201: does not build: ") and "\n" not in first
    assert second == "stand_in, plain, gfx1201: no kernel is launched, its reference runs instead"
    assert third.endswith("does not build: RuntimeError: Parse failed.; k.ttir:1:2: error: expected ':'")

"""The process of one job: compiles, and appends what it finds to a file, one JSON object a line.

`python -m gdnjax.amd.worker JOB RESULTS`, with JOB the job as JSON. A compiler that crashes takes this
process with it and leaves the results so far.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from gdnjax.amd import rules
from gdnjax.amd.jobs import Job
from gdnjax.amd.targets import TARGETS

Report = Callable[[str, Any], None]
"""(`kernel`, `program` or `failure`; its value)."""


def compile_kernels(job: Job, report: Report) -> None:
    """Every shape of one operation, or a quick job's, for one architecture."""
    from gdnjax.amd.kernels import KERNELS, QUICK_SHAPES
    from gdnjax.amd.lower import lower, triton_kernels
    from gdnjax.amd.machine_code import compile_kernel

    operation = KERNELS[job.name]
    for case in operation.cases(job.rows):
        if job.quick and case.shape.split(",")[0] not in QUICK_SHAPES:
            continue
        where = f"{job.name}, {case.shape}, {job.arch}"
        log = CompilerLog()
        # Whatever a compiler raises is a finding about this case, and the others are compiled all the same.
        try:
            kernels = triton_kernels(lower(case.function, case.arguments, job.arch))
            if not kernels:
                report("failure", f"{where}: no kernel is launched, its reference runs instead")
            for kernel in kernels:
                code = compile_kernel(kernel, TARGETS[job.arch])
                named = {"name": kernel.name, "arch": job.arch, "shape": case.shape}
                row = {**named, **dataclasses.asdict(code)}
                report("kernel", row)
                if broken := rules.spills(operation.side, row):
                    report("failure", broken)
        except Exception as error:
            report("failure", f"{where}: does not build: {log.explain(error)}")


def compile_program(job: Job, report: Report) -> None:
    """One program of one config, for one architecture."""
    from gdnjax.amd import rocm_compiler
    from gdnjax.amd.compiled import launches, whole_array_writes
    from gdnjax.amd.programs import PROGRAMS, serving_config, state_sizes

    config = serving_config(job.config, job.rows)
    program = PROGRAMS[job.name](config)
    with tempfile.TemporaryDirectory() as dump:
        # Read when XLA's compiler is loaded. Without command buffers every launch is a thunk of its own.
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={dump} --xla_gpu_enable_command_buffer="
        log = CompilerLog()
        try:
            compiled = rocm_compiler.compile_program(
                program.function, program.arguments, program.static, TARGETS[job.arch]
            )
            (thunks,) = pathlib.Path(dump).glob(f"*.jit_{program.function.__name__}.thunk_sequence.txt")
            count = launches(thunks.read_text(), program.loop)
        except Exception as error:
            report("failure", f"{job.name}, {job.config}, {job.arch}: does not compile: {log.explain(error)}")
            return
    memory = compiled.memory_analysis()
    row = {
        "program": job.name,
        "config": job.config,
        "arch": job.arch,
        "rows": program.rows,
        "kernels_per_step": count,
        "pool_copies": whole_array_writes(compiled.as_text(), state_sizes(program.state)).total(),
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }
    report("program", row)
    if broken := rules.copies(row):
        report("failure", broken)


class CompilerLog:
    """What the compilers print after this point: MLIR says what is wrong on stderr and raises without it."""

    def __init__(self) -> None:
        # The parent made stderr a file.
        self._start = os.lseek(sys.stderr.fileno(), 0, os.SEEK_END)

    def explain(self, error: Exception) -> str:
        """The error in one line, with the first error that was printed."""
        sys.stderr.flush()
        size = os.lseek(sys.stderr.fileno(), 0, os.SEEK_END) - self._start
        printed = os.pread(sys.stderr.fileno(), size, self._start).decode(errors="replace")
        lines = [str(error).strip().partition("\n")[0]]
        lines += [line.strip() for line in printed.splitlines() if "error:" in line][:1]
        return f"{type(error).__name__}: {'; '.join(line for line in lines if line)}"[:600]


def main(job: str, results: str) -> None:
    # The installed plugin finds no GPU and logs that, with a traceback, as a configuration error.
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.CRITICAL)
    parsed = Job(**json.loads(job))
    with open(results, "a", encoding="utf-8") as file:

        def report(kind: str, value: Any) -> None:
            print(json.dumps({kind: value}), file=file, flush=True)

        (compile_kernels if parsed.kind == "kernel" else compile_program)(parsed, report)


if __name__ == "__main__":
    main(*sys.argv[1:])

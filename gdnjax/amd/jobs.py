"""Jobs: what is compiled, each in a process of its own, some at a time.

A process of its own because a compiler that crashes must not take the others with it, and because the
loader and XLA read their settings when a process starts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Literal

TIMEOUT = 1800.0
"""Seconds after which a job counts as failed."""


@dataclasses.dataclass(frozen=True)
class Job:
    """* `kind`, `name`: a kernel of `gdnjax.amd.kernels`, or a program of `gdnjax.amd.programs`.
    * `config`: the program's config; empty for a kernel, which has its own list of shapes.
    * `rows`: rows of a decode step.
    * `quick`: a kernel's shapes of `gdnjax.amd.kernels.QUICK_SHAPES` only.
    """

    kind: Literal["kernel", "program"]
    name: str
    arch: str
    rows: int
    config: str = ""
    quick: bool = False

    def __str__(self) -> str:
        return ", ".join(part for part in (self.name, self.config, self.arch) if part)


@dataclasses.dataclass
class Findings:
    """What the jobs report: rows of the two tables (see `gdnjax.amd.report`), and failures as text."""

    kernels: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    programs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)

    def add(self, other: Findings) -> None:
        self.kernels += other.kernels
        self.programs += other.programs
        self.failures += other.failures


def make_jobs(archs: Sequence[str], configs: Sequence[str], rows: int, quick: bool = False) -> list[Job]:
    """The longest first, so that the cores finish together: programs, then kernels from the table's end.

    `quick` leaves out shapes of kernels, and the program that is a loop over another one.
    """
    from gdnjax.amd.kernels import KERNELS
    from gdnjax.amd.programs import LOOP, PROGRAMS

    names = [name for name in PROGRAMS if not (quick and name == LOOP)]
    programs = [Job("program", name, arch, rows, config) for config in configs for arch in archs for name in names]
    return programs + [Job("kernel", name, arch, rows, quick=quick) for name in reversed(KERNELS) for arch in archs]


def run_jobs(
    jobs: Sequence[Job], environment: dict[str, str], done: Callable[[Job], None], timeout: float = TIMEOUT
) -> Findings:
    """Runs the jobs, as many at a time as there are cores.

    Args:
        jobs: what to compile.
        environment: of the processes.
        done: called after each job, in any order.
        timeout: seconds a job may take.

    Returns:
        All findings in the order of the jobs; a process that fails or takes too long is one of them.
    """
    findings = Findings()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:

        def run(job: Job) -> Findings:
            found = run_job(job, environment, timeout)
            done(job)
            return found

        for found in pool.map(run, jobs):
            findings.add(found)
    return findings


def run_job(job: Job, environment: dict[str, str], timeout: float = TIMEOUT) -> Findings:
    """Runs one job in a process and reads what it found."""
    with tempfile.TemporaryDirectory() as folder:
        results, log = pathlib.Path(folder) / "results", pathlib.Path(folder) / "log"
        results.touch()
        command = [sys.executable, "-m", "gdnjax.amd.worker", json.dumps(dataclasses.asdict(job)), str(results)]
        with log.open("w+b") as stderr:
            try:
                ended = subprocess.run(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, timeout=timeout
                )
                problem = _describe(ended.returncode, log)
            except subprocess.TimeoutExpired:
                problem = f"did not end within {timeout:.0f} s"
        findings = read_results(results.read_text(encoding="utf-8"))
    if problem:
        findings.failures.append(f"{job}: {problem}")
    return findings


def read_results(text: str) -> Findings:
    """The findings in a worker's results."""
    findings = Findings()
    for line in text.splitlines():
        for kind, value in json.loads(line).items():
            {"kernel": findings.kernels, "program": findings.programs, "failure": findings.failures}[kind].append(value)
    return findings


def _describe(code: int, log: pathlib.Path) -> str:
    """Why a process failed; empty if it didn't."""
    if code == 0:
        return ""
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the compiler's process ended with {how}: {last[0][:400]}"

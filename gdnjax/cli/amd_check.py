"""`gdnjax amd-check`: compiles kernels and programs for AMD GPUs, on any machine."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from gdnjax.cli import UsageError, add_json_flag, print_json

if TYPE_CHECKING:
    from gdnjax.amd.jobs import Findings, Job


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "amd-check", help="compile for AMD GPUs without having one, and check the machine code"
    )
    parser.add_argument("--arch", metavar="LIST", default="gfx942,gfx1201", help="such as gfx942,gfx950 (%(default)s)")
    parser.add_argument("--config", metavar="LIST", default="0.8b", help="shapes of the programs (%(default)s)")
    parser.add_argument("--rows", type=int, metavar="N", default=64, help="rows of a decode step (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes of kernels, and no program of many steps")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gdnjax.amd.environment import prepare
    from gdnjax.amd.jobs import make_jobs
    from gdnjax.amd.targets import TARGETS
    from gdnjax.config import preset_names

    archs = _choices("--arch", args.arch, list(TARGETS))
    configs = _choices("--config", args.config, preset_names())
    if args.rows < 1:
        raise UsageError(f"--rows {args.rows}: it takes an integer >= 1")
    environment = prepare()
    findings = _compile(make_jobs(archs, configs, args.rows, args.quick), environment)
    if args.json:
        print_json({"kernels": findings.kernels, "programs": findings.programs, "failures": findings.failures})
    else:
        _print(findings)
    return 1 if findings.failures else 0


def _choices(flag: str, text: str, known: list[str]) -> list[str]:
    chosen = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in chosen:
        if name not in known:
            raise UsageError(f"{flag} {name!r}: it takes a list of {', '.join(known)}")
    return chosen


def _compile(jobs: list[Job], environment: dict[str, str]) -> Findings:
    """Findings of all jobs; progress on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gdnjax.amd.jobs import run_jobs

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=len(jobs))

        def done(job: Job) -> None:
            bar.update(task, advance=1, description=f"compiled {job}")

        return run_jobs(jobs, environment, done)


def _print(findings: Findings) -> None:
    from gdnjax.amd.report import KERNEL_COLUMNS, PROGRAM_COLUMNS, markdown, merged

    print("Compiled for AMD GPUs; nothing was run on one.\n")
    print(markdown(KERNEL_COLUMNS, merged(findings.kernels)))
    print()
    print(markdown(PROGRAM_COLUMNS, findings.programs))
    for failure in findings.failures:
        print(f"FAILED: {failure}", file=sys.stderr)

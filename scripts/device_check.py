"""Runs the kernel suite and the benchmarks on whatever accelerator is here, and writes one JSON file.

    python scripts/device_check.py --out result.json

Needs the extras `test` and the platform's own (`rocm` or `cuda`). The suite compares every compiled kernel
with its reference; the benchmarks give ratios to a copy in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SUITE = ("tests/pallas_kernels", "tests/model/test_kernels.py", "tests/model/test_draft_head.py")
"""Every kernel against its reference, the model with all of them against Hugging Face's arrays, and the fp8 head."""
sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("device_check.json"))
    parser.add_argument("--config", default="0.8b", help="shape of the benchmarks (0.8b)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--sweep", action="store_true", help="also time the delta rule with every tile")
    parser.add_argument("--skip-suite", action="store_true", help="only the benchmarks")
    args = parser.parse_args()

    from gdnjax.cli.doctor import examine

    report: dict[str, Any] = {"doctor": examine(None), "date": time.strftime("%Y-%m-%d")}
    if report["doctor"]["platform"] == "cpu":
        print("device_check: JAX runs on a CPU here; this checks accelerators", file=sys.stderr)
        return 1
    steps: list[tuple[str, Any]] = (
        [] if args.skip_suite else [("suite", lambda: run_suite(args.out.parent, report["doctor"]["platform"]))]
    )
    steps += [("kernels", lambda: bench_kernels(args)), ("state", lambda: bench_state(args))]
    if args.sweep:
        steps.append(("tiles", lambda: sweep(args)))
    for name, step in steps:
        started = time.monotonic()
        report[name] = step()
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
        # Written after every step: a machine may be taken away.
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if args.skip_suite or report["suite"]["failed"] == 0 else 1


def run_suite(folder: Path, platform: str) -> dict[str, Any]:
    """The suite on this device: counts, and the names of those that failed."""
    results = folder / "suite.xml"
    # Most of the time goes into compilation, which runs on the host's cores.
    workers = min(12, os.cpu_count() or 1)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "-W", "default", "-m", "not slow"]
    command += ["-p", "no:cacheprovider", f"--junitxml={results}", *SUITE]
    environment = {**os.environ, "GDNJAX_TEST_PLATFORM": f"{platform},cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if not results.exists():
        return {"failed": -1, "output": done.stdout[-4000:] + done.stderr[-4000:]}
    tests = list(ET.parse(results).getroot().iter("testcase"))
    failed = [t for t in tests if t.find("failure") is not None or t.find("error") is not None]
    return {
        "passed": sum(t.find("skipped") is None for t in tests) - len(failed),
        "skipped": sum(t.find("skipped") is not None for t in tests),
        "failed": len(failed),
        "failures": [f"{t.get('classname')}::{t.get('name')}" for t in failed],
        "output": done.stdout[-8000:] if failed else "",
    }


def bench_kernels(args: argparse.Namespace) -> dict[str, Any]:
    from gdnjax.bench.kernels import bench_kernels
    from gdnjax.config import from_preset

    return bench_kernels(from_preset(args.config), tuple(args.rows))


def bench_state(args: argparse.Namespace) -> dict[str, Any]:
    from gdnjax.bench.traffic import study
    from gdnjax.config import from_preset

    return study(from_preset(args.config), tuple(args.rows))


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    from gdnjax.bench.kernels import sweep_tiles
    from gdnjax.config import from_preset

    return sweep_tiles(from_preset(args.config), (16, 64))


if __name__ == "__main__":
    sys.exit(main())

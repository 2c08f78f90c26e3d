"""`gdnjax bench`: measurements on the device at hand, as ratios to something in the same run."""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

from gdnjax.cli import UsageError, add_json_flag, bench_serve, print_json
from gdnjax.cli.source import add_platform, require_platform

ROWS = (1, 4, 16, 64)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("bench", help="measure on this device")
    what = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    kernels = what.add_parser("kernels", help="every kernel against the bytes it must move")
    state = what.add_parser("state", help="traffic of the recurrent state by layout; recommends one")
    state.add_argument(
        "--write", metavar="FILE.yaml", help="write the shape there with the recommended layout for this platform"
    )
    for command, run in ((kernels, run_kernels), (state, run_state)):
        command.add_argument("--config", default="0.8b", metavar="NAME|FILE.yaml", help="shape (0.8b)")
        command.add_argument("--rows", type=int, nargs="+", default=list(ROWS), metavar="R", help="batch sizes")
        add_platform(command)
        add_json_flag(command)
        command.set_defaults(run=run)
    bench_serve.add_parser(what)


def run_kernels(args: argparse.Namespace) -> int:
    from gdnjax.bench.kernels import bench_kernels
    from gdnjax.config import from_preset

    config = _check(args, from_preset(args.config))
    report = bench_kernels(config, tuple(args.rows))
    if args.json:
        print_json(report)
        return 0
    copy, product = report["copy_bytes_per_second"] / 1e12, report["product_operations_per_second"] / 1e12
    print(f"{report['device']}, copy {copy:.2f} TB/s, product {product:.0f} TFLOP/s")
    print(f"{'kernel':<34}{'rows':>5}{'us':>10}{'spread':>9}{'of copy':>9}{'of product':>12}")
    for cell in report["cells"]:
        fractions = f"{cell['of_copy']:>9}{cell.get('of_product', ''):>12}".rstrip()
        print(f"{cell['kernel']:<34}{cell['rows']:>5}{cell['us']:>10}{cell['spread']:>9}{fractions}")
    return 0


def run_state(args: argparse.Namespace) -> int:
    from gdnjax.bench.traffic import study
    from gdnjax.config import from_preset

    config = _check(args, from_preset(args.config))
    if args.write is not None:
        _check_target(args.write)
    report = study(config, tuple(args.rows))
    if args.write is not None:
        write_layout(args.write, args.config, report)
    if args.json:
        print_json(report)
        return 0
    print(f"{report['device']}, copy {report['copy_bytes_per_second'] / 1e12:.2f} TB/s, floor {report['floor_us']} us")
    names = list(report["cells"][0]["us"])
    print(f"{'rows':>5}" + "".join(f"{name:>16}" for name in names))
    for cell in report["cells"]:
        print(f"{cell['rows']:>5}" + "".join(f"{cell['us'][n]:>9} ({cell['of_copy'][n]:.2f})" for n in names))
    print(f"twin is {report['twin_gain']:+.1%} against in place: state_layout: {report['recommended_layout']}")
    if args.write is not None:
        print(f"written to {args.write}; use it with --config {args.write}")
    return 0


def write_layout(path: str, shape: str, report: dict[str, Any]) -> None:
    """Writes a shape with the layout that a report recommends for this platform into the new file `path`."""
    from gdnjax.config.presets import with_override
    from gdnjax.platform import current_platform

    _check_target(path)
    layout = report["recommended_layout"]
    note = (
        f"# The shape {shape} with the state layout for this platform, written by `gdnjax bench state`.\n"
        f"# {report['device']}: twin is {report['twin_gain']:+.1%} against in place.\n"
    )
    text = note + with_override(shape, current_platform(), "state_layout", layout)
    # Under its own name only once it is whole.
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=os.path.dirname(path) or ".", delete=False) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)
        finally:
            os.unlink(file.name)


def _check_target(path: str) -> None:
    if not path.endswith(".yaml"):
        raise UsageError(f"--write {path}; it takes a file name that ends in .yaml")
    if os.path.lexists(path):
        raise UsageError(f"--write {path} exists; remove it or choose another name")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"--write {path}: no such folder; make it first")


def _check(args: argparse.Namespace, config: Any) -> Any:
    require_platform(args)
    from gdnjax.platform import current_platform

    if current_platform() == "cpu":
        raise RuntimeError("the benchmarks time compiled kernels, and this is a CPU; run them on a GPU")
    if any(r < 1 for r in args.rows):
        raise ValueError(f"--rows {args.rows}; it takes integers >= 1")
    return config

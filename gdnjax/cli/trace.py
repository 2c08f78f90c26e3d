"""`gdnjax trace diff`: where two traced runs part."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from gdnjax.cli import UsageError, add_json_flag, print_json

if TYPE_CHECKING:
    from gdnjax.diagnosis.diff import Difference


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="compare what GDNJAX_TRACE has written",
        description="With GDNJAX_TRACE=PATH in the environment, generate and serve write checksums of every request's "
        "state, after every step, to PATH.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    compare: argparse.ArgumentParser = actions.add_parser(
        "diff",
        help="the first step, request, layer and array in which two runs part",
        description="Exits with 0 if the runs are equal, 1 if they part, 2 if a file is no trace.",
    )
    compare.add_argument("first", metavar="A", help="a file that GDNJAX_TRACE has written")
    compare.add_argument("second", metavar="B")
    add_json_flag(compare)
    compare.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gdnjax.diagnosis.diff import diff
    from gdnjax.diagnosis.trace import TraceError, read_trace

    try:
        found = diff(read_trace(args.first), read_trace(args.second))
    except (TraceError, OSError) as error:
        raise UsageError(str(error)) from None
    if args.json:
        print_json({"equal": found.equal, **dataclasses.asdict(found)})
    else:
        print("\n".join(describe(found)))
    return 0 if found.equal else 1


def describe(found: Difference) -> list[str]:
    """What a diff has found, as lines of text."""
    place, lone = found.place, found.lone
    lines = []
    if place is not None:
        elsewhere = "" if place.other_step == place.step else f" (step {place.other_step} of B)"
        lines.append(
            f"run {place.run}, step {place.step} ({place.kind}){elsewhere}, request {place.request} at token "
            f"{place.token}, layer {place.layer} ({place.layer_type}): {place.array} differs first"
        )
    if lone is not None:
        here, there = ("A", "B") if lone.trace == "first" else ("B", "A")
        where = f"run {lone.run}, step {lone.step} of {here}"
        lines.append(f"{where}: request {lone.request} at token {lone.position} is not in {there}")
    if found.runs[0] != found.runs[1]:
        lines.append(f"A has {found.runs[0]} runs, B {found.runs[1]}")
    verdict = "equal" if found.equal else f"{found.differing:,} differ"
    return [*lines, f"{found.compared:,} checksums compared: {verdict}"]

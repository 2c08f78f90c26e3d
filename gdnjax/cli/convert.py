"""`gdnjax convert`: a Hugging Face directory to an Orbax checkpoint, and back."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

from gdnjax.cli import add_json_flag, print_json


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("convert", help="convert a checkpoint")
    parser.add_argument("source", metavar="SRC", help="a Hugging Face directory; or a gdnjax one with --to safetensors")
    parser.add_argument("target", metavar="DST", help="a directory that does not exist yet")
    parser.add_argument("--to", choices=("orbax", "safetensors"), default="orbax")
    parser.add_argument("--language-model-only", action="store_true", help="leave a vision tower behind")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gdnjax.loading import find_model
    from gdnjax.weights.orbax_io import convert

    source, target = find_model(args.source), pathlib.Path(args.target)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("tensors", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        convert(source, target, to=args.to, progress=progress, language_model_only=args.language_model_only)
    if args.json:
        print_json({"source": str(source), "target": str(target), "format": args.to})
    else:
        print(f"wrote {target} ({args.to})", file=sys.stderr)
    return 0

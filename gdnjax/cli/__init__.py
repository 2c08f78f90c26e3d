"""The `gdnjax` command. Results go to stdout, messages and progress to stderr.

Exit codes: 0 success, 1 failure, 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


class UsageError(Exception):
    """Arguments that do not go together; ends with exit code 2."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Nothing heavy is imported for `--help`."""
    from gdnjax.cli import amd_check, bench, convert, doctor, generate, info, serve, trace

    parser = argparse.ArgumentParser(prog="gdnjax", description="Qwen3.5 models in JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, serve, convert, info, doctor, bench, amd_check, trace):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UsageError as error:
        print(f"gdnjax {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"gdnjax {args.command}: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (`| head`) has what it wanted.
        sys.stderr.close()
        return 1
    except (ValueError, OSError, ArithmeticError, RuntimeError) as error:
        print(f"gdnjax {args.command}: {error}", file=sys.stderr)
        return 1


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False))


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """`--json`, the same for every command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")

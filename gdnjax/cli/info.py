"""`gdnjax info`: what a model costs, and what fits into a memory."""

from __future__ import annotations

import argparse
import re
from typing import Any

from gdnjax.cli import UsageError, add_json_flag, print_json
from gdnjax.cli.source import add_draft_head, read_config
from gdnjax.config.checks import PLATFORMS

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("info", help="sizes of a model and what fits into a memory")
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a shipped model or a directory")
    parser.add_argument("--config", metavar="NAME|FILE.yaml", help="a shape instead of a model")
    parser.add_argument(
        "--memory", metavar="SIZE", help="such as 32GiB: how many requests and KV tokens fit beside the weights"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: the checkpoint's")
    parser.add_argument("--state-layout", choices=("in_place", "twin"), help="layout that --memory counts with")
    parser.add_argument(
        "--speculate", type=int, metavar="K", help="what K drafts a step cost, in each way to keep their states"
    )
    add_draft_head(parser)
    parser.add_argument("--max-length", type=int, metavar="N", help="length that --memory gives every request")
    parser.add_argument("--platform", choices=PLATFORMS, help="count with this platform's overrides")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gdnjax.sizes import fit, layouts, sizes

    if (args.model is None) == (args.config is None):
        raise UsageError("it takes a MODEL or --config NAME")
    if args.speculate is not None and args.speculate < 1:
        raise UsageError(f"--speculate {args.speculate}; it takes 1 to 7, drafts of a step")
    config = read_config(args.model, args.config)
    config = config if args.platform is None else config.for_platform(args.platform)
    changes: dict[str, Any] = {
        k: v for k in ("dtype", "state_layout", "max_length", "draft_head") if (v := getattr(args, k)) is not None
    }
    if args.memory is not None:
        # The limits are what is asked for; those of the file must not make a long max_length fail.
        changes |= {"max_requests": 1, "kv_tokens": None}
    config = config.replace(**changes)
    costs = sizes(config)
    requests, kv_tokens = config.max_requests, config.kv_pages * config.page_size
    if args.memory is not None:
        requests, kv_tokens = fit(config, parse_size(args.memory))
    ways = {} if args.speculate is None else layouts(config, args.speculate)
    memory = None if args.memory is None else parse_size(args.memory)
    speculation = [
        {
            "state_layout": layout,
            "speculative_state": kind,
            "bytes_per_request": sizes(way).bytes_per_request[layout],
            **({} if memory is None else dict(zip(("max_requests", "kv_tokens"), fit(way, memory), strict=True))),
        }
        for (layout, kind), way in ways.items()
    ]
    if args.json:
        print_json(
            {
                "parameters": costs.parameters,
                "weight_bytes": costs.weight_bytes,
                "draft_head_bytes": costs.draft_head_bytes,
                "bytes_per_request": costs.bytes_per_request,
                "bytes_per_kv_token": costs.bytes_per_kv_token,
                "max_requests": requests,
                "kv_tokens": kv_tokens,
                **({"speculation": speculation} if speculation else {}),
            }
        )
        return 0
    rows = [
        ("parameters", f"{costs.parameters:,}"),
        ("weights", f"{format_bytes(costs.weight_bytes)} ({config.dtype})"),
        *([("fp8 draft head", format_bytes(costs.draft_head_bytes))] if costs.draft_head_bytes else []),
        *((f"state a request, {k}", format_bytes(v)) for k, v in costs.bytes_per_request.items()),
        ("KV cache a token", format_bytes(costs.bytes_per_kv_token)),
        ("state layout", config.state_layout),
        ("max_requests" if args.memory is None else f"requests that fit in {args.memory}", f"{requests:,}"),
        ("kv_tokens" if args.memory is None else f"KV tokens that fit in {args.memory}", f"{kv_tokens:,}"),
    ]
    for way in speculation:
        fits = "" if memory is None else f", {way['max_requests']:,} requests and {way['kv_tokens']:,} KV tokens fit"
        name = f"{args.speculate} drafts, {way['speculative_state']}, {way['state_layout']}"
        rows.append((name, f"{format_bytes(way['bytes_per_request'])} a request{fits}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    return 0


def parse_size(text: str) -> int:
    """Bytes of `32GiB`, `512M`, `1e9`. Raises UsageError otherwise."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([KMGT]?I?)B?\s*", text.upper().replace("E", "e"))
    if match is None or match.group(2) not in UNITS:
        raise UsageError(f"--memory {text!r}: it takes a number with a unit, such as 32GiB or 64GB")
    return int(float(match.group(1)) * UNITS[match.group(2)])


def format_bytes(count: float) -> str:
    """`18.8 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"

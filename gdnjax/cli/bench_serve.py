"""`gdnjax bench serve`: a load of clients on an engine, or on a server, with arms that alternate."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from gdnjax.cli import UsageError, add_json_flag, print_json
from gdnjax.cli.source import add_source, load_model

CLIENTS = (1, 4, 16, 64)
COLUMNS = (
    ("tokens_per_second", "tok/s"),
    ("itl_p50_ms", "ITL p50"),
    ("itl_p95_ms", "p95"),
    ("itl_p99_ms", "p99"),
    ("ttft_p50_ms", "TTFT p50"),
    ("ttft_p95_ms", "p95"),
    ("host_ms", "host"),
    ("bare_ms", "bare"),
    ("itl_over_bare", "ratio"),
)


def add_parser(what: Any) -> None:
    parser: argparse.ArgumentParser = what.add_parser(
        "serve", help="clients that send one request after the other to an engine, or to a server"
    )
    add_source(parser)
    parser.add_argument("--clients", type=int, nargs="+", default=list(CLIENTS), metavar="N", help="(1 4 16 64)")
    parser.add_argument("--prompt-tokens", type=int, default=256, metavar="N", help="of a prompt, about (256)")
    parser.add_argument("--new-tokens", type=int, default=256, metavar="N", help="of an answer (256)")
    parser.add_argument("--turns", type=int, default=2, metavar="N", help="requests a client and round (2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="figures are medians over them (3)")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="KEY=VALUE[,...]",
        help="serving keys of the config, adaptive, drafts; give it once for each arm",
    )
    parser.add_argument("--pack", action="store_true", help="pack the weights first, as gdnjax.pack does")
    parser.add_argument("--url", metavar="http://HOST:PORT", help="a server that runs, in place of an engine here")
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("clients", "prompt_tokens", "new_tokens", "turns", "rounds"):
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}; it takes integers >= 1")
    if args.new_tokens < 2:
        raise UsageError("--new-tokens 1; there is no time between tokens with fewer than 2")
    arms = parse_arms(args.arm)
    from gdnjax.bench.serve import Load

    loads = [Load(count, args.prompt_tokens, args.new_tokens, args.turns) for count in args.clients]
    report = _run_server(args, loads) if args.url else _run_engine(args, loads, arms)
    if args.json:
        print_json(report)
        return 0
    print(f"{report['device']}, medians of {report['rounds']} rounds, times in ms")
    columns = [(key, title) for key, title in COLUMNS if key in report["cells"][0]]
    width = max([4, *(len(cell["arm"]) + 1 for cell in report["cells"])])
    print(f"{'arm':<{width}}{'clients':>7}" + "".join(f"{title:>18}" for _, title in columns))
    for cell in report["cells"]:
        values = (f"{cell[key]:>10.2f} ±{cell['spread'][key]:>5.1%}" for key, _ in columns)
        print(f"{cell['arm']:<{width}}{cell['clients']:>7}" + "".join(f"{value:>18}" for value in values))
    return 0


def parse_arms(given: list[str]) -> dict[str, dict[str, Any]]:
    """`["state_layout=twin", ...]` -> by arm, the keys that it sets."""
    import yaml

    from gdnjax.bench.serve import ENGINE_KEYS
    from gdnjax.config.schema import SERVING_KEYS

    known = SERVING_KEYS | ENGINE_KEYS
    arms: dict[str, dict[str, Any]] = {}
    for text in given:
        arms[text] = {}
        for part in text.split(","):
            key, _, value = part.partition("=")
            if key not in known:
                raise UsageError(f"--arm {text}: key {key!r}; it takes {', '.join(sorted(known))}")
            arms[text][key] = yaml.safe_load(value)
            if key == "adaptive" and not isinstance(arms[text][key], bool):
                raise UsageError(f"--arm {text}: adaptive = {value!r}; it takes true or false")
    return arms


def _run_engine(args: argparse.Namespace, loads: list[Any], arms: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from gdnjax.bench.serve import bench_serve
    from gdnjax.weights.packing import pack

    lm = load_model(args)
    if args.pack:
        lm = dataclasses.replace(lm, params=pack(lm.params, lm.config))
    return bench_serve(lm, loads, arms, args.rounds, lambda line: print(line, file=sys.stderr))


def _run_server(args: argparse.Namespace, loads: list[Any]) -> dict[str, Any]:
    from gdnjax.bench.client import run_server
    from gdnjax.bench.serve import PLAIN_IDS, medians

    if args.arm or args.model or args.config:
        raise UsageError("--url: the server has its own model and config; leave out --arm, --model and --config")
    cells = []
    for load in loads:
        found = [run_server(args.url, load, PLAIN_IDS) for _ in range(args.rounds)]
        cells.append({"arm": args.url, **dataclasses.asdict(load), **medians(found)})
    return {"device": args.url, "rounds": args.rounds, "cells": cells}

"""`gdnjax serve`: a model behind OpenAI's HTTP API."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
from typing import Any

from gdnjax.cli import UsageError
from gdnjax.cli.compilation_cache import use_compilation_cache
from gdnjax.cli.source import DEFAULT_MODEL, add_draft_head, add_source, check_drafts, load_model


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("serve", help="serve a model over HTTP")
    add_source(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes any free one (8000)")
    parser.add_argument("--name", help="what clients call the model; default: the model's own name")
    parser.add_argument("--api-key", metavar="KEY", help="that clients must send (environment: GDNJAX_API_KEY)")
    parser.add_argument(
        "--max-requests", metavar="N|auto", type=_limit, help="at once; default: the config's on a CPU, else auto"
    )
    parser.add_argument("--kv-tokens", metavar="N", type=_positive, help="that the KV cache holds; default: by memory")
    parser.add_argument("--max-waiting", metavar="N", type=_positive, default=256, help="more are told to wait (256)")
    parser.add_argument("--max-tokens", metavar="N", type=_positive, help="most new tokens of an answer")
    parser.add_argument("--max-choices", metavar="N", type=_positive, default=16, help="most answers a request (16)")
    parser.add_argument("--max-body", metavar="BYTES", type=_positive, default=8 * 2**20, help="of a request (8 MiB)")
    parser.add_argument("--prefix-cache", metavar="BYTES", type=_positive, help="memory for prefixes shared by prompts")
    parser.add_argument(
        "--speculate", type=_drafts, metavar="K", help="most drafts a step, 0 to 7; the answers are the same"
    )
    parser.add_argument(
        "--drafts", choices=("mtp", "ngram"), help="of --speculate: the draft head's, or the text's own; default: mtp"
    )
    parser.add_argument(
        "--adaptive", action="store_true", help="of --speculate: fewer drafts a step where that gives more tokens/s"
    )
    add_draft_head(parser)
    parser.add_argument("--timeout", metavar="S", type=_seconds, default=600.0, help="of a request (600)")
    parser.add_argument("--drain", metavar="S", type=_seconds, default=30.0, help="for requests to end at a stop (30)")
    parser.add_argument(
        "--compilation-cache", metavar="DIR|none", help="where compiled programs are kept (~/.cache/gdnjax/xla)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        from gdnjax.server.run import Server, bind
        from gdnjax.server.service import make_service
    except ModuleNotFoundError as error:
        raise RuntimeError(f"the module {error.name} is missing; run pip install 'gdnjax[serve]'") from None
    from gdnjax.engine import Engine
    from gdnjax.platform import current_platform
    from gdnjax.server.settings import Settings

    if args.config is not None:
        raise UsageError(f"--config {args.config}: random weights have no tokenizer, and a server answers in text")
    check_drafts(args)
    if args.adaptive and not args.speculate:
        raise UsageError("--adaptive chooses how many drafts a step verifies; give most of them with --speculate K")
    # Before minutes of compiling.
    with bind(args.host, args.port) as sock:
        use_compilation_cache(args.compilation_cache)
        lm = load_model(args)
        if args.prefix_cache is not None:
            lm = dataclasses.replace(lm, config=lm.config.replace(prefix_cache_bytes=args.prefix_cache))
        most = args.max_requests or (None if current_platform() == "cpu" else "auto")
        engine = Engine(
            lm,
            max_requests=most,
            kv_tokens=args.kv_tokens,
            max_waiting=args.max_waiting,
            speculate=args.speculate,
            drafts=args.drafts,
            adaptive=args.adaptive,
        )
        settings = Settings(
            model=args.name or pathlib.Path(args.model or DEFAULT_MODEL).resolve().name,
            api_key=args.api_key or os.environ.get("GDNJAX_API_KEY") or None,
            max_body_bytes=args.max_body,
            max_choices=args.max_choices,
            max_tokens=args.max_tokens,
            timeout=args.timeout,
            drain=args.drain,
        )
        service = make_service(lm, engine, settings)
        engine.warm_up(progress=True)

        def ready() -> None:
            host, port = sock.getsockname()[:2]
            place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            limits = engine.config
            print(
                f"{settings.model} on http://{place}/v1, {limits.max_requests} requests at once, "
                f"{limits.max_length} tokens each, {limits.kv_tokens} in all",
                flush=True,
            )

        server = Server(service, ready)
        server.run(sockets=[sock])
    if server.force_exit:
        print("gdnjax serve: stopped before all requests had ended", file=sys.stderr)
    return 0


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; it takes an integer >= 1")
    return value


def _drafts(text: str) -> int:
    from gdnjax.config.schema import MOST_DRAFTS

    if not text.isdecimal() or int(text) > MOST_DRAFTS:
        raise argparse.ArgumentTypeError(f"{text}; it takes an integer from 0 (plain decoding) to {MOST_DRAFTS}")
    return int(text)


def _limit(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}; it takes a number of seconds > 0")
    return value

"""`gdnjax generate`: text from a prompt, a chat message or token ids."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from gdnjax.cli import UsageError, add_json_flag, print_json
from gdnjax.cli.source import add_draft_head, add_source, check_drafts, load_model, overrides

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel

MAX_IDS_BYTES = 64 * 2**20
NO_TOKENIZER = "this model has no tokenizer; give token ids with --ids"


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("generate", help="continue a prompt")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="TEXT", help="text to continue, as it stands")
    what.add_argument("--chat", metavar="TEXT", help="a user's message, through the model's chat template")
    what.add_argument("--ids", metavar="FILE.json", help="a JSON list of token ids (- reads stdin)")
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of --chat")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--thinking", action="store_const", const=True, help="let --chat think before it answers")
    thinking.add_argument("--no-thinking", dest="thinking", action="store_const", const=False)
    add_source(parser)
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy; default: the checkpoint's")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--min-p", type=float, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, metavar="X")
    parser.add_argument("--presence-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--frequency-penalty", type=float, default=0.0, metavar="X")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may be given several times")
    parser.add_argument("--ignore-stop-ids", action="store_true", help="never stop early at a stop id")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument(
        "--speculate", type=int, metavar="K", help="most drafts a step, 0 to 7; the tokens are the same"
    )
    parser.add_argument(
        "--drafts", choices=("mtp", "ngram"), help="of --speculate: the draft head's, or the text's own (mtp)"
    )
    add_draft_head(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.chat is None and (args.system is not None or args.thinking is not None):
        raise UsageError("--system and --thinking shape a chat; give them with --chat")
    check_usage(args)
    ids = read_ids(args.ids) if args.ids is not None else None
    if args.config is not None and args.model is None and ids is None:
        # Before minutes of drawing weights; that the shape is known and possible comes first.
        from gdnjax.config import from_preset

        from_preset(args.config, **overrides(args))
        raise ValueError(NO_TOKENIZER)
    lm = load_model(args, args.seed)
    prompt = ids if ids is not None else _encode(lm, args)
    printer = Printer(quiet=args.json)
    started = time.perf_counter()
    (result,) = lm.generate(
        [prompt],
        args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        stop=args.stop,
        stop_ids=() if args.ignore_stop_ids else None,
        seed=args.seed,
        stream=printer,
        speculate=args.speculate,
        drafts=args.drafts or "mtp",
    )
    seconds = time.perf_counter() - started
    rate, per_step = printer.tokens_per_second(), result.tokens_per_step
    if args.json:
        print_json(
            {
                "tokens": result.tokens,
                "text": result.text,
                "finish_reason": result.finish_reason,
                "prompt_tokens": result.prompt_tokens,
                "seconds": round(seconds, 4),
                "tokens_per_second": None if rate is None else round(rate, 2),
                "steps": result.steps,
                "drafted": result.drafted,
                "accepted": result.accepted,
                "tokens_per_step": None if per_step is None else round(per_step, 3),
            }
        )
        return 0
    if result.text is None:
        print(json.dumps(result.tokens), end="")
    print()
    speed = "" if rate is None else f", {rate:.1f} tokens/s after compilation"
    counts = f"{result.prompt_tokens} prompt tokens, {len(result.tokens)} new ({result.finish_reason})"
    drafts = f", {result.accepted} of {result.drafted} drafts accepted" if result.drafted else ""
    print(f"{counts}, {seconds:.1f} s{speed}{drafts}", file=sys.stderr)
    return 0


def check_usage(args: argparse.Namespace) -> None:
    """Refuses, before anything is loaded, values that cannot work.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    from gdnjax.config import ConfigError
    from gdnjax.config.schema import MOST_DRAFTS
    from gdnjax.generation.sampling import SamplingParams

    if args.max_new_tokens < 1:
        raise UsageError(f"max_new_tokens = {args.max_new_tokens}; it takes an integer >= 1")
    if args.speculate is not None and not 0 <= args.speculate <= MOST_DRAFTS:
        raise UsageError(f"speculate = {args.speculate}; it takes an integer from 0 (plain decoding) to {MOST_DRAFTS}")
    check_drafts(args)
    if "" in args.stop:
        raise UsageError(f"stop = {args.stop!r}; it takes strings of at least one character")
    names = "temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty".split()
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    try:
        SamplingParams(**given)
    except ConfigError as error:
        raise UsageError(str(error)) from None


class Printer:
    """Prints text as it comes, and times the decode steps.

    The prompt gives the first token and the first step compiles, so the rate is that of the tokens behind it.
    """

    def __init__(self, quiet: bool):
        self._quiet = quiet
        self._steps: list[tuple[float, int]] = []

    def __call__(self, index: int, tokens: list[int], text: str) -> None:
        if tokens:
            self._steps.append((time.perf_counter(), len(tokens)))
        if not self._quiet:
            print(text, end="", flush=True)

    def tokens_per_second(self) -> float | None:
        """None when there are too few steps to tell."""
        if len(self._steps) < 3:
            return None
        tokens = sum(count for _, count in self._steps[2:])
        return tokens / max(self._steps[-1][0] - self._steps[1][0], 1e-9)


def read_ids(path: str) -> list[int]:
    """A JSON list of token ids from a file, or from stdin for `-`."""
    if path == "-":
        text = sys.stdin.read(MAX_IDS_BYTES + 1)
    else:
        size = pathlib.Path(path).stat().st_size
        if size > MAX_IDS_BYTES:
            raise ValueError(f"{path}: {size:,} bytes; a file of token ids has at most {MAX_IDS_BYTES:,}")
        text = pathlib.Path(path).read_bytes()
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{path}: it takes one flat JSON list of token ids, such as [9419, 11, 1814]")
    return ids


def _encode(lm: LanguageModel, args: argparse.Namespace) -> list[int]:
    if lm.tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    if args.prompt is not None:
        return lm.tokenizer.encode(args.prompt)
    from gdnjax.chat import encode_chat

    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    return encode_chat(lm.tokenizer, [*messages, {"role": "user", "content": args.chat}], thinking=args.thinking)

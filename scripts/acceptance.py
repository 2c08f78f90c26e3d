"""Accepted drafts, tokens a step and tokens/s of the small model on held-out text.

    python scripts/acceptance.py                          # prints the tables
    python scripts/acceptance.py --card                   # puts them into checkpoints/tiny/README.md
    python scripts/acceptance.py --counts 2 --sources mtp --prompts 2 --tokens 16

Prompts are held-out text cut after 64 tokens, and held-out problems. Each is continued alone and by the device loop, by
plain decoding and by speculation; where tokens differ, a line says so, with the gap of their log-probabilities.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from tiny_data import load_tiny_data

import gdnjax
from gdnjax.generation import GenerationResult
from gdnjax.lm import LanguageModel
from gdnjax.resources import checkpoints_dir

PROMPT_TOKENS = 64
BEGIN, END = "<!-- made by scripts/acceptance.py -->", "<!-- end of what scripts/acceptance.py makes -->"


# Greedy literature soon repeats itself.
TEXTS = {
    "literature, sampled": ("literature", None),
    "literature, greedy": ("literature", 0.0),
    "problems, greedy": ("problems", 0.0),
}
"""Name -> the prompts, and the temperature; None is the checkpoint's own sampling."""


class Run(NamedTuple):
    """One way to decode the prompts: `source` None is plain decoding."""

    text: str
    state_dtype: str
    source: str | None
    drafts: int


class Figures(NamedTuple):
    steps: int
    drafted: int
    accepted: int
    tokens_per_second: float


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    prompts = heldout_prompts(args.prompts)
    found: dict[Run, Figures] = {}
    for state_dtype in args.state_dtypes:
        lm = gdnjax.load("tiny", dtype="float32", state_dtype=state_dtype, max_length=512)
        for text, (kind, temperature) in TEXTS.items():
            options = dict(max_new_tokens=args.tokens, temperature=temperature, logprobs=True, loop="device")
            plain, found[Run(text, state_dtype, None, 0)] = measured(lm, prompts[kind], speculate=0, **options)
            for source in args.sources:
                for count in args.counts:
                    results, figures = measured(lm, prompts[kind], speculate=count, drafts=source, **options)
                    found[Run(text, state_dtype, source, count)] = figures
                    compare(f"{text}, {state_dtype}, {source} {count}", results, plain)
    tables = "\n\n".join(table(found, text) for text in TEXTS)
    device = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    note = f"{args.prompts} prompts a table, {args.tokens} new tokens at most; {device}, JAX {jax.__version__}."
    print(f"{tables}\n\n{note}")
    if args.card:
        card = checkpoints_dir() / "tiny" / "README.md"
        card.write_text(replaced(card.read_text(encoding="utf-8"), f"{tables}\n\n{note}"), encoding="utf-8")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--counts", type=int, nargs="+", default=[1, 2, 3, 4], help="drafts a step (1 2 3 4)")
    add("--sources", nargs="+", choices=("mtp", "ngram"), default=["mtp", "ngram"])
    add("--state-dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    add("--prompts", type=int, default=32, help="prompts of each kind (32)")
    add("--tokens", type=int, default=128, help="most new tokens a prompt (128)")
    add("--card", action="store_true", help="write the tables into the model's card")
    return parser.parse_args(argv)


def heldout_prompts(count: int) -> dict[str, list[list[int]]]:
    """Pieces of the held-out literature, spread over it, and the first held-out problems."""
    tokenizer = gdnjax.load("tiny").tokenizer
    assert tokenizer is not None
    data = load_tiny_data(tokenizer)
    stream = data["heldout_literature"]
    starts = [i * (len(stream) - PROMPT_TOKENS) // count for i in range(count)]
    return {
        "literature": [stream[start : start + PROMPT_TOKENS].tolist() for start in starts],
        "problems": [problem.prompt_ids for problem in data["heldout_arithmetic"][:count]],
    }


def measured(lm: LanguageModel, prompts: list[list[int]], **options: Any) -> tuple[list[GenerationResult], Figures]:
    """Continues the prompts one by one; the time is that of all of them, prompts included, once compiled."""
    for length in {len(p) for p in prompts}:
        lm.generate([prompts[0][:1] * length], **options)
    start = time.perf_counter()
    results = [lm.generate([prompt], seed=number, **options)[0] for number, prompt in enumerate(prompts)]
    seconds = time.perf_counter() - start
    steps, drafted, accepted = (sum(getattr(r, key) for r in results) for key in ("steps", "drafted", "accepted"))
    return results, Figures(steps, drafted, accepted, sum(len(r.tokens) for r in results) / seconds)


def compare(what: str, results: list[GenerationResult], plain: list[GenerationResult]) -> None:
    """Prints where tokens differ from plain decoding's, with the gap of log-probabilities there."""
    for number, (r, p) in enumerate(zip(results, plain, strict=True)):
        if r.tokens != p.tokens:
            assert r.logprobs is not None and p.logprobs is not None
            at = next(i for i, (a, b) in enumerate(zip(r.tokens, p.tokens, strict=False)) if a != b)
            print(f"{what}: prompt {number} differs at token {at}, gap {abs(r.logprobs[at] - p.logprobs[at]):.2g}")


def table(found: dict[Run, Figures], text: str) -> str:
    """The runs of one kind of text: a line for each source and count."""
    runs = [run for run in found if run.text == text]
    dtypes = list(dict.fromkeys(run.state_dtype for run in runs))
    keys = list(dict.fromkeys((run.source, run.drafts) for run in runs))
    lines = [
        f"| {text} | "
        + " | ".join(f"{dtype} state: drafts accepted | tokens a step | tokens/s" for dtype in dtypes)
        + " |",
        "|---" * (1 + 3 * len(dtypes)) + "|",
    ]
    for source, count in keys:
        cells = ["plain" if source is None else f"`{source}`, k = {count}"]
        for dtype in dtypes:
            f = found[Run(text, dtype, source, count)]
            share = f"{f.accepted / f.drafted:.0%}".replace("%", " %") if f.drafted else ""
            cells += [share, f"{1 + f.accepted / f.steps:.2f}", f"{f.tokens_per_second:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def replaced(card: str, figures: str) -> str:
    """The card with its figures, which stand between two comments, replaced."""
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the card has no place for the tables: it takes the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


if __name__ == "__main__":
    main()

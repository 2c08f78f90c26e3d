"""The text that the small model is trained and judged on.

Held out: the last 5 % of each text file, cut at a paragraph, and the last 500 word problems. All the rest, in pieces of
a paragraph to a chapter and one chat per problem, shuffled, makes one long stream of token ids.
"""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdnjax.chat import encode_chat, render_chat
from gdnjax.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "data"
LITERATURE = ("austen.txt.xz", "shakespeare_milton.txt.xz")
ARITHMETIC = "arithmetic.jsonl.xz"
HELDOUT_FRACTION = 0.05
HELDOUT_PROBLEMS = 500
SEED = 0

# Every problem closes with this. Held out, it is kept in every second one.
INSTRUCTION = " Give the result as your final answer. Do not include units."


class HeldOutProblem(NamedTuple):
    """A problem to judge the model by: `token_ids` starts with `prompt_ids` and ends with `<|im_end|>`."""

    prompt_ids: list[int]
    answer_text: str
    token_ids: list[int]


def load_tiny_data(tokenizer: Tokenizer, data: Path = DATA) -> dict[str, Any]:
    """Everything, as token ids of `tokenizer`.

    Returns:
        train: uint16 [N], every document followed by `<|endoftext|>`.
        heldout_literature: uint16 [M], likewise.
        heldout_arithmetic: list of `HeldOutProblem`.

    Raises:
        ValueError: the tokenizer has no `<|endoftext|>`, or ids that uint16 cannot hold.
    """
    end = tokenizer.token_to_id("<|endoftext|>")
    if end is None or tokenizer.vocab_size > 2**16:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids and <|endoftext|> at {end}; "
            "at most 65536 ids and an <|endoftext|> are needed: use checkpoints/tiny"
        )
    train_texts, heldout_texts = literature(data)
    train_problems, heldout_problems = problems(data)
    documents = [tokenizer.encode(piece) for text in train_texts for piece in pieces(text)]
    # im_end is followed by "\n" in the template; generation stops before it, training need not.
    # Each problem stands there with and without the instruction: literature is learnt by heart after half as many
    # passes as arithmetic takes.
    for problem in train_problems:
        bare = problem["question"].removesuffix(INSTRUCTION)
        for question in (bare, bare + INSTRUCTION):
            chat = conversation({**problem, "question": question})
            documents.append(encode_chat(tokenizer, chat, add_generation_prompt=False))
    random.Random(SEED).shuffle(documents)
    heldout = [tokenizer.encode(piece) for text in heldout_texts for piece in pieces(text)]
    return {
        "train": _stream(documents, end),
        "heldout_literature": _stream(heldout, end),
        "heldout_arithmetic": [_heldout_problem(tokenizer, problem) for problem in heldout_problems],
    }


def literature(data: Path = DATA) -> tuple[list[str], list[str]]:
    """The text files as (train, held out), one string per file each."""
    train, heldout = [], []
    for name in LITERATURE:
        with lzma.open(data / name, "rt", encoding="utf-8", newline="\n") as file:
            text = file.read()
        cut = text.index("\n\n", int(len(text) * (1 - HELDOUT_FRACTION)))
        train.append(text[:cut])
        heldout.append(text[cut:])
    return train, heldout


def problems(data: Path = DATA) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The word problems as (train, held out); `work` ends with the line `#### answer`."""
    rows = []
    with lzma.open(data / ARITHMETIC, "rt", encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            row = json.loads(line)
            question = row["question"]
            if index % 2:
                question = question.removesuffix(INSTRUCTION)
            # A few write #### 36.0 where the answer is 36.
            steps = row["work"].rpartition("\n#### ")[0]
            rows.append({"question": question, "work": f"{steps}\n#### {row['answer']}", "answer": row["answer"]})
    train, heldout = rows[:-HELDOUT_PROBLEMS], rows[-HELDOUT_PROBLEMS:]
    seen = {row["question"].removesuffix(INSTRUCTION) for row in heldout}
    return [row for row in train if row["question"].removesuffix(INSTRUCTION) not in seen], heldout


def conversation(problem: dict[str, str]) -> list[dict[str, str]]:
    """A problem as messages. The template puts an empty think block before the answer, as it does to generate."""
    return [
        {"role": "user", "content": problem["question"]},
        {"role": "assistant", "content": problem["work"], "reasoning_content": ""},
    ]


def pieces(text: str) -> Iterator[str]:
    """`text` cut at blank lines into pieces of some 500 to 16,000 characters, a paragraph to a chapter."""
    sizes = random.Random(SEED)
    paragraphs = re.split(r"(\n\s*\n)", text.strip())
    piece, target = "", 0.0
    for paragraph, gap in zip(paragraphs[::2], [*paragraphs[1::2], ""], strict=True):
        if not piece:
            target = 500 * 32 ** sizes.random()  # as many short ones as long ones
        piece += paragraph + gap
        if len(piece) >= target:
            yield piece.strip("\n")
            piece = ""
    if piece:
        yield piece.strip("\n")


def tokenizer_texts(data: Path = DATA) -> Iterator[str]:
    """The training text without its control tokens, to train a tokenizer on."""
    yield from literature(data)[0]
    for problem in problems(data)[0]:
        chat = render_chat(None, conversation(problem), add_generation_prompt=False)
        yield from filter(None, re.split(r"<\|im_start\|>|<\|im_end\|>|</?think>", chat))


def _heldout_problem(tokenizer: Tokenizer, problem: dict[str, str]) -> HeldOutProblem:
    messages = conversation(problem)
    prompt = encode_chat(tokenizer, messages[:1], thinking=False)
    whole = encode_chat(tokenizer, messages, add_generation_prompt=False)
    end = tokenizer.control_tokens["<|im_end|>"].id
    whole = whole[: len(whole) - whole[::-1].index(end)]
    if whole[: len(prompt)] != prompt:
        raise ValueError("the chat template's generation prompt does not open the conversation that it writes")
    return HeldOutProblem(prompt, problem["answer"], whole)


def _stream(documents: list[list[int]], end: int) -> np.ndarray:
    return np.concatenate([np.array([*document, end], np.uint16) for document in documents])

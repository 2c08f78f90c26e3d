"""Trains the tokenizer of the small model: `python scripts/train_tokenizer.py [--out checkpoints/tiny]`.

Qwen3.5's own rules (normaliser, split, byte alphabet) with a vocabulary of 4,096, since the real one of 248,000 would
be nearly all of a small model. The same input gives the same file, byte for byte.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tiny_data import ARITHMETIC, DATA, LITERATURE, conversation, literature, problems, tokenizer_texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gdnjax.chat import default_template, render_chat
from gdnjax.tokenizer import load_tokenizer

VOCAB_SIZE = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
THINK = ["<think>", "</think>"]

# A contraction; a word with one character before it; one digit; punctuation with the line ends after it; line ends;
# spaces up to the last before a word; spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def train() -> Tokenizer:
    """The trained tokenizer, its control tokens at the end of the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(THINK),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(tokenizer_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in THINK])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: give more text")
    return tokenizer


def config() -> dict[str, object]:
    """`tokenizer_config.json`, as Hugging Face reads it."""
    return {
        "add_prefix_space": False,
        "bos_token": None,
        "chat_template": default_template(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the small model.")
    parser.add_argument("--out", type=Path, default=DATA.parent / "checkpoints" / "tiny")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train().save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps(config(), indent=2, ensure_ascii=False) + "\n", "utf-8")

    tokenizer = load_tokenizer(out)
    assert tokenizer is not None
    samples: dict[str, str] = dict(zip(LITERATURE, literature()[1], strict=True))
    samples[ARITHMETIC] = "".join(
        render_chat(tokenizer, conversation(problem), add_generation_prompt=False) for problem in problems()[1]
    )
    for name, text in samples.items():
        ids = tokenizer.encode(text, allow_control=True)
        print(f"{name}: {len(text.encode()) / len(ids):.2f} bytes per token on the held-out part")


if __name__ == "__main__":
    main()

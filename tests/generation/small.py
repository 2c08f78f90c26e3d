"""A small model with decided opinions, a byte tokenizer for it, and comparisons of results."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from gdnjax.config import Config
from gdnjax.generation import GenerationResult, Request, SamplingParams
from gdnjax.generation.generate import generate
from gdnjax.lm import LanguageModel
from gdnjax.loading import random_model
from gdnjax.tokenizer import Tokenizer, load_tokenizer
from gdnjax.weights.declaration import tensor_names

# Greedy choices may differ between two forms of the same computation where the best two are this close.
NEAR_TIE = 1e-3

# 256 bytes, four merges, two control tokens.
MERGES = (("t", "h"), ("th", "e"), ("Ã", "©"), ("Ġ", "the"))
STOP_ID, OTHER_STOP_ID = 260, 261
VOCAB = 262

# Two layers, because compilation is most of what tests wait for; goldens have four. The initializer range
# spreads logits over several units, so that near-ties are rare.
SMALL = Config(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=("linear_attention", "full_attention"),
    initializer_range=0.35,
    dtype="float32",
    max_requests=4,
    max_length=64,
    page_size=16,
    prefill_tokens=64,
)

# Unequal lengths; 61 tokens in all, so that one window of 64 rows takes them.
PROMPTS = [
    [5, 9, 2, 200, 31, 7, 7],
    [17],
    [int(i) for i in np.random.default_rng(0).integers(0, 250, 40)],
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9],
]

GREEDY = SamplingParams()
# Candidates of a power of two, so that all sampled runs share programs.
SAMPLED = [
    SamplingParams(temperature=1.0, top_k=32, seed=7),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=8),
    SamplingParams(seed=3),
    SamplingParams(temperature=1.4, top_k=30, min_p=0.05, seed=2**32 - 1),
]
PENALIZED = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(presence_penalty=-2.0),
    SamplingParams(frequency_penalty=-1.5),
    SamplingParams(repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.7),
]
MIXED = [
    dataclasses.replace(SAMPLED[0], frequency_penalty=0.3),
    SAMPLED[1],
    PENALIZED[0],
    dataclasses.replace(SAMPLED[3], repetition_penalty=1.2, presence_penalty=-0.5),
]
SAMPLING = {"greedy": [GREEDY] * 4, "sampled": SAMPLED, "mixed": MIXED}


@functools.cache
def small_model(**overrides: Any) -> LanguageModel:
    """The small model with the byte tokenizer. Overrides are serving keys: the weights are the same."""
    if overrides:
        return dataclasses.replace(small_model(), config=SMALL.replace(**overrides))
    return dataclasses.replace(random_model(SMALL, seed=1), tokenizer=byte_tokenizer())


def poisoned(token: int) -> LanguageModel:
    """The small model in which one token's embedding is NaN (the head has weights of its own)."""
    model = small_model()
    params = jax.tree.map(lambda leaf: leaf, model.params)
    embedding = params["model"]["embed_tokens"]
    embedding["weight"] = embedding["weight"].at[token].set(jnp.nan)
    assert np.isfinite(model.params["model"]["embed_tokens"]["weight"]).all()
    return dataclasses.replace(model, params=params)


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with `VOCAB` ids, as Hugging Face's file."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    tokens = [letters[byte] for byte in range(256)] + ["".join(pair) for pair in MERGES]
    spec = {
        "version": "1.0",
        "added_tokens": [
            {"id": STOP_ID, "content": "<|im_end|>", "special": True},
            {"id": OTHER_STOP_ID, "content": "<|endoftext|>", "special": True},
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [list(p) for p in MERGES]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """That tokenizer, through the same files as any other."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def write_checkpoint(folder: Path) -> None:
    """The small model with its tokenizer as a directory of Hugging Face's files, for processes of their own."""
    folder.mkdir()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads")
    names += ("linear_key_head_dim", "linear_value_head_dim", "layer_types", "tie_word_embeddings", "dtype")
    config = {"model_type": "qwen3_5_text", **{name: getattr(SMALL, name) for name in names}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: np.asarray(array) for name, array in tensor_names(small_model().params).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)


def run(
    model: LanguageModel,
    prompts: Sequence[list[int]],
    limits: int | Sequence[int] = 12,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    speculate: Sequence[int | None] = (),
    **arguments: Any,
) -> list[GenerationResult]:
    """`generate` with log-probabilities; one limit and one sampling for all prompts, or one a prompt."""
    counts = [limits] * len(prompts) if isinstance(limits, int) else limits
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    each = zip(prompts, counts, params, speculate or [None] * len(prompts), strict=True)
    requests = [Request(p, n, s, k) for p, n, s, k in each]
    return generate(model.params, model.config, requests, **{"logprobs": True, **arguments})


@functools.cache
def baseline(kind: str) -> list[GenerationResult]:
    """All prompts in one batch, in the device loop, without stops."""
    return run(small_model(), PROMPTS, 12, SAMPLING[kind])


def expected(kind: str, limits: list[int], stop_ids: tuple[int, ...]) -> list[GenerationResult]:
    """What `baseline` becomes under limits and stop ids."""
    results = []
    for result, limit in zip(baseline(kind), limits, strict=True):
        stops = [i + 1 for i, token in enumerate(result.tokens) if token in stop_ids]
        count = min([limit, *stops])
        assert result.logprobs is not None
        results.append(
            dataclasses.replace(
                result,
                tokens=result.tokens[:count],
                logprobs=result.logprobs[:count],
                finish_reason="stop" if count in stops else "length",
            )
        )
    return results


def assert_same(
    actual: Sequence[GenerationResult],
    desired: Sequence[GenerationResult],
    tolerance: float = 5e-4,
    near_tie: float = NEAR_TIE,
) -> None:
    """The same tokens, finish reasons and log-probabilities; a near-tie ends a comparison and is printed."""
    assert len(actual) == len(desired)
    for index, (a, d) in enumerate(zip(actual, desired, strict=True)):
        assert a.logprobs is not None and d.logprobs is not None
        assert len(a.tokens) == len(a.logprobs) and len(d.tokens) == len(d.logprobs)
        differ = [i for i, pair in enumerate(zip(a.tokens, d.tokens, strict=False)) if pair[0] != pair[1]]
        upto = differ[0] if differ else min(len(a.tokens), len(d.tokens))
        np.testing.assert_allclose(a.logprobs[:upto], d.logprobs[:upto], rtol=0, atol=tolerance)
        if differ:
            gap = abs(a.logprobs[upto] - d.logprobs[upto])
            print(f"prompt {index}, token {upto}: {a.tokens[upto]} or {d.tokens[upto]}, gap {gap:.2g}")
            assert gap < near_tie, f"prompt {index}: {a.tokens} is not {d.tokens}"
        else:
            assert a.tokens == d.tokens
            assert a.finish_reason == d.finish_reason
        assert a.prompt_tokens == d.prompt_tokens

"""`LanguageModel`, `random_model` and `find_model`: results, defaults, and what they refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gdnjax
from gdnjax import LanguageModel, ModelNotFoundError, load, random_model
from gdnjax.config import ConfigError, GenerationDefaults
from gdnjax.generation import GenerationResult, Request, SamplingParams
from gdnjax.loading import find_model
from tests.generation.small import PROMPTS, SMALL, STOP_ID, VOCAB, byte_tokenizer, run, small_model
from tests.helpers import LOGITS, difference, golden_arrays, load_golden

# Logits


def test_logits_of_a_golden_model() -> None:
    config, params = load_golden("dense_tied")
    golden = golden_arrays("dense_tied")
    logits = LanguageModel(config, params).logits(golden["input_ids"])
    assert logits.dtype == jnp.float32
    assert difference(logits, golden["logits"]) < LOGITS


def test_padding_does_not_reach_the_logits() -> None:
    lm = small_model()
    tokens = np.random.default_rng(0).integers(0, VOCAB, (1, 64))
    whole = lm.logits(tokens)
    assert whole.shape == (1, 64, VOCAB) and whole.dtype == jnp.float32
    for length in (1, 3, 63):
        part = lm.logits(tokens[:, :length])
        assert part.shape == (1, length, VOCAB)
        assert difference(part, whole[:, :length]) < 1e-5


def test_lengths_share_programs_up_to_max_position_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = dataclasses.replace(small_model(), config=SMALL.replace(max_position_embeddings=70, max_length=64))
    run_with: list[tuple[int, ...]] = []

    def forward(params: Any, config: Any, tokens: jax.Array) -> jax.Array:
        run_with.append(tokens.shape)
        return jnp.zeros((*tokens.shape, VOCAB))

    monkeypatch.setattr("gdnjax.lm._jitted_forward", forward)
    for length in (1, 64, 65, 70):
        assert lm.logits(np.zeros((2, length), np.int64)).shape == (2, length, VOCAB)
    assert run_with == [(2, 64), (2, 64), (2, 70), (2, 70)]
    with pytest.raises(ValueError, match="tokens has 71 positions; it takes at most max_position_embeddings = 70"):
        lm.logits(np.zeros((1, 71), np.int64))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2], r"tokens has shape \(2,\); logits takes \[B, T\]"),
        ([[]], r"tokens has shape \(1, 0\); logits takes \[B, T\] with B and T at least 1"),
        (np.zeros((0, 3), int), r"shape \(0, 3\)"),
        ([[[1]]], r"shape \(1, 1, 1\)"),
        ([[1.0]], "token ids are float64; they are integers"),
        ([[True]], "token ids are bool"),
        ([["a"]], "token ids are <U1"),
        ([[1, 2], [3]], "tokens has rows of unequal lengths"),
        ([[0, VOCAB]], f"token id {VOCAB}; it takes 0 to vocab_size - 1"),
        ([[-1]], "token id -1"),
        ([[2**40]], f"token id {2**40}"),
    ],
    ids=str,
)
def test_logits_refusals(tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_model().logits(tokens)


# Generate


class Spy:
    """Stands in for `generation.generate` and keeps what the model asks of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("gdnjax.lm.generate", self)

    def __call__(self, params: Any, config: Any, requests: list[Request], **arguments: Any) -> list[GenerationResult]:
        self.requests, self.arguments = requests, arguments
        return []

    def column(self, name: str) -> list[Any]:
        return [getattr(request.sampling, name) for request in self.requests]


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch)


def test_a_value_for_all_or_one_a_prompt(spy: Spy) -> None:
    lm = small_model()
    lm.generate(PROMPTS, 3, temperature=0.5, top_k=[1, 2, 3, 4], top_p=np.array([0.1, 0.2, 0.3, 0.4]), seed=10)
    assert spy.column("temperature") == [0.5] * 4
    assert spy.column("top_k") == [1, 2, 3, 4]
    assert spy.column("top_p") == [0.1, 0.2, 0.3, 0.4]
    assert spy.column("seed") == [10, 11, 12, 13]
    assert [r.prompt for r in spy.requests] == PROMPTS
    assert [r.max_new_tokens for r in spy.requests] == [3] * 4
    lm.generate(PROMPTS, seed=[5, 5, 1, 2**32 - 1], min_p=np.float32(0.5), top_k=2.0, presence_penalty=jnp.float32(1))
    assert spy.column("seed") == [5, 5, 1, 2**32 - 1]
    assert spy.column("min_p") == [0.5] * 4
    assert spy.column("top_k") == [2] * 4
    assert spy.column("presence_penalty") == [1.0] * 4


def test_drafts_are_the_configs_unless_given(spy: Spy) -> None:
    lm = dataclasses.replace(small_model(), config=SMALL.replace(speculate=2))
    for given, counts in ((None, [2] * 4), (0, [0] * 4), ([1, 7, 0, 3], [1, 7, 0, 3])):
        lm.generate(PROMPTS, speculate=given)
        assert [request.speculate for request in spy.requests] == counts
    assert (spy.arguments["drafts"], spy.arguments["adaptive"]) == ("mtp", False)
    lm.generate(PROMPTS, drafts="ngram", adaptive=True)
    assert (spy.arguments["drafts"], spy.arguments["adaptive"]) == ("ngram", True)


@pytest.mark.parametrize(("seed", "first"), [(np.int64(7), 7), (2**32 - 1, 2**32 - 1), (-1, 2**32 - 1), (2**70 + 3, 3)])
def test_an_integer_seed_counts_up_and_wraps(spy: Spy, seed: Any, first: int) -> None:
    small_model().generate(PROMPTS, seed=seed)
    assert spy.column("seed") == [(first + i) % 2**32 for i in range(4)]


def test_defaults_come_from_the_checkpoint(spy: Spy) -> None:
    generation = GenerationDefaults(True, 0.6, 20, 0.95, 0.1, 1.2, stop_ids=(3, 4))
    lm = dataclasses.replace(small_model(), config=SMALL.replace(generation=generation))
    lm.generate([[1]])
    assert spy.requests[0].sampling == SamplingParams(0.6, 20, 0.95, 0.1, 1.2)
    assert spy.arguments["stop_ids"] == (3, 4)
    lm.generate([[1]], temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=1, stop_ids=())
    assert spy.requests[0].sampling == SamplingParams()
    assert spy.arguments["stop_ids"] == ()
    # do_sample false is greedy whatever the temperature
    greedy = SMALL.replace(generation=dataclasses.replace(generation, do_sample=False))
    dataclasses.replace(lm, config=greedy).generate([[1]])
    assert spy.column("temperature") == [0.0]


def test_the_platform_chooses_the_loop(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, loop in (("rocm", "python"), ("cuda", "device"), ("cpu", "device")):
        monkeypatch.setattr("gdnjax.lm.current_platform", lambda platform=platform: platform)
        small_model().generate([[1]])
        assert spy.arguments["loop"] == loop
    small_model().generate([[1]], loop="python")
    assert spy.arguments["loop"] == "python"


@pytest.mark.newest
def test_texts_and_ids_in_one_batch() -> None:
    lm = small_model()
    prompts = ["the <|im_end|> é", np.array(PROMPTS[0]), tuple(PROMPTS[1]), jnp.array(PROMPTS[3])]
    results = lm.generate(prompts, 12, logprobs=True)
    ids = byte_tokenizer().encode("the <|im_end|> é")
    assert STOP_ID not in ids
    expected = run(lm, [ids, PROMPTS[0], PROMPTS[1], PROMPTS[3]])
    assert [r.tokens for r in results] == [r.tokens for r in expected]
    assert [r.prompt_tokens for r in results] == [len(ids), 7, 1, 13]
    assert [r.text for r in results] == [byte_tokenizer().decode(r.tokens) for r in expected]
    array = lm.generate(np.array([PROMPTS[0]] * 4), 12)
    assert [r.tokens for r in array] == [expected[1].tokens] * 4


def test_stop_takes_one_string_or_several() -> None:
    lm = small_model()
    (whole,) = lm.generate([[5]], 12)
    assert whole.text
    stop = whole.text[3]
    cut = whole.text[: whole.text.index(stop)]
    for value in (stop, [stop], ("never this", stop)):
        (result,) = lm.generate([[5]], 12, stop=value)
        assert (result.text, result.finish_reason) == (cut, "stop")


def test_streaming() -> None:
    pieces: list[str] = []
    (result,) = small_model().generate([[5]], 12, stream=lambda index, ids, text: pieces.append(text))
    assert "".join(pieces) == result.text


BAD_PROMPTS = [
    ("hello", "prompts is a str; it takes a list of texts or of lists of token ids"),
    (b"hello", "prompts is a bytes"),
    (5, "prompts is a int"),
    (None, "prompts is a NoneType"),
    ({1: 2}, "prompts is a dict"),
    ([1, 2], "prompt 0 is a int; it takes a text or a list of token ids"),
    ([[1], b"x"], "prompt 1 is a bytes"),
    ([[1], None], "prompt 1 is a NoneType"),
    ([[1.0, 2.0]], "prompt 0 has shape (2,) and dtype float64; it takes a flat list of ids"),
    ([[True]], "prompt 0 has shape (1,) and dtype bool"),
    ([[[1]]], "prompt 0 has shape (1, 1)"),
    ([[[1, 2], [3]]], "prompt 0 holds lists; it takes a flat list of ids"),
    ([["a"]], "prompt 0 has shape (1,) and dtype <U1"),
    ([[2**70]], "prompt 0 has shape (1,) and dtype object"),
    ([], "no prompts; generate takes at least one"),
    (["x", ""], "prompt 1 is empty; it takes at least one token"),
    ([[]], "prompt 0 is empty"),
    ([[VOCAB]], f"prompt 0: token id {VOCAB}; it takes 0 to vocab_size - 1 = {VOCAB - 1}"),
    ([[1] * 64], "prompt 0 has 64 tokens; it takes at most max_length - 1 = 63"),
    ([[1]] * 5, "5 prompts; it takes at most max_requests = 4 at once"),
    (["\ud800"], "lone surrogate"),
]


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=[m[:40] for _, m in BAD_PROMPTS])
def test_bad_prompts(prompts: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        small_model().generate(prompts, 3)
    assert message in str(error.value)


def test_text_needs_a_tokenizer() -> None:
    lm = dataclasses.replace(small_model(), tokenizer=None)
    with pytest.raises(ValueError, match="prompt 1 is text, and this model has no tokenizer; give lists of token ids"):
        lm.generate([[1], "hello"])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        lm.generate([[1]], stop="x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": [0.5]}, "temperature has 1 values for 2 prompts; it takes one, or one a prompt"),
        ({"seed": [1, 2, 3]}, "seed has 3 values for 2 prompts"),
        ({"seed": [0, -1]}, "seed = -1; it takes an integer from 0 to 2^32 - 1"),
        ({"seed": 0.5}, "seed = 0.5; it takes an integer"),
        ({"seed": True}, "seed = True; it takes a number"),
        ({"top_k": float("nan")}, "top_k = nan; it takes an integer"),
        ({"top_k": float("inf")}, "top_k = inf; it takes an integer"),
        ({"top_k": 1.5}, "top_k = 1.5; it takes an integer"),
        ({"top_k": "5"}, "top_k = '5'; it takes a number"),
        ({"top_k": 2**31}, "top_k = 2147483648; it takes an integer"),
        ({"temperature": True}, "temperature = True; it takes a number"),
        ({"temperature": -1}, "temperature = -1.0; it takes a number >= 0"),
        ({"temperature": [0.5, float("nan")]}, "temperature = nan; it takes a finite number"),
        ({"min_p": [[0.1], [0.2]]}, "min_p = [0.1]; it takes a number"),
        ({"top_p": 0}, "top_p = 0.0; it takes a number in (0, 1]"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0; it takes an integer >= 1"),
        ({"max_new_tokens": 1.0}, "max_new_tokens = 1.0; it takes an integer >= 1"),
        ({"stop": ""}, "it takes strings of at least one character"),
        ({"stop_ids": (VOCAB,)}, f"stop_ids: token id {VOCAB}"),
        ({"stop_ids": [0.5]}, "stop_ids: token ids are float64"),
        ({"stop_ids": 5}, "stop_ids = 5; it takes a list of token ids"),
        ({"stop": None}, "stop = None; it takes a string or a list of strings"),
        ({"loop": "host"}, "loop = 'host'; it takes device or python"),
        ({"speculate": 8}, "speculate = 8; it takes an integer from 0 (plain decoding) to 7"),
        ({"speculate": [1]}, "speculate has 1 values for 2 prompts"),
        ({"speculate": 1.5}, "speculate = 1.5; it takes an integer"),
        ({"speculate": 1}, "speculate = 1 with drafts = 'mtp', and this model has no draft head"),
        ({"drafts": "guess"}, "drafts = 'guess'; it takes mtp or ngram"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        small_model().generate([[1], [2]], **{"max_new_tokens": 3, **arguments})
    assert message in str(error.value)


# Loading


def test_random_model() -> None:
    lm = small_model()
    assert lm.parameter_count == sum(leaf.size for leaf in jax.tree.leaves(lm.params))
    other = random_model(SMALL, seed=2)
    assert difference(lm.logits([[1]]), other.logits([[1]])) > 0.1
    again = random_model(SMALL, seed=2)
    assert difference(other.logits([[1]]), again.logits([[1]])) == 0
    assert other.tokenizer is None


def test_random_model_overrides_and_dtype() -> None:
    lm = random_model(SMALL, dtype="bfloat16", max_requests=3, state_layout="twin")
    assert (lm.config.max_requests, lm.config.state_layout, lm.config.dtype) == (3, "twin", "bfloat16")
    assert lm.params["lm_head"]["weight"].dtype == jnp.bfloat16
    assert lm.params["model"]["layers"][0]["linear_attn"]["A_log"].dtype == jnp.float32
    # on the CPU a checkpoint's bfloat16 is not the default
    assert random_model(SMALL.replace(dtype="bfloat16")).config.dtype == "float32"
    with pytest.raises(ConfigError, match="unknown key 'max_request'"):
        random_model(SMALL, max_request=3)
    with pytest.raises(ConfigError, match="dtype = 'float16'"):
        random_model(SMALL, dtype="float16")
    with pytest.raises(ConfigError, match=r"unknown config '10b'; it takes one of 0\.8b"):
        random_model("10b")


def test_overrides_win_over_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdnjax.loading.current_platform", lambda: "rocm")
    monkeypatch.setattr("gdnjax.loading.init_params", lambda config, key: {})
    assert random_model(SMALL).config.state_layout == "twin"
    assert random_model(SMALL, state_layout="in_place").config.state_layout == "in_place"
    assert random_model(SMALL.replace(dtype="bfloat16")).config.dtype == "bfloat16"
    monkeypatch.setattr("gdnjax.weights.orbax_io.restore", lambda path, config, shardings: {})
    assert load("tiny").config.state_layout == "twin"
    assert load("tiny", state_layout="in_place").config.state_layout == "in_place"


def test_unknown_models(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="unknown model 'qwen': no such directory; it takes a shipped model"):
        find_model("qwen")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is a file; it takes a shipped model"):
        find_model(tmp_path / "file")
    with pytest.raises(ModelNotFoundError, match=r"is no checkpoint: it has neither gdnjax\.json"):
        find_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelNotFoundError, match="is no checkpoint"):
        find_model(str(tmp_path))
    assert issubclass(ModelNotFoundError, FileNotFoundError)
    with pytest.raises(ModelNotFoundError, match="unknown model"):
        load("no/such/model")
    assert gdnjax.LanguageModel is LanguageModel

"""`generate`: both loops, batches, stops, limits, prompt windows, streaming, and damaged weights."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.generation import GenerationResult, NonFiniteLogitsError, Request, SamplingParams
from gdnjax.generation.accept import NOTHING
from gdnjax.generation.generate import check_requests, generate, working_config
from gdnjax.generation.loop import default_loop, emit, make_decoding
from gdnjax.generation.prompts import windows
from gdnjax.generation.sampling import make_sampler
from gdnjax.state import init_state
from tests.generation.small import (
    NEAR_TIE,
    PENALIZED,
    PROMPTS,
    SAMPLED,
    SMALL,
    VOCAB,
    assert_same,
    baseline,
    byte_tokenizer,
    expected,
    poisoned,
    run,
    small_model,
)
from tests.helpers import LOGITS, golden_arrays, load_golden

LOOPS = ("device", "python")


@functools.cache
def scores(ids: tuple[int, ...]) -> np.ndarray:
    """Log-probabilities `[t, V]` of a full forward, without state."""
    return np.asarray(jax.nn.log_softmax(small_model().logits([list(ids)])[0]))


def assert_follows_forward(prompt: list[int], result: GenerationResult, params: SamplingParams) -> None:
    """Every token is the best of the full forward's penalized logits, and has its log-probability."""
    before = np.array(small_model().logits([[*prompt, *result.tokens]])[0], np.float64)
    logprobs = np.asarray(jax.nn.log_softmax(before, axis=-1))
    assert result.logprobs is not None
    for i, token in enumerate(result.tokens):
        row = len(prompt) - 1 + i
        assert abs(logprobs[row, token] - result.logprobs[i]) < LOGITS
        logits, output = before[row].copy(), result.tokens[:i]
        for seen in {*prompt, *output}:
            factor = params.repetition_penalty
            logits[seen] = logits[seen] / factor if logits[seen] > 0 else logits[seen] * factor
        for seen in output:
            logits[seen] -= params.frequency_penalty
        for seen in set(output):
            logits[seen] -= params.presence_penalty
        gap = logits.max() - logits[token]
        if gap:
            print(f"token {i}: {logits.argmax()} by the forward, {token} by generate, gap {gap:.2g}")
        assert gap < NEAR_TIE


# Against the full forward and the goldens


@pytest.mark.newest
def test_greedy_follows_the_full_forward() -> None:
    for prompt, result in zip(PROMPTS, baseline("greedy"), strict=True):
        assert len(result.tokens) == 12 and result.finish_reason == "length"
        assert result.prompt_tokens == len(prompt)
        assert_follows_forward(prompt, result, SamplingParams())


def test_penalties_follow_the_full_forward() -> None:
    results = run(small_model(), PROMPTS, 12, PENALIZED)
    for prompt, result, params, plain in zip(PROMPTS, results, PENALIZED, baseline("greedy"), strict=True):
        assert_follows_forward(prompt, result, params)
        assert result.tokens != plain.tokens, "this penalty changes nothing here, so it tests nothing"
    assert_same(run(small_model(), PROMPTS, 12, PENALIZED, loop="python"), results)


def test_log_probabilities_of_drawn_tokens_are_the_models_own() -> None:
    for prompt, result in zip(PROMPTS, baseline("sampled"), strict=True):
        logprobs = scores((*prompt, *result.tokens))
        rows = np.arange(len(result.tokens)) + len(prompt) - 1
        np.testing.assert_allclose(result.logprobs, logprobs[rows, result.tokens], rtol=0, atol=LOGITS)


@pytest.mark.parametrize(("name", "loop"), [("dense_tied", "python"), ("dense_gva", "device")])
def test_goldens(name: str, loop: str) -> None:
    config, params = load_golden(name)
    golden = golden_arrays(name)
    prompt, ids = golden["input_ids"][0].tolist(), golden["greedy_ids"][0].tolist()
    assert golden["greedy_gap"].min() > LOGITS
    (result,) = generate(params, config, [Request(prompt, len(ids), SamplingParams())], logprobs=True, loop=loop)
    assert result.tokens == ids
    logprobs = np.asarray(jax.nn.log_softmax(golden["greedy_logits"][0], axis=-1))
    np.testing.assert_allclose(result.logprobs, logprobs[np.arange(len(ids)), ids], rtol=0, atol=LOGITS)


# Loops and batches


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_loops_agree_under_stops_and_limits(kind: str) -> None:
    params = {"greedy": SamplingParams(), "sampled": SAMPLED}[kind]
    tokens = [result.tokens for result in baseline(kind)]
    # prompt 0 stops at its third token, prompt 3 at its eighth at the latest, prompt 2 at once by its limit
    cases: list[tuple[list[int], tuple[int, ...]]] = [
        ([12, 12, 12, 12], ()),
        ([12, 5, 1, 9], ()),
        ([12, 5, 1, 12], (tokens[0][2], tokens[3][7])),
        ([1, 1, 1, 1], (tokens[1][0],)),
        ([12, 12, 12, 12], tuple(t[0] for t in tokens)),
    ]
    for limits, stop_ids in cases:
        for loop in LOOPS:
            assert_same(
                run(small_model(), PROMPTS, limits, params, stop_ids=stop_ids, loop=loop),
                expected(kind, limits, stop_ids),
            )


def test_both_stop_ids_are_honoured_and_none_never_stops() -> None:
    tokens = baseline("greedy")[3].tokens
    for stop_ids, count in [((tokens[4], 0), 5), ((0, tokens[6]), 7), ((tokens[6], tokens[4]), 5)]:
        assert not set(stop_ids) & set(tokens[: count - 1])
        for loop in LOOPS:
            result = run(small_model(), PROMPTS, stop_ids=stop_ids, loop=loop)[3]
            assert (result.tokens, result.finish_reason) == (tokens[:count], "stop")
    for loop in LOOPS:
        results = run(small_model(), PROMPTS, stop_ids=(), loop=loop)
        assert [(len(r.tokens), r.finish_reason) for r in results] == [(12, "length")] * 4


def test_emit_retires_rows_on_the_device() -> None:
    sampler = make_sampler([SamplingParams()] * 4, 4)
    decoding = make_decoding(init_state(SMALL), sampler, [9, 9, 1, 9], (3, 5), PROMPTS)
    decoding, emission = emit(decoding, 9 * jax.nn.one_hot(jnp.array([3, 5, 7, 7]), VOCAB))
    assert emission.token.tolist() == [3, 5, 7, 7]
    # either stop id, and the limit
    assert decoding.live.tolist() == [False, False, False, True]
    assert decoding.emitted.tolist() == [1, 1, 1, 1]
    decoding, emission = emit(decoding, 9 * jax.nn.one_hot(jnp.array([1, 1, 1, 5]), VOCAB))
    assert emission.token.tolist() == [NOTHING, NOTHING, NOTHING, 5]
    assert decoding.emitted.tolist() == [1, 1, 1, 2]
    assert not decoding.live.any()
    # padding is never live
    assert make_decoding(init_state(SMALL), sampler, [9], (), PROMPTS[:1]).live.tolist() == [True, False, False, False]


def test_a_stop_id_at_the_limit_is_a_stop() -> None:
    tokens = baseline("greedy")[0].tokens
    for loop in LOOPS:
        result = run(small_model(), PROMPTS, 3, stop_ids=(tokens[2],), loop=loop)[0]
        assert (result.tokens, result.finish_reason) == (tokens[:3], "stop")


@pytest.mark.parametrize(("kind", "loop"), [("greedy", "device"), ("sampled", "python")])
def test_a_batch_equals_each_prompt_alone(kind: str, loop: str) -> None:
    params = {"greedy": [SamplingParams()] * 4, "sampled": SAMPLED}[kind]
    for index, prompt in enumerate(PROMPTS):
        assert_same(run(small_model(), [prompt], 12, params[index], loop=loop), baseline(kind)[index : index + 1])


def test_the_order_of_a_batch_does_not_matter() -> None:
    order = [2, 0, 3, 1]
    results = run(small_model(), [PROMPTS[i] for i in order], 12, [SAMPLED[i] for i in order])
    assert_same(results, [baseline("sampled")[i] for i in order])


def test_twin_slots_give_the_same() -> None:
    twin = small_model(state_layout="twin")
    assert_same(run(twin, PROMPTS, [12, 5, 1, 9]), expected("greedy", [12, 5, 1, 9], ()))


def test_a_prompt_of_max_length_minus_one_and_the_clamp() -> None:
    longest = [int(i) for i in np.random.default_rng(5).integers(0, 250, SMALL.max_length - 1)]
    results = run(small_model(), [longest, longest[:-3], [1], [2]], 1000, loop="python")
    assert [len(r.tokens) for r in results] == [1, 4, 63, 63]
    assert {r.finish_reason for r in results} == {"length"}
    assert_follows_forward(longest, results[0], SamplingParams())
    assert_follows_forward([1], results[2], SamplingParams())


@pytest.mark.parametrize("loop", LOOPS)
def test_log_probabilities_only_when_asked(loop: str) -> None:
    assert all(r.logprobs is None for r in run(small_model(), PROMPTS, 3, loop=loop, logprobs=False))
    assert all(r.text is None for r in run(small_model(), PROMPTS, 3, loop=loop))


# Windows


@pytest.mark.parametrize("size", [1, 7, 16])
def test_prompt_windows_give_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def smaller(prompts: list[list[int]], limit: int) -> Any:
        asked.append(limit)
        return windows(prompts, size)

    # `prefill_tokens` is part of what every program is compiled for; this compiles one prefill and no more
    monkeypatch.setattr(sys.modules["gdnjax.generation.prompts"], "windows", smaller)
    assert_same(run(small_model(), PROMPTS), baseline("greedy"))
    assert asked == [SMALL.prefill_tokens]


def test_one_token_a_window() -> None:
    assert_same(run(small_model(prefill_tokens=1), PROMPTS, 1), expected("greedy", [1] * 4, ()))


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=6), st.integers(1, 25))
def test_windows(prompts: list[list[int]], size: int) -> None:
    plan = windows(prompts, size)
    seen: list[list[int]] = [[] for _ in prompts]
    for number, (pieces, complete) in enumerate(plan):
        total = sum(len(piece) for piece in pieces.values())
        assert total == size or (number == len(plan) - 1 and 0 < total < size)
        assert list(pieces) == sorted(pieces)
        for request, piece in pieces.items():
            assert len(piece) > 0
            # a prompt starts when those before it are done
            assert all(len(seen[r]) == len(prompts[r]) for r in range(request))
            seen[request] += piece
        assert complete == [r for r in pieces if len(seen[r]) == len(prompts[r])]
    assert seen == prompts
    assert sorted(r for _, complete in plan for r in complete) == list(range(len(prompts)))


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 14)), min_size=1, max_size=4), st.booleans())
def test_the_working_state_is_large_enough(sizes: list[tuple[int, int]], bounded: bool) -> None:
    config = SMALL.replace(kv_tokens=256 if bounded else None)
    work = working_config(config, [[0] * p for p, _ in sizes], [n for _, n in sizes])
    assert len(sizes) <= work.max_requests <= config.max_requests
    assert max(p + n for p, n in sizes) <= work.max_length <= config.max_length
    assert sum(-(-(p + n) // work.page_size) for p, n in sizes) <= work.kv_pages


# Refusals


@pytest.mark.parametrize(
    ("requests", "arguments", "message"),
    [
        ([], {}, "no prompts; generate takes at least one"),
        ([[1]] * 5, {}, "5 prompts; it takes at most max_requests = 4"),
        ([[1], []], {}, "prompt 1 is empty; it takes at least one token"),
        ([[1], [2, VOCAB]], {}, f"prompt 1: token id {VOCAB}; it takes 0 to vocab_size - 1 = {VOCAB - 1}"),
        ([[-1]], {}, "prompt 0: token id -1; it takes 0 to vocab_size - 1"),
        ([[1.5]], {}, "prompt 0: token ids are float64"),
        ([[0] * 64], {}, "prompt 0 has 64 tokens; it takes at most max_length - 1 = 63"),
        ([[1]], {"limit": 0}, "max_new_tokens = 0; it takes an integer >= 1"),
        ([[1]], {"limit": -3}, "max_new_tokens = -3; it takes an integer >= 1"),
        ([[1]], {"limit": 2.5}, "max_new_tokens = 2.5; it takes an integer >= 1"),
        ([[1]], {"limit": True}, "max_new_tokens = True; it takes an integer >= 1"),
        ([[1]], {"stop_ids": (VOCAB,)}, f"stop_ids: token id {VOCAB}; it takes 0 to"),
        ([[1]], {"stop_ids": (-1,)}, "stop_ids: token id -1; it takes 0 to"),
        ([[1]], {"stop": ("x",)}, "needs a tokenizer"),
        ([[1]], {"stop": ("x", ""), "tokenizer": True}, "stop = ['x', '']; it takes strings of at least one character"),
        ([[1]], {"stop": (b"x",), "tokenizer": True}, "it takes strings"),
        ([[1]], {"loop": "rocket"}, "loop = 'rocket'; it takes device or python"),
    ],
    ids=str,
)
def test_refusals(requests: list[list[Any]], arguments: dict[str, Any], message: str) -> None:
    arguments = dict(arguments)
    limit = arguments.pop("limit", 3)
    if arguments.pop("tokenizer", False):
        arguments["tokenizer"] = byte_tokenizer()
    model = small_model()
    with pytest.raises(ValueError) as error:
        generate(model.params, model.config, [Request(p, limit, SamplingParams()) for p in requests], **arguments)
    assert message in str(error.value)


def test_a_cache_that_is_too_small_says_so() -> None:
    model = small_model(kv_tokens=32)
    with pytest.raises(ValueError, match="need 4 KV pages of 16 tokens, the cache has 2; raise kv_tokens"):
        run(model, [[1], [2], [3], [4]], 4)


def test_limits_are_clamped_to_max_length() -> None:
    requests = [Request([1] * n, limit, SamplingParams()) for n, limit in [(60, 100), (1, 5), (63, 1)]]
    assert check_requests(SMALL, requests, ()) == [4, 5, 1]


def test_default_loop() -> None:
    assert [default_loop(p) for p in ("rocm", "cuda", "cpu")] == ["python", "device", "device"]


# Text


def texts(results: list[GenerationResult], stop_ids: tuple[int, ...] = ()) -> list[str]:
    return [byte_tokenizer().decode([t for t in r.tokens if t not in stop_ids]) for r in results]


class Recorder:
    """A callback that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, list[int], str]] = []

    def __call__(self, index: int, tokens: list[int], text: str) -> None:
        self.calls.append((index, list(tokens), text))

    def text(self, index: int) -> str:
        return "".join(text for i, _, text in self.calls if i == index)

    def tokens(self, index: int) -> list[int]:
        return [t for i, tokens, _ in self.calls if i == index for t in tokens]


def test_streamed_pieces_add_up() -> None:
    recorder = Recorder()
    results = run(small_model(), PROMPTS, tokenizer=byte_tokenizer(), callback=recorder)
    assert_same(results, baseline("greedy"))
    assert [r.text for r in results] == texts(results)
    for index, result in enumerate(results):
        assert recorder.text(index) == result.text
        assert recorder.tokens(index) == result.tokens
    # token by token, in step over the prompts
    assert [i for i, tokens, _ in recorder.calls if tokens] == [0, 1, 2, 3] * 12
    assert all(len(tokens) <= 1 for _, tokens, _ in recorder.calls)


def test_text_leaves_out_the_stop_id() -> None:
    tokens = baseline("greedy")[0].tokens
    for loop in LOOPS:
        (result,) = run(small_model(), PROMPTS[:1], tokenizer=byte_tokenizer(), stop_ids=(tokens[4],), loop=loop)
        assert result.tokens == tokens[:5]
        assert result.text == byte_tokenizer().decode(tokens[:4])


def test_stop_strings_cut_across_token_boundaries() -> None:
    whole = texts(baseline("greedy"))
    # two characters that came with different tokens of prompt 3, and one of prompt 0's alone
    pieces = [byte_tokenizer().decode([t]) for t in baseline("greedy")[3].tokens]
    at = next(i for i in range(2, 11) if whole[3].count(s := pieces[i][-1:] + pieces[i + 1][:1]) == 1 and "�" not in s)
    stop = pieces[at][-1:] + pieces[at + 1][:1]
    assert stop not in pieces[at] and stop not in pieces[at + 1]
    recorder = Recorder()
    results = run(small_model(), PROMPTS, tokenizer=byte_tokenizer(), stop=(stop,), callback=recorder)
    assert results[3].text == whole[3][: whole[3].index(stop)]
    assert results[3].finish_reason == "stop"
    assert results[3].tokens == baseline("greedy")[3].tokens[: at + 2]
    for index in range(4):
        assert recorder.text(index) == results[index].text
        assert stop not in recorder.text(index)
    # those that never say it are as before
    for index in (i for i in range(4) if stop not in whole[i]):
        assert (results[index].text, results[index].finish_reason) == (whole[index], "length")


def test_a_stop_string_that_is_the_whole_output() -> None:
    whole = texts(baseline("greedy"))[1]
    recorder = Recorder()
    results = run(small_model(), PROMPTS, tokenizer=byte_tokenizer(), stop=(whole,), callback=recorder)
    assert (results[1].text, results[1].finish_reason) == ("", "stop")
    assert recorder.text(1) == ""
    assert results[1].tokens == baseline("greedy")[1].tokens


def test_a_callback_that_raises_leaves_the_model_usable() -> None:
    def fails(index: int, tokens: list[int], text: str) -> None:
        if index == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(small_model(), PROMPTS, callback=fails)
    assert_same(run(small_model(), PROMPTS, loop="python"), baseline("greedy"))


def test_two_threads_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def one(loop: str) -> list[GenerationResult]:
        return run(small_model(), PROMPTS, loop=loop)

    with ThreadPoolExecutor(2) as pool:
        for results in pool.map(one, LOOPS * 3):
            assert_same(results, baseline("greedy"))


# Damaged weights


@pytest.mark.parametrize("loop", LOOPS)
def test_not_a_number_in_a_prompt_names_it(loop: str) -> None:
    with pytest.raises(NonFiniteLogitsError, match="prompt 1: the logits are NaN or infinite; check the weights"):
        run(poisoned(17), PROMPTS, loop=loop)


@pytest.mark.parametrize("loop", LOOPS)
def test_not_a_number_while_decoding_names_the_prompt(loop: str) -> None:
    tokens = [result.tokens for result in baseline("greedy")]
    chosen = tokens[2][3]
    assert all(
        chosen not in [*p, *t[:5]] for p, t in zip(PROMPTS[:2] + PROMPTS[3:], tokens[:2] + tokens[3:], strict=True)
    )
    assert chosen not in PROMPTS[2] + tokens[2][:3]
    with pytest.raises(NonFiniteLogitsError, match="prompt 2: the logits are NaN or infinite"):
        run(poisoned(chosen), PROMPTS, loop=loop)
    # the prompt's last token may be the poison: it is emitted and never fed
    results = run(poisoned(chosen), PROMPTS, 4, loop=loop)
    assert [r.tokens for r in results] == [t[:4] for t in tokens]


def test_infinite_weights_are_refused_too() -> None:
    model = small_model()
    params = jax.tree.map(lambda leaf: leaf, model.params)
    params["lm_head"]["weight"] = params["lm_head"]["weight"].at[5].set(jnp.inf)
    with pytest.raises(NonFiniteLogitsError):
        run(dataclasses.replace(model, params=params), PROMPTS)

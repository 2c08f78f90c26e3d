"""Speculation gives plain decoding's tokens: drafts right and wrong, both loops, all layouts, and every way to end."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.generation import GenerationResult, NonFiniteLogitsError, Request, SamplingParams
from gdnjax.generation.adapt import best_count, new_trials, observe
from gdnjax.generation.drafting import PROPOSE, Propose, Source, Speculation
from gdnjax.generation.generate import generate
from gdnjax.generation.lookup import look_up
from gdnjax.lm import LanguageModel
from gdnjax.weights.declaration import abstract_params
from tests.generation.small import (
    PROMPTS,
    SAMPLING,
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
from tests.helpers import LAYOUTS, LOGITS, golden_arrays, load_golden

pytestmark = pytest.mark.usefixtures("quick_compilation")

K = 3
LOOPS = ("device", "python")
DESIGNS = [(layout, form) for layout in LAYOUTS for form in ("record", "slots")]


@functools.cache
def oracle(kind: str) -> Propose:
    """Drafts for `PROMPTS`: for the first what plain decoding emits; for the second that, with wrong tokens and steps
    without drafts in between; for the third wrong ones; for the last none."""
    truth = np.array([result.tokens for result in baseline(kind)], np.int32)

    def propose(params: Any, s: Speculation, count: int) -> tuple[jax.Array, jax.Array, Speculation]:
        place = jnp.minimum(s.emitted[:, None] + jnp.arange(count), truth.shape[1] - 1)
        drafts = jnp.take_along_axis(jnp.asarray(truth), place, axis=1)
        row = jnp.arange(len(truth))
        wrong = ((row == 1)[:, None] & ((place == 1) | (place == 6) | (place == 9))) | (row == 2)[:, None]
        silent = ((row == 1) & (s.emitted == 7)) | (row == 3)
        return jnp.where(wrong, (drafts + 1) % VOCAB, drafts), jnp.where(silent, 0, count), s

    return propose


# Steps, drafts and accepted ones of 12 tokens. The second: nothing of three accepted, all three, nothing, a step
# without drafts, one of three, and one of the one that there is room for.
COUNTED = [(3, 8, 8), (6, 13, 5), (11, 27, 0), (11, 0, 0)]

Drafting = Callable[..., list[GenerationResult]]


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Drafting:
    """`run` of `PROMPTS` with drafts of the oracle in the place of those that are looked up."""

    def drafted(model: LanguageModel, kind: str, limits: Any = 12, **arguments: Any) -> list[GenerationResult]:
        monkeypatch.setitem(PROPOSE, "ngram", oracle(kind))
        return run(model, PROMPTS, limits, SAMPLING[kind], drafts="ngram", **arguments)

    return drafted


def speculating(**changes: Any) -> LanguageModel:
    return small_model(speculate=K, **changes)


def counted(results: Sequence[GenerationResult]) -> list[tuple[int, int, int]]:
    for r in results:
        assert len(r.tokens) == 1 + r.steps + r.accepted and r.accepted <= r.drafted
    return [(r.steps, r.drafted, r.accepted) for r in results]


# Tokens


# The one that is left to bfloat16 there runs in float32 too, where time matters less.
@pytest.mark.parametrize(
    "design",
    [pytest.param(d, marks=[pytest.mark.slow] if d == ("twin", "record") else []) for d in DESIGNS],
    ids="-".join,
)
def test_the_tokens_are_plain_decodings(design: tuple[str, str], drafting: Drafting) -> None:
    layout, form = design
    model = speculating(state_layout=layout, speculative_state=form)
    results = drafting(model, "greedy", loop="python")
    assert_same(results, baseline("greedy"))
    assert counted(results) == COUNTED


@pytest.mark.newest
def test_the_device_loop_does_the_same(drafting: Drafting) -> None:
    results = drafting(speculating(), "greedy", loop="device")
    assert_same(results, baseline("greedy"))
    assert counted(results) == COUNTED


def test_sampled_tokens_are_plain_samplings(drafting: Drafting) -> None:
    results = drafting(speculating(), "mixed")
    assert_same(results, baseline("mixed"))
    assert counted(results) == COUNTED
    assert [r.tokens for r in results] != [r.tokens for r in baseline("greedy")]


def test_bfloat16_in_twin_slots(drafting: Drafting) -> None:
    config = SMALL.replace(dtype="bfloat16", state_layout="twin")
    params = jax.tree.map(lambda x, like: x.astype(like.dtype), small_model().params, abstract_params(config))
    plain, model = (LanguageModel(c, params) for c in (config, config.replace(speculate=K)))
    # Hiddens of about 4 have steps of 2^-6; logits sum 48 of them.
    results, desired = drafting(model, "greedy", loop="python"), run(plain, PROMPTS, loop="python")
    assert_same(results, desired, tolerance=0.1, near_tie=0.1)
    assert sum(accepted for _, _, accepted in counted(results)) > 0


def test_every_request_has_its_own_count(drafting: Drafting) -> None:
    for loop in LOOPS:
        results = drafting(speculating(), "greedy", speculate=[1, 0, 3, 3], loop=loop)
        assert_same(results, baseline("greedy"))
        assert counted(results) == [(6, 5, 5), (11, 0, 0), COUNTED[2], COUNTED[3]]


def test_no_drafts_at_all_is_plain_decoding() -> None:
    results = run(speculating(), PROMPTS, speculate=[0] * 4)
    assert_same(results, baseline("greedy"))
    assert counted(results) == [(11, 0, 0)] * 4
    assert results[0].tokens_per_step == 1


@pytest.mark.parametrize(("name", "source"), [("dense_gva", "mtp"), ("dense_tied", "ngram")])
def test_goldens(name: str, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's greedy tokens: with drafts of the head, and with those tokens themselves as drafts."""
    config, params = load_golden(name)
    golden = golden_arrays(name)
    prompt, ids = golden["input_ids"][0].tolist(), golden["greedy_ids"][0].tolist()
    assert golden["greedy_gap"].min() > LOGITS

    def right(params: Any, s: Speculation, count: int) -> tuple[jax.Array, jax.Array, Speculation]:
        place = jnp.minimum(s.emitted[:, None] + jnp.arange(count), len(ids) - 1)
        return jnp.asarray(ids, jnp.int32)[place], jnp.full(s.emitted.shape, count), s

    monkeypatch.setitem(PROPOSE, "ngram", right)
    requests = [Request(prompt, len(ids), SamplingParams(), K)]
    (result,) = generate(params, config, requests, drafts=source, logprobs=True, loop="python")
    assert result.tokens == ids and result.drafted > 0
    logprobs = np.asarray(jax.nn.log_softmax(golden["greedy_logits"][0], axis=-1))
    np.testing.assert_allclose(result.logprobs, logprobs[np.arange(len(ids)), ids], rtol=0, atol=LOGITS)
    if source == "ngram":
        assert result.accepted == result.drafted and result.steps == -(-(len(ids) - 1) // (1 + K))


# Ends


@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_stops_and_limits(kind: str, drafting: Drafting) -> None:
    tokens = [result.tokens for result in baseline(kind)]
    # The first prompt's stops and limits fall among accepted drafts.
    cases = [
        ([12, 12, 12, 12], tokens[0][2]),
        ([7, 5, 1, 12], tokens[3][7]),
        ([9, 12, 8, 3], tokens[0][3]),
        ([12, 12, 12, 12], tokens[0][0]),
    ]
    for limits, stop_id in cases:
        for loop in LOOPS if kind == "greedy" else LOOPS[:1]:
            results = drafting(speculating(), kind, limits, stop_ids=(stop_id,), loop=loop)
            assert_same(results, expected(kind, limits, (stop_id,)))
            counted(results)


def test_no_draft_lies_behind_a_limit(drafting: Drafting) -> None:
    # 7 and 9, 40 and 8 tokens are whole pages.
    results = drafting(speculating(), "greedy", [9, 2, 8, 5], loop="python")
    assert_same(results, expected("greedy", [9, 2, 8, 5], ()))
    assert counted(results) == [(2, 6, 6), (1, 0, 0), (7, 15, 0), (4, 0, 0)]


def test_up_to_max_length_with_looked_up_drafts() -> None:
    longest = [int(i) for i in np.random.default_rng(5).integers(0, 250, SMALL.max_length - 1)]
    prompts = [longest, longest[:-5], [1], [2]]
    plain = run(small_model(), prompts, 1000, loop="python")
    results = run(speculating(), prompts, 1000, drafts="ngram", loop="python")
    assert [len(r.tokens) for r in results] == [1, 6, 63, 63]
    assert_same(results, plain)
    assert counted(results) == [looked_up(p, r.tokens) for p, r in zip(prompts, results, strict=True)]
    assert sum(r.accepted for r in results) > 0


def looked_up(prompt: list[int], tokens: list[int]) -> tuple[int, int, int]:
    """Steps, drafts and accepted ones of a text that is known."""
    text, known, steps, drafted, accepted = [*prompt, *tokens], len(prompt) + 1, 0, 0, 0
    while known < len(text):
        history = jnp.asarray([text[:known] + [0] * (64 - known)])
        drafts, available = run_look_up(history, jnp.array([known]), K)
        count = min(int(available[0]), len(text) - known - 1)
        right = 0
        while right < count and int(drafts[0, right]) == text[known + right]:
            right += 1
        known, steps, drafted, accepted = known + 1 + right, steps + 1, drafted + count, accepted + right
    return steps, drafted, accepted


run_look_up = jax.jit(look_up, static_argnums=2)


def test_stop_strings_end_inside_of_accepted_drafts(drafting: Drafting) -> None:
    tokenizer = byte_tokenizer()
    pieces = [tokenizer.decode([t]) for t in baseline("greedy")[0].tokens]
    # Begins in the first step's first accepted draft and ends in its second.
    stop = pieces[1][-1:] + pieces[2][:1]
    for stops in ((stop,), ("never this", pieces[3])):
        calls: list[tuple[int, list[int], str]] = []
        plain = run(small_model(), PROMPTS, tokenizer=tokenizer, stop=stops)
        results = drafting(
            speculating(),
            "greedy",
            tokenizer=tokenizer,
            stop=stops,
            callback=lambda index, ids, text, calls=calls: calls.append((index, ids, text)),
        )
        assert plain[0].finish_reason == "stop" and len(plain[0].tokens) < 5
        assert_same(results, plain)
        counted(results)
        for index, result in enumerate(results):
            assert result.text == plain[index].text
            assert [t for i, ids, _ in calls if i == index for t in ids] == result.tokens
            assert "".join(text for i, _, text in calls if i == index) == result.text
    assert max(len(ids) for _, ids, _ in calls) > 1


@pytest.mark.parametrize("loop", LOOPS)
def test_not_a_number(loop: str, drafting: Drafting) -> None:
    tokens = [result.tokens for result in baseline("greedy")]
    used = {t for prompt in PROMPTS for t in prompt} | {t for ids in tokens for t in ids}
    # A draft that is rejected may be poison: its row's logits, keys and records are not read.
    rejected = next(d for t in tokens[2][1:8] if (d := (t + 1) % VOCAB) not in used)
    assert_same(drafting(broken(rejected), "greedy", loop=loop), baseline("greedy"))
    # A token that is accepted is not, be it emitted in the middle of a step.
    others = {t for prompt in PROMPTS for t in prompt} | {t for ids in tokens[1:] for t in ids}
    accepted = next(t for t in tokens[0][1:10] if t not in others and (t - 1) % VOCAB not in tokens[2])
    with pytest.raises(NonFiniteLogitsError, match="prompt 0: the logits are NaN or infinite; check the weights"):
        drafting(broken(accepted), "greedy", loop=loop)


def broken(token: int) -> LanguageModel:
    return LanguageModel(speculating().config, poisoned(token).params, byte_tokenizer())


# Counts that adapt


@pytest.mark.parametrize("loop", ["python", pytest.param("device", marks=pytest.mark.slow)])
def test_adaptive_counts(loop: str, drafting: Drafting) -> None:
    # The third prompt's drafts are all wrong; it alone drafts, so that both widths of a step occur.
    trials, wanted = new_trials(1), []
    for step in range(11):
        count = jnp.minimum(best_count(trials, jnp.array([1]), 1), 10 - step)
        wanted.append(int(count[0]))
        trials = observe(trials, count, jnp.array([0]))
    # Given up, and tried again.
    assert 1 in wanted[wanted.index(0) :]
    results = drafting(small_model(), "greedy", speculate=[0, 0, 1, 0], adaptive=True, loop=loop)
    assert_same(results, baseline("greedy"))
    assert counted(results) == [(11, 0, 0), (11, 0, 0), (11, sum(wanted), 0), (11, 0, 0)]


# Refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculate": [8] * 4}, "speculate = 8; it takes an integer from 0 (plain decoding) to 7"),
        ({"speculate": [1, -1, 1, 1]}, "speculate = -1; it takes an integer from 0"),
        ({"speculate": [True] * 4}, "speculate = True; it takes an integer"),
        ({"speculate": [1] * 4, "drafts": "mpt"}, "drafts = 'mpt'; it takes mtp or ngram"),
        ({"speculate": [0, 2, 0, 0]}, "speculate = 2 with drafts = 'mtp', and this model has no draft head"),
        ({}, "take drafts = 'ngram' (--drafts ngram), which needs none, or a checkpoint with mtp.* tensors"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        run(speculating(), PROMPTS, **arguments)
    assert message in str(error.value)

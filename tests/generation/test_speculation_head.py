"""Speculation by a trained draft head, on the model that is shipped: the tokens, and what the head is fed."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax import LanguageModel, load
from gdnjax.generation.drafting import PROPOSE, Speculation
from gdnjax.generation.generate import speculating_config, working_config
from gdnjax.generation.loop import jitted_emit, make_decoding
from gdnjax.generation.prompts import prefill_prompts
from gdnjax.generation.sampling import make_sampler
from gdnjax.generation.speculation import make_speculation, speculative_device_loop
from gdnjax.model.draft import mtp_logits
from gdnjax.model.forward import forward_hidden
from gdnjax.state import State, cached_kv, init_state
from gdnjax.weights.declaration import Params
from gdnjax.weights.draft_head import DRAFT_HEAD, with_draft_head
from tests.generation.small import GREEDY, NEAR_TIE, run
from tests.helpers import KV, assert_close

pytestmark = pytest.mark.usefixtures("quick_compilation")

COUNTS = [1, 2, 3, 4]
TOKENS = 24
TEXTS = ["My dear Emma, it was not", "HAMLET. ", "It is a truth universally acknowledged, that a single man", "A"]


@functools.cache
def model() -> LanguageModel:
    # Windows of 16: some prompts are cut.
    return load("tiny", dtype="float32", max_length=64, max_requests=4, prefill_tokens=16)


@functools.cache
def prompts() -> list[list[int]]:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    found = [tokenizer.encode(text) for text in TEXTS]
    assert sum(map(len, found)) > 16 and len(found[-1]) == 1
    return found


def start() -> tuple[Speculation, list[list[int]]]:
    """The speculation behind the prompts, and their first tokens."""
    lm, limits = model(), [TOKENS] * 4
    config = speculating_config(working_config(lm.config, prompts(), limits), max(COUNTS), "mtp")
    state, logits, hidden = prefill_prompts(lm.params, init_state(config), prompts())
    decoding = make_decoding(state, make_sampler([GREEDY] * 4, 4), limits, (), prompts())
    decoding, emission = jitted_emit(decoding, logits)
    first = [[t] for t in emission.token.tolist()]
    return make_speculation(decoding, COUNTS, "mtp", prompts(), hidden), first


@functools.cache
def speculated() -> tuple[list[list[int]], np.ndarray, np.ndarray, State]:
    """By the device loop: tokens, steps and accepted drafts of the requests, and the state."""
    return finish(model().params, *start())


def finish(
    params: Params, s: Speculation, tokens: list[list[int]]
) -> tuple[list[list[int]], np.ndarray, np.ndarray, State]:
    s, emissions = speculative_device_loop(params, s, steps=32, propose=PROPOSE["mtp"])
    found = np.asarray(emissions.token)
    for row, ids in enumerate(tokens):
        ids += [int(t) for t in found[:, row].ravel() if t >= 0]
    steps = (found[..., 0] >= 0).sum(axis=0)
    assert not s.live.any()
    return tokens, steps, np.array([len(ids) for ids in tokens]) - 1 - steps, s.state


def test_the_tokens_are_plain_decodings() -> None:
    tokens, steps, accepted, _ = speculated()
    assert tokens == [r.tokens for r in run(model(), prompts(), TOKENS, loop="python")]
    assert (accepted > 0).all() and (accepted < np.array(COUNTS) * steps).all()


def test_no_copy_that_chooses_drafts_can_change_the_tokens() -> None:
    wanted, _, by_head, _ = speculated()
    config = model().config.replace(draft_head="fp8")
    copy, accepted = with_draft_head(model().params, config)[DRAFT_HEAD], []
    # The head's copy, and one that chooses what the head likes least.
    for sign in (1, -1):
        s, first = start()
        s = dataclasses.replace(s, state=dataclasses.replace(s.state, config=s.state.config.replace(draft_head="fp8")))
        params = {**model().params, DRAFT_HEAD: {**copy, "scale": sign * copy["scale"]}}
        tokens, _, taken, _ = finish(params, s, first)
        assert tokens == wanted
        accepted.append(taken.sum())
    print(f"accepted: {by_head.sum()} of the head's drafts, {accepted[0]} of its copy's")
    assert accepted[0] > 0.8 * by_head.sum() and accepted[1] == 0


@pytest.mark.slow
def test_the_python_loop_does_the_same() -> None:
    results = run(model(), prompts(), TOKENS, speculate=COUNTS, loop="python")
    assert [r.tokens for r in results] == speculated()[0]
    assert [r.steps for r in results] == speculated()[1].tolist()


def test_drafts_are_what_the_head_says_over_the_whole_text() -> None:
    # The first request takes one draft a step.
    text = [*prompts()[0], *speculated()[0][0]]
    logits = np.asarray(over_text(model().params, jnp.asarray([text])))[0]
    best = np.sort(logits, axis=-1)
    assert (best[:, -1] - best[:, -2]).min() > NEAR_TIE
    known, steps = len(prompts()[0]) + 1, 0
    while known < len(text):
        right = known + 1 < len(text) and logits[known - 2].argmax() == text[known]
        known, steps = known + 1 + right, steps + 1
    assert steps == speculated()[1][0]


@jax.jit
def over_text(params: Params, tokens: jax.Array) -> jax.Array:
    hidden, _ = forward_hidden(params, model().config, tokens)
    return mtp_logits(params, model().config, hidden, tokens)


def test_the_heads_cache_is_that_of_the_whole_text() -> None:
    tokens, _, _, state = speculated()
    assert state.position.tolist() == [len(p) + TOKENS - 1 for p in prompts()]
    whole = [[*p, *t] for p, t in zip(prompts(), tokens, strict=True)]
    read = prefill_prompts(model().params, init_state(state.config), whole)[0]
    for request, ids in enumerate(whole):
        for found, wanted in zip(heads_cache(state, request), heads_cache(read, request), strict=True):
            known = len(ids) - 1
            assert_close(found[:known], wanted[:known], KV, f"request {request}")
            assert np.abs(wanted[:known]).sum(axis=(1, 2)).all()


def heads_cache(state: State, request: int) -> list[np.ndarray]:
    return [np.asarray(x) for x in cached_kv(state, -1, request)]

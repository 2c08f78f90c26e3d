"""Speculation by a trained draft head, on the model that is shipped: the tokens, and what the head is fed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax import LanguageModel, load
from gdnjax.generation import GenerationResult
from gdnjax.generation.drafting import PROPOSE
from gdnjax.generation.generate import speculating_config, working_config
from gdnjax.generation.loop import jitted_emit, make_decoding
from gdnjax.generation.prompts import prefill_prompts
from gdnjax.generation.sampling import make_sampler
from gdnjax.generation.speculation import make_speculation, python_step
from gdnjax.model.draft import mtp_logits
from gdnjax.model.forward import forward_hidden
from gdnjax.state import State, cached_kv, init_state
from tests.generation.small import GREEDY, NEAR_TIE, assert_same, run
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


@functools.cache
def plain() -> list[GenerationResult]:
    return run(model(), prompts(), TOKENS)


def test_the_device_loop_emits_plain_decodings_tokens() -> None:
    results = run(model(), prompts(), TOKENS, speculate=COUNTS)
    assert_same(results, plain())
    for count, r in zip(COUNTS, results, strict=True):
        assert len(r.tokens) == TOKENS == 1 + r.steps + r.accepted
        assert 0 < r.accepted < r.drafted <= count * r.steps
    # The first request takes a draft a step: what the head says over the whole text, without a cache.
    first = results[0]
    text = [*prompts()[0], *first.tokens]
    hidden, _ = forward_hidden(model().params, model().config, jnp.asarray([text]))
    logits = np.asarray(mtp_logits(model().params, model().config, hidden, jnp.asarray([text])))[0]
    best = np.sort(logits, axis=-1)
    assert (best[:, -1] - best[:, -2]).min() > NEAR_TIE
    known, steps = len(prompts()[0]) + 1, 0
    while known < len(text):
        right = known + 1 < len(text) and logits[known - 2].argmax() == text[known]
        known, steps = known + 1 + right, steps + 1
    assert steps == first.steps


def test_the_python_loops_steps_and_the_heads_cache() -> None:
    """The steps by hand: the tokens again, and behind them the cache that reading the whole text would have made."""
    lm, limits = model(), [TOKENS] * 4
    config = speculating_config(working_config(lm.config, prompts(), limits), max(COUNTS), "mtp")
    state, logits, hidden = prefill_prompts(lm.params, init_state(config), prompts())
    decoding = make_decoding(state, make_sampler([GREEDY] * 4, 4), limits, (), prompts())
    decoding, emission = jitted_emit(decoding, logits)
    tokens = [[t] for t in emission.token.tolist()]
    s = make_speculation(decoding, COUNTS, "mtp", prompts(), hidden)
    while s.live.any():
        s, emission = python_step(lm.params, s, PROPOSE["mtp"])
        for row, ids in enumerate(emission.token.tolist()):
            tokens[row] += [t for t in ids if t >= 0]
    assert tokens == [r.tokens for r in plain()]
    assert s.state.position.tolist() == [len(p) + TOKENS - 1 for p in prompts()]
    whole = [[*p, *t] for p, t in zip(prompts(), tokens, strict=True)]
    read = prefill_prompts(lm.params, init_state(config), whole)[0]
    for request, ids in enumerate(whole):
        for found, wanted in zip(heads_cache(s.state, request), heads_cache(read, request), strict=True):
            assert_close(found[: len(ids) - 1], wanted[: len(ids) - 1], KV, f"request {request}")
            assert np.abs(wanted[: len(ids) - 1]).sum(axis=(1, 2)).all()


def heads_cache(state: State, request: int) -> list[np.ndarray]:
    return [np.asarray(jax.device_get(x)) for x in cached_kv(state, -1, request)]

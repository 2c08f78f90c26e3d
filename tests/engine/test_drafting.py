"""What an engine drafts from: prompts in windows, texts that begin again behind a preemption, more rows than plain
steps have; and that nothing of it depends on who else runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.engine import Engine, Handle
from gdnjax.generation import SamplingParams
from gdnjax.generation.prompts import prefill_prompts
from gdnjax.model.draft import mtp_logits
from gdnjax.model.forward import forward_hidden
from gdnjax.state import cached_kv, init_state
from gdnjax.weights.declaration import Params
from tests.engine.test_engine import PENALIZED, SAMPLED, WHOLE, assert_clean, prompt
from tests.engine.test_speculation import CONFIG, DRAFTS, EAGER, engine, tiny
from tests.generation.small import GREEDY, NEAR_TIE, PROMPTS, run, small_model
from tests.helpers import KV, assert_close

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.parametrize("form", ["record", "slots"])
def test_the_same_rows_give_the_same_bits_whatever_else_runs(form: str) -> None:
    # The others draft, are read, end, and take no drafts, while this one goes on.
    def serve(others: int, sampling: Any) -> Handle:
        e = engine(model=small_model(**CONFIG, speculative_state=form))
        early = [e.submit(prompt(4, 20 + i), 14, PENALIZED, stop_ids=(), speculate=i) for i in range(others - 1)]
        for _ in early:
            e.step()
        if others:
            e.submit(prompt(5, 30), 9, WHOLE, stop_ids=())
        handle = e.submit(PROMPTS[1], 20, sampling, stop_ids=())
        e.run()
        return handle

    for sampling in (EAGER, SAMPLED):
        first = serve(0, sampling)
        for others in (1, 3):
            found = serve(others, sampling)
            assert found.tokens == first.tokens
            assert found.logprobs == first.logprobs


def test_texts_are_looked_up_whole_behind_a_preemption() -> None:
    e = engine(pages=7, overcommit=True)
    handles = [e.submit(prompt(14, i), 40, EAGER, stop_ids=()) for i in range(4)]
    begun_again = 0
    while e.step():
        assert e._launcher._drafting.history is not None
        history = np.asarray(e._launcher._drafting.history)
        for request, handle in e._roster.running.items():
            assert history[request, : len(handle.to_read)].tolist() == handle.to_read
            begun_again += len(handle.to_read) > len(handle.prompt)
    assert begun_again > 0 and all(handle.finish_reason == "length" for handle in handles)
    assert_clean(e)


def test_draws_go_on_behind_accepted_drafts() -> None:
    # Either of two tokens, among few that come again and again: some lookups are right, and every draw counts.
    kinds = [
        SamplingParams(temperature=3.0, top_k=2, repetition_penalty=0.4, presence_penalty=-2.0, seed=i)
        for i in range(len(PROMPTS))
    ]
    limits, e = [40, 40, 24, 40], engine()
    handles = [e.submit(p, n, kind, stop_ids=()) for p, n, kind in zip(PROMPTS, limits, kinds, strict=True)]
    e.run()
    plain = run(small_model(), PROMPTS, limits, kinds, loop="python")
    assert [handle.tokens for handle in handles] == [result.tokens for result in plain]
    # As many drafts as `generate` makes, whose steps are the same.
    counted = run(small_model(speculate=DRAFTS), PROMPTS, limits, kinds, drafts="ngram", loop="python")
    assert e.counters["accepted_tokens"] == sum(result.accepted for result in counted) > 10
    assert e.counters["drafted_tokens"] == sum(result.drafted for result in counted)


@pytest.mark.parametrize("speculate", [0, 1])
def test_more_requests_than_a_plain_step_has_rows(speculate: int) -> None:
    e = Engine(small_model(**CONFIG | {"speculate": speculate}), max_requests=66, kv_tokens=66 * 16)
    # One shape: the largest that it has.
    e._launcher.row_buckets, e._launcher.token_buckets = e._launcher.row_buckets[-1:], [e.config.prefill_tokens]
    ids = [[5 + i % 8, 9] for i in range(66)]
    handles = [e.submit(p, 9, stop_ids=()) for p in ids]
    e.step()
    assert e.running == 66
    e.run()
    for first, wanted in enumerate(run(small_model(max_requests=8), ids[:8], 9)):
        assert wanted.logprobs is not None
        for handle in handles[first::8]:
            assert handle.tokens == wanted.tokens
            np.testing.assert_allclose(handle.logprobs, wanted.logprobs, atol=5e-4)
    assert_clean(e)


def test_the_head_is_fed_what_it_is_fed_over_the_whole_text() -> None:
    """Of one draft a step it is known which are right: those that the head says over the text that comes."""
    tokenizer, e = tiny().tokenizer, engine(model=tiny(), speculate=2, kv_tokens=None)
    assert tokenizer is not None
    texts = ("It is a truth universally acknowledged, that a man", "HAMLET. To be, or not to be, that is", "A")
    prompts = [tokenizer.encode(text) for text in texts]
    assert max(map(len, prompts)) > 16  # it is cut into windows
    handles = [e.submit(p, 24, GREEDY, stop_ids=(), speculate=1) for p in prompts]
    while not e._roster.running or any(handle.reading for handle in e._roster.running.values()):
        e.step()
    assert e.running == 3
    read = prefill_prompts(tiny().params, init_state(e.config), prompts)[0]
    for i, handle in enumerate(handles):
        assert handle.request is not None
        known = len(handle.prompt) - 1
        found, wanted = cached_kv(e.pool.state, -1, handle.request), cached_kv(read, -1, i)
        for one, other in zip(found, wanted, strict=True):
            assert_close(one[:known], other[:known], KV, f"the head's cache of prompt {i}")
    e.run()
    drafted = accepted = 0
    for handle in handles:
        text, most = [*handle.prompt, *handle.tokens], tiny().config.max_length
        padded = jnp.asarray([[*text, *[0] * (most - len(text))]])
        logits = np.asarray(over_text(tiny().params, padded))[0, : len(text)]
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > NEAR_TIE
        known = len(handle.prompt) + 1
        while known < len(text):
            asked = known + 1 < len(text)
            right = asked and logits[known - 2].argmax() == text[known]
            known, drafted, accepted = known + 1 + right, drafted + asked, accepted + right
    assert (e.counters["drafted_tokens"], e.counters["accepted_tokens"]) == (drafted, accepted)
    assert 0 < accepted < drafted
    assert_clean(e)


@jax.jit
def over_text(params: Params, tokens: jax.Array) -> jax.Array:
    hidden, _ = forward_hidden(params, tiny().config, tokens)
    return mtp_logits(params, tiny().config, hidden, tokens)


@pytest.mark.parametrize("form", ["record", pytest.param("slots", marks=pytest.mark.slow)])
def test_slots_that_are_updated_in_place(form: str) -> None:
    e = engine(model=small_model(**CONFIG | {"state_layout": "in_place"}, speculative_state=form))
    kinds = [GREEDY, dataclasses.replace(SAMPLED, seed=3), EAGER, PENALIZED]
    limits = [9, 14, 20, 11]
    handles = [
        e.submit(p, n, kind, stop_ids=(), speculate=(DRAFTS, 2, DRAFTS, 0)[i])
        for i, (p, n, kind) in enumerate(zip(PROMPTS, limits, kinds, strict=True))
    ]
    e.run()
    for handle, wanted in zip(handles, run(small_model(), PROMPTS, limits, kinds, loop="python"), strict=True):
        assert wanted.logprobs is not None
        assert handle.tokens == wanted.tokens
        np.testing.assert_allclose(handle.logprobs, wanted.logprobs, atol=1e-3)
    assert 0 < e.counters["accepted_tokens"] < e.counters["drafted_tokens"]
    assert_clean(e)

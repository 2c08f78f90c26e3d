"""An engine that speculates: every request gets the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from gdnjax import LanguageModel, load
from gdnjax.engine import Engine, Handle, speculation
from gdnjax.generation import SamplingParams
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.prefix_cache import PrefixCache
from tests.engine.test_engine import PENALIZED, SAMPLED, WHOLE, assert_clean, prompt
from tests.generation.small import GREEDY, NEAR_TIE, PROMPTS, SMALL, STOP_ID, poisoned, run, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFTS = 3
# Random weights soon repeat themselves, so that lookups are right.
CONFIG: dict[str, Any] = dict(
    state_layout="twin", prefix_cache_bytes=6 * snapshot_bytes(SMALL), prefix_interval=16, speculate=DRAFTS
)
KINDS = (GREEDY, SAMPLED, WHOLE, PENALIZED)


def engine(pages: int | None = None, model: LanguageModel | None = None, **arguments: Any) -> Engine:
    """`pages`: fewer KV pages than the cache has."""
    model = small_model(**CONFIG) if model is None else model
    limits: dict[str, Any] = dict(max_requests=4, kv_tokens=16 * 16, chunk_tokens=16)
    e = Engine(model, **(limits | arguments))
    if pages is not None:
        e.pool.pages = Pages(pages, e.config.page_size)
        e.pool.prefixes = PrefixCache(e.pool.pages, 4, 16)
    return e


@functools.cache
def plain(ids: tuple[int, ...], count: int, sampling: SamplingParams) -> tuple[list[int], list[float]]:
    """By `generate`, without drafts and alone."""
    (result,) = run(small_model(), [list(ids)], count, sampling, loop="python")
    assert result.logprobs is not None
    return result.tokens, result.logprobs


def assert_plain(handle: Handle) -> None:
    assert handle.finish_reason == "length"
    same(handle, *plain(handle.prompt, handle.max_new_tokens, handle.sampling))


def same(handle: Handle, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
    """The same tokens, but for a near-tie, which ends the comparison and is printed."""
    assert len(handle.tokens) == len(handle.logprobs) == len(tokens)
    for i, (a, b) in enumerate(zip(handle.tokens, tokens, strict=True)):
        gap = abs(handle.logprobs[i] - logprobs[i])
        if a != b:
            print(f"request {handle.number}, token {i}: {a} or {b}, gap {gap:.2g}")
            assert handle.sampling.temperature == 0 and gap < NEAR_TIE
            return
        assert gap < 1e-3


def test_nothing_compiles_after_warming_up() -> None:
    # First in this file, so that what it compiles again serves the others too.
    for name in vars(speculation):
        if name.startswith("run_"):
            getattr(speculation, name).clear_cache()
    e = engine(pages=7, overcommit=True)
    e.warm_up()
    compiled: list[str] = []
    watching = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if watching and "backend_compile" in name else None
    )
    for seed in range(3):
        handles = [e.submit(prompt(3 + 8 * i, seed + i), 24, kind, stop_ids=[STOP_ID]) for i, kind in enumerate(KINDS)]
        handles.append(e.submit(prompt(9, seed), 2, prompt_logprobs=True, speculate=1))
        for _ in range(4):
            e.step()
        e.cancel(handles[1])
        e.run()
    watching.clear()
    assert compiled == []
    assert e.counters["preemptions"] > 0 and e.counters["prefixes_kept"] > 0
    assert_clean(e)


@pytest.mark.parametrize("form", ["record", "slots"])
def test_requests_of_all_kinds_get_the_tokens_of_plain_decoding(form: str) -> None:
    # Prompts longer than a window are read while others verify drafts; every third request takes none.
    e = engine(model=small_model(**CONFIG, speculative_state=form))
    handles = [
        e.submit(ids, 6 + 3 * i, dataclasses.replace(kind, seed=i + 1), stop_ids=(), speculate=(DRAFTS, 1, 0)[i % 3])
        for i, (ids, kind) in enumerate([(p, k) for p in PROMPTS[:3] for k in KINDS])
    ]
    e.run()
    for handle in handles:
        assert_plain(handle)
    assert_clean(e)
    drafted, accepted = e.counters["drafted_tokens"], e.counters["accepted_tokens"]
    assert 0 < accepted < drafted
    assert e.counters["generated_tokens"] == sum(len(h.tokens) for h in handles)


def test_accepted_drafts_save_steps() -> None:
    def steps(speculate: int) -> tuple[int, Handle, Engine]:
        e = engine()
        handle = e.submit(PROMPTS[1], 40, stop_ids=(), speculate=speculate)
        e.run()
        assert_plain(handle)
        return e.counters["decode_steps"], handle, e

    (many, _, without), (few, handle, e) = steps(0), steps(DRAFTS)
    assert without.counters["drafted_tokens"] == 0
    accepted = e.counters["accepted_tokens"]
    # A step gives its accepted drafts and one more; the prompt gives the first.
    assert accepted > 0 and few == len(handle.tokens) - 1 - accepted < many == len(handle.tokens) - 1


def test_a_stop_inside_of_accepted_drafts_ends_the_text_there() -> None:
    model = small_model()
    (whole,) = run(model, [PROMPTS[1]], 40, tokenizer=model.tokenizer)
    assert whole.text is not None
    # Repetitions are accepted three at a time: one of these stops stands inside of a step, whichever the first is.
    inside = 0
    for at in range(20, 26):
        stop_id, stop = whole.tokens[at], whole.text[at : at + 2]
        e = engine()
        by_id = e.submit(PROMPTS[1], 40, stop_ids=[stop_id])
        by_text = e.submit(PROMPTS[1], 40, stop_ids=(), stop=stop)
        e.run()
        end = whole.tokens.index(stop_id) + 1
        assert (by_id.finish_reason, by_id.tokens) == ("stop", whole.tokens[:end])
        assert by_text.finish_reason == "stop" and by_text.text == whole.text[: whole.text.find(stop)]
        assert whole.tokens[: len(by_text.tokens)] == by_text.tokens
        assert e.counters["generated_tokens"] == len(by_id.tokens) + len(by_text.tokens)
        inside += e.counters["accepted_tokens"] > 0
        assert_clean(e)
    assert inside


@pytest.mark.parametrize("layout", ["in_place", "twin"])
@pytest.mark.parametrize("form", ["record", "slots"])
def test_whoever_leaves_takes_nothing_along(form: str, layout: str) -> None:
    # Requests that leave with a step on its way: the host has not heard how many rows it took.
    e = engine(
        pages=7, overcommit=True, model=small_model(**{**CONFIG, "state_layout": layout}, speculative_state=form)
    )
    stays = [e.submit(ids, 30, stop_ids=(), priority=1) for ids in PROMPTS[1:3]]
    for turn in range(6):
        leaves = e.submit(prompt(6 + turn, turn), 20, stop_ids=())
        for _ in range(2 + turn % 2):
            e.step()
        e.cancel(leaves)
        e.pool.check()
    late = [e.submit(prompt(17, 50 + i), 20, kind, stop_ids=()) for i, kind in enumerate(KINDS)]
    e.run()
    for handle in (*stays, *late):
        assert_plain(handle)
    assert e.counters["preemptions"] > 0
    assert_clean(e)


def test_a_shared_prefix_is_resumed() -> None:
    e = engine()
    shared = prompt(33, 7)
    for tail in ([1, 2, 3], [9, 8], [4]):
        handle = e.submit([*shared, *tail], 12, stop_ids=())
        e.run()
        assert_plain(handle)
    assert handle.usage.cached_tokens == 32
    assert_clean(e)


def test_a_request_with_logits_that_are_not_finite_ends_alone() -> None:
    (whole,) = run(small_model(), [PROMPTS[1]], 40)
    bad = next(t for t in whole.tokens[2:] if t not in PROMPTS[0])
    model = dataclasses.replace(poisoned(bad), config=small_model(**CONFIG).config)
    e = engine(model=model)
    handle = e.submit(PROMPTS[1], 40, stop_ids=())
    other = e.submit([3, 1], 2, stop_ids=())
    e.run()
    assert handle.finish_reason == "error" and other.finish_reason == "length"
    assert handle.tokens == whole.tokens[: whole.tokens.index(bad) + 1]
    assert e.pool.live == ()


# The draft head

TEXTS = ["My dear Emma, it was not", "HAMLET. ", "It is a truth universally acknowledged, that a single man", "A"]


@functools.cache
def tiny() -> LanguageModel:
    return load("tiny", dtype="float32", max_length=64, prefill_tokens=16)


def test_drafts_of_the_head() -> None:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(text) for text in TEXTS]
    kinds = [GREEDY, GREEDY, SAMPLED, GREEDY]
    wanted = run(tiny(), prompts, 16, kinds, loop="python")
    e = engine(model=tiny(), speculate=2, kv_tokens=None)
    assert e.config.draft_kv
    handles = [e.submit(p, 16, k, stop_ids=()) for p, k in zip(prompts, kinds, strict=True)]
    handles[0].speculate = 0
    e.run()
    for handle, result in zip(handles, wanted, strict=True):
        assert result.logprobs is not None
        same(handle, result.tokens, result.logprobs)
    # A head that is fed something else than it was trained on is almost never right.
    assert e.counters["accepted_tokens"] > e.counters["drafted_tokens"] / 3
    scores = e.score(prompts[0][:5], prompts[0][5:])
    np.testing.assert_allclose(scores, Engine(tiny()).score(prompts[0][:5], prompts[0][5:]), atol=1e-4)
    assert_clean(e)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(speculate=8), "speculate = 8; it takes an integer from 0"),
        (dict(speculate=2, drafts="mtp"), "this model has no draft head"),
        (dict(speculate=2, drafts="guess"), "drafts = 'guess'; it takes mtp or ngram"),
        (dict(speculate=0, drafts="ngram"), "drafts = 'ngram' with speculate = 0"),
    ],
)
def test_what_cannot_speculate_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**arguments)


def test_a_request_takes_no_more_drafts_than_its_engine() -> None:
    for most in (DRAFTS, 0):
        with pytest.raises(ValueError, match=f"speculate = {most + 1}; this engine takes 0 .* to {most}"):
            engine(speculate=most).submit([1], 2, speculate=most + 1)

"""An engine that speculates: every request gets the tokens of plain decoding, in fewer steps."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from gdnjax import LanguageModel, load
from gdnjax.engine import Engine, Handle, speculation
from gdnjax.engine.constraint import json_schema
from gdnjax.engine.pace import ENOUGH, Pace
from gdnjax.generation import SamplingParams
from gdnjax.loading import random_model
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.prefix_cache import PrefixCache
from tests.engine.test_engine import SAMPLED, WHOLE, assert_clean, prompt
from tests.generation.small import GREEDY, NEAR_TIE, PROMPTS, SMALL, STOP_ID, poisoned, run, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFTS = 3
CONFIG: dict[str, Any] = dict(
    state_layout="twin", prefix_cache_bytes=6 * snapshot_bytes(SMALL), prefix_interval=16, speculate=DRAFTS
)
# Texts that repeat themselves, so that lookups are right.
EAGER = SamplingParams(frequency_penalty=-3.0)
HOT = SamplingParams(temperature=0.8, repetition_penalty=1.1, presence_penalty=-2.0, frequency_penalty=-2.0)
KINDS = (GREEDY, SAMPLED, WHOLE, HOT, EAGER)
TOKENS = 24
FP8 = LanguageModel(SMALL.replace(mtp_num_hidden_layers=1, draft_head="fp8"), {})


def engine(pages: int | None = None, model: LanguageModel | None = None, **arguments: Any) -> Engine:
    """`pages`: fewer KV pages than the cache has."""
    model = small_model(**CONFIG) if model is None else model
    limits: dict[str, Any] = dict(max_requests=4, kv_tokens=16 * 16, chunk_tokens=16)
    e = Engine(model, **(limits | arguments))
    # One shape of each program: there is less to compile.
    e._launcher.row_buckets, e._launcher.token_buckets = [4], [e.config.prefill_tokens]
    if pages is not None:
        e.pool.pages = Pages(pages, e.config.page_size)
        e.pool.prefixes = PrefixCache(e.pool.pages, 4, 16)
    return e


@functools.cache
def plain() -> dict[tuple[int, int], tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of every prompt with every kind of sampling, by `generate` without drafts."""
    found = {}
    for turn in range(len(KINDS)):
        kinds = [(i + turn) % len(KINDS) for i in range(len(PROMPTS))]
        results = run(small_model(), PROMPTS, TOKENS, [KINDS[k] for k in kinds], loop="python")
        for at, (kind, result) in enumerate(zip(kinds, results, strict=True)):
            assert result.logprobs is not None
            found[at, kind] = result.tokens, result.logprobs
    return found


def assert_plain(handle: Handle) -> None:
    assert handle.finish_reason == "length"
    tokens, logprobs = plain()[PROMPTS.index(list(handle.prompt)), KINDS.index(handle.sampling)]
    same(handle, tokens[: handle.max_new_tokens], logprobs[: handle.max_new_tokens])


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


def test_nothing_compiles_after_warming_up_and_memory_is_flat() -> None:
    # First in this file, so that what it compiles again serves the others too.
    for name in vars(speculation):
        if name.startswith("run_"):
            getattr(speculation, name).clear_cache()
    held_to = json_schema(small_model(), {"type": "string"})
    e = engine(pages=7, overcommit=True)
    e.warm_up()
    compiled: list[str] = []
    watching = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if watching and "backend_compile" in name else None
    )
    live: list[int] = []
    for seed in range(4):
        handles = [e.submit(prompt(3 + 8 * i, seed + i), 24, kind, stop_ids=[STOP_ID]) for i, kind in enumerate(KINDS)]
        handles.append(e.submit(prompt(9, seed), 2, prompt_logprobs=True, speculate=1))
        handles.append(e.submit(prompt(5, seed), 20, SAMPLED, stop_ids=[STOP_ID], constraint=held_to))
        for _ in range(4):
            e.step()
        e.cancel(handles[1])
        e.run()
        e._launcher._rows.clear()  # those of the last steps are kept, and differ
        gc.collect()
        live.append(sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted()))
    watching.clear()
    assert compiled == []
    assert len(set(live)) == 1, f"bytes on the device: {live}"
    assert e.counters["preemptions"] > 0 and e.counters["prefixes_kept"] > 0
    assert_clean(e)


forms = pytest.mark.parametrize("form", ["record", "slots"])


@forms
def test_requests_of_all_kinds_get_the_tokens_of_plain_decoding(form: str) -> None:
    # Prompts longer than a window are read while others verify drafts; every third request takes none.
    e = engine(model=small_model(**CONFIG, speculative_state=form))
    each = [(p, k) for p in PROMPTS for k in KINDS]
    handles = [
        e.submit(ids, 5 + i, kind, stop_ids=(), speculate=(DRAFTS, 1, 0)[i % 3]) for i, (ids, kind) in enumerate(each)
    ]
    e.run()
    for handle in handles:
        assert_plain(handle)
    assert_clean(e)
    assert 0 < e.counters["accepted_tokens"] < e.counters["drafted_tokens"]
    assert e.counters["generated_tokens"] == sum(len(h.tokens) for h in handles)


def test_accepted_drafts_save_steps() -> None:
    def steps(speculate: int) -> tuple[int, int, int]:
        e = engine()
        assert_plain(run_one(e, PROMPTS[1], TOKENS, EAGER, stop_ids=(), speculate=speculate))
        return e.counters["decode_steps"], e.counters["drafted_tokens"], e.counters["accepted_tokens"]

    assert steps(0) == (TOKENS - 1, 0, 0)
    found, _, accepted = steps(DRAFTS)
    # A step gives its accepted drafts and one more; the prompt gives the first.
    assert accepted > TOKENS / 3 and found == TOKENS - 1 - accepted


def run_one(e: Engine, *arguments: Any, **options: Any) -> Handle:
    handle = e.submit(*arguments, **options)
    e.run()
    return handle


def test_a_stop_string_inside_of_accepted_drafts_ends_the_text_there() -> None:
    tokenizer, (tokens, _) = small_model().tokenizer, plain()[1, KINDS.index(EAGER)]
    assert tokenizer is not None
    text, last = tokenizer.decode(tokens), tokenizer.decode(tokens[-1:])
    # The text goes on with one token, of which three drafts a step are accepted: three of four ends are inside of one.
    for count in range(6, 10):
        e = engine()
        handle = run_one(e, PROMPTS[1], TOKENS, EAGER, stop_ids=(), stop=last * count)
        cut = text.index(last * count)
        assert (handle.finish_reason, handle.text) == ("stop", text[:cut])
        assert len(handle.tokens) < TOKENS and handle.tokens == tokens[: len(handle.tokens)]
        assert tokenizer.decode(handle.tokens) == text[:cut] + last * count
        assert e.counters["generated_tokens"] == len(handle.tokens)
        assert_clean(e)


@forms
def test_whoever_leaves_takes_nothing_along(form: str) -> None:
    # Requests that leave with a step on its way: the host has not heard how many rows it took.
    e = engine(pages=7, overcommit=True, model=small_model(**CONFIG, speculative_state=form))
    stays = [e.submit(PROMPTS[i], TOKENS, kind, stop_ids=(), priority=1) for i, kind in ((1, EAGER), (2, GREEDY))]
    for turn in range(5):
        leaves = e.submit(prompt(6 + turn, turn), 20, stop_ids=())
        for _ in range(2 + turn % 2):
            e.step()
        e.cancel(leaves)
        e.pool.check()
    late = [e.submit(PROMPTS[i % 4], TOKENS, kind, stop_ids=()) for i, kind in enumerate(KINDS)]
    e.run()
    for handle in (*stays, *late):
        assert_plain(handle)
    assert e.counters["preemptions"] > 0
    assert_clean(e)


def test_a_shared_prefix_is_resumed() -> None:
    e = engine()
    for cached in (0, 32):
        handle = run_one(e, PROMPTS[2], TOKENS, HOT, stop_ids=())
        assert_plain(handle)
        assert handle.usage.cached_tokens == cached
    assert_clean(e)


def test_a_request_with_logits_that_are_not_finite_ends_alone() -> None:
    tokens, _ = plain()[1, 0]
    bad = tokens[3]
    e = engine(model=dataclasses.replace(poisoned(bad), config=small_model(**CONFIG).config))
    e._debug = False
    handle, other = (e.submit(PROMPTS[1], most, stop_ids=()) for most in (TOKENS, 3))
    e.run()
    assert handle.finish_reason == "error" and other.finish_reason == "length"
    assert handle.tokens == tokens[: tokens.index(bad) + 1]
    assert e.pool.live == ()


# Drafts as many as are worth their time


class Scripted(Pace):
    """Takes widths in turn, as far as anybody wants them."""

    def choose(self, rows: int, wishes: Sequence[tuple[int, float]]) -> int:
        widest = max(drafts for drafts, _ in wishes)
        self.turn = getattr(self, "turn", -1) + 1
        width = self.widths[self.turn % len(self.widths)]
        return min(width, next(w for w in self.widths if w > widest))


def scripted(e: Engine) -> Engine:
    """The engine, whose steps are of every width in turn."""
    e._pace = e._launcher._pace = Scripted(e.config.speculate)
    return e


@forms
def test_steps_of_any_width_give_the_tokens_of_plain_decoding(form: str) -> None:
    e = scripted(engine(model=small_model(**CONFIG, speculative_state=form), adaptive=True, pages=9, overcommit=True))
    widths = collections.Counter[int]()
    begin = e._pace.begin
    e._pace.begin = lambda rows, width: (widths.update([width]), begin(rows, width))
    handles = [
        e.submit(ids, 8 + i, kind, stop_ids=(), speculate=(DRAFTS, 1, 0)[i % 3])
        for i, (ids, kind) in enumerate(zip(PROMPTS * 3, KINDS * 3, strict=False))
    ]
    e.run()
    for handle in handles:
        assert_plain(handle)
    assert_clean(e)
    assert e.counters["preemptions"] > 0
    assert set(widths) == {1, 2, 4} and min(widths.values()) > 5
    assert 0 < e.counters["accepted_tokens"] < e.counters["drafted_tokens"]


def test_an_adaptive_engine_drafts_where_it_pays() -> None:
    e = engine(adaptive=True)
    for width in (1, 2, 4):
        for _ in range(ENOUGH):
            e._pace.begin(4, width)
            e._pace._running[0].seconds.append(1 + 0.3 * width)
    e._pace.end = e._pace.disturb  # the clock stands still, and costs are those
    eager = run_one(e, PROMPTS[1], TOKENS, EAGER, stop_ids=())
    assert eager.fate.rate > 0.6
    steps = e.counters["decode_steps"]
    assert steps < TOKENS - 4
    other = run_one(e, PROMPTS[0], TOKENS, SAMPLED, stop_ids=())
    assert other.fate.rate < 0.5 and e.counters["decode_steps"] - steps > TOKENS - 6
    for handle in (eager, other):
        assert_plain(handle)


def test_an_adaptive_engine_compiles_nothing_after_warming_up() -> None:
    e = scripted(engine(adaptive=True))
    e.warm_up()
    sizes = {name: f._cache_size() for name, f in vars(speculation).items() if name.startswith("run_")}
    handles = [e.submit(prompt(3 + 8 * i, i), 12, kind, stop_ids=()) for i, kind in enumerate(KINDS)]
    e.run()
    assert all(handle.finish_reason == "length" for handle in handles)
    assert {name: f._cache_size() for name, f in vars(speculation).items() if name.startswith("run_")} == sizes


# The draft head


@functools.cache
def tiny(head: str = "weights") -> LanguageModel:
    return load("tiny", dtype="float32", max_length=64, prefill_tokens=16, draft_head=head)


@pytest.mark.parametrize("head", ["weights", pytest.param("fp8", marks=pytest.mark.slow)])
def test_drafts_of_the_head(head: str) -> None:
    tokenizer = tiny().tokenizer
    assert tokenizer is not None
    # The second is cut into windows.
    prompts = [
        tokenizer.encode(text) for text in ("HAMLET. ", "It is a truth universally acknowledged, that a man", "A")
    ]
    assert max(map(len, prompts)) > 16 and min(map(len, prompts)) == 1
    e = engine(model=tiny(head), speculate=2, kv_tokens=None)
    assert e.config.draft_kv

    def serve(speculate: Sequence[int], stop_ids: Sequence[int] = ()) -> list[Handle]:
        each = zip(prompts, speculate, strict=True)
        handles = [e.submit(p, TOKENS, stop_ids=stop_ids, speculate=k) for p, k in each]
        e.run()
        assert_clean(e)
        return handles

    wanted = serve([0, 0, 0])
    assert e.counters["drafted_tokens"] == 0
    for handle, other in zip(serve([2, 2, 1]), wanted, strict=True):
        same(handle, other.tokens, other.logprobs)
    # A head that is fed something else than it was trained on is almost never right.
    assert e.counters["accepted_tokens"] > e.counters["drafted_tokens"] / 3
    # Half of the tokens come as drafts, so some of these stops are.
    for stop in sorted(set(wanted[0].tokens))[:6]:
        handle = serve([2, 2, 2], [stop])[0]
        assert handle.tokens == wanted[0].tokens[: wanted[0].tokens.index(stop) + 1]
        assert handle.finish_reason == "stop"


def test_a_plain_step_leaves_the_head_what_drafts_would() -> None:
    model = random_model(SMALL.replace(mtp_num_hidden_layers=1), seed=1)
    ids, found = PROMPTS[0][:7], []
    for width in (1, 3):
        e = engine(model=model, speculate=2, adaptive=True)
        e._launcher._pace.choose = lambda rows, wishes, width=width: width
        handle = e.submit(ids, 8, stop_ids=())
        while not handle.sent:
            e.step()
        e.step()
        assert handle.request is not None
        page, place = divmod(len(ids) - 1, e.config.page_size)
        slot = int(e.pool.state.page_table[handle.request, page]) * e.config.page_size + place
        found.append([np.asarray(kept[-1][slot]) for kept in (e.pool.state.keys, e.pool.state.values)])
    for plain_step, drafted in zip(*found, strict=True):
        assert np.any(drafted)
        np.testing.assert_allclose(plain_step, drafted, rtol=1e-5, atol=1e-6)


def test_the_head_over_scored_prompts() -> None:
    model = random_model(SMALL.replace(mtp_num_hidden_layers=1), seed=1)
    e = engine(model=model, speculate=2)
    tokens, logprobs = plain()[0, 0]
    np.testing.assert_allclose(e.score(PROMPTS[0], tokens), logprobs, atol=1e-3)
    assert_clean(e)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(speculate=8), "speculate = 8; it takes an integer from 0"),
        (dict(speculate=2, drafts="mtp"), "this model has no draft head"),
        (dict(speculate=2, drafts="guess"), "drafts = 'guess'; it takes mtp or ngram"),
        (dict(speculate=0, drafts="ngram"), "drafts = 'ngram' with speculate = 0"),
        (dict(speculate=0, adaptive=True), "adaptive = True with speculate = 0; give most drafts"),
        (
            dict(speculate=0, model=FP8),
            "draft_head = 'fp8' with speculate = 0 and drafts = 'mtp': nobody drafts with it",
        ),
        (dict(speculate=2, drafts="ngram", model=FP8), "draft_head = 'fp8' with speculate = 2 and drafts = 'ngram'"),
    ],
)
def test_what_cannot_speculate_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**arguments)


def test_a_request_takes_no_more_drafts_than_its_engine() -> None:
    for most in (DRAFTS, 0):
        with pytest.raises(ValueError, match=f"speculate = {most + 1}; this engine takes 0 .* to {most}"):
            engine(speculate=most).submit([1], 2, speculate=most + 1)

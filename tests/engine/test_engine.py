"""The engine on a small model: every request gets what it gets alone, whatever else happens."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.engine import Engine, Handle, QueueFull, programs
from gdnjax.engine.constraint import json_schema
from gdnjax.engine.launcher import Flight
from gdnjax.engine.programs import pack
from gdnjax.engine.receiver import FLOOD, Receiver
from gdnjax.generation import NonFiniteLogitsError, SamplingParams
from gdnjax.generation.loop import Emission
from gdnjax.sizes import MOST_REQUESTS, derive_limits
from gdnjax.state import device as on_device
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.pool import StatePool
from gdnjax.state.prefix_cache import PrefixCache
from tests.generation.small import GREEDY, NEAR_TIE, PROMPTS, SMALL, STOP_ID, small_model
from tests.generation.small import run as generate_alone

pytestmark = pytest.mark.usefixtures("quick_compilation")

# One config for all tests: every other one would compile every program again.
CONFIG = dict(state_layout="twin", prefix_cache_bytes=4 * snapshot_bytes(SMALL), prefix_interval=16)
REQUESTS, TOKENS = 4, 16 * 16
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=7)
WHOLE = SamplingParams(temperature=0.7, seed=3)
PENALIZED = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.2, seed=5)


def engine(pages: int | None = None, **arguments: Any) -> Engine:
    """`pages`: fewer KV pages than the cache has, so that requests wait for them."""
    limits = dict(max_requests=REQUESTS, kv_tokens=TOKENS, chunk_tokens=16)
    e = Engine(small_model(**CONFIG), **(limits | arguments))
    if pages is not None:
        e.pool.pages = Pages(pages, e.config.page_size)
        e.pool.prefixes = PrefixCache(e.pool.pages, 4, 16)
    return e


def drive(e: Engine) -> Iterator[int]:
    """Steps until nothing is left; yields the number of steps so far after each."""
    steps = 0
    while True:
        more = e.step()
        steps += 1
        yield steps
        if not more:
            return


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 250, length)]


@functools.cache
def alone(ids: tuple[int, ...], count: int, sampling: SamplingParams = GREEDY) -> Handle:
    """The request in an engine that serves nobody else."""
    e = engine()
    handle = e.submit(ids, count, sampling, stop_ids=())
    e.run()
    return handle


def assert_alone(handle: Handle) -> None:
    """The tokens of a lone run, or a near-tie, which ends the comparison and is printed."""
    wanted = alone(handle.prompt, handle.max_new_tokens, handle.sampling)
    for i, (a, b) in enumerate(zip(handle.tokens, wanted.tokens, strict=False)):
        gap = abs(handle.logprobs[i] - wanted.logprobs[i])
        if a != b:
            print(f"request {handle.number}, token {i}: {a} or {b}, gap {gap:.2g}")
            assert handle.sampling.temperature == 0 and gap < NEAR_TIE
            return
        assert gap < 1e-3
    assert len(handle.tokens) == len(handle.logprobs)
    assert handle.finish_reason in ("cancelled", "deadline") or len(handle.tokens) == len(wanted.tokens)


def assert_clean(e: Engine) -> None:
    """Nothing is left of anybody."""
    assert (e.waiting, e.running, e.pool.live) == (0, 0, ())
    assert e.pool.requests.free == e.config.max_requests
    assert e.pool.pages.free + e.pool.pages.idle == e.pool.pages.count
    e.pool.check(device=True)


def test_nothing_compiles_after_warming_up_and_memory_is_flat() -> None:
    # First in this file, so that what it compiles again serves the others too.
    for module in (programs, on_device):
        for name in vars(module):
            if name.startswith("run_"):
                getattr(module, name).clear_cache()
    held_to = json_schema(small_model(), {"type": "string"})
    e = engine(pages=6, overcommit=True)
    e.warm_up()
    compiled: list[str] = []
    watching = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if watching and "backend_compile" in name else None
    )

    def serve(seed: int) -> None:
        kinds = (GREEDY, SAMPLED, PENALIZED, WHOLE, GREEDY)
        handles = [e.submit(prompt(3 + 8 * i, seed + i), 24, kind, stop_ids=[STOP_ID]) for i, kind in enumerate(kinds)]
        handles.append(e.submit(prompt(9, seed), 2, prompt_logprobs=True))
        handles += [e.submit(prompt(5, seed), 20, WHOLE, stop_ids=[STOP_ID], constraint=held_to) for _ in range(2)]
        for _ in range(4):
            e.step()
        e.cancel(handles[1])
        e.run()

    def live() -> int:
        e._launcher._rows.clear()  # those of the last steps are kept, and differ
        gc.collect()
        return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())

    serve(0)
    before = live()
    for seed in range(1, 5):
        serve(seed)
    assert e.counters["preemptions"] > 0 and e.counters["prefixes_kept"] > 0
    watching.clear()
    assert compiled == []
    assert live() == before
    assert_clean(e)


def test_requests_of_all_kinds_get_what_they_get_alone() -> None:
    e = engine()
    kinds = [GREEDY, SAMPLED, WHOLE, PENALIZED]
    handles = [
        e.submit(ids, 6 + 3 * i, dataclasses.replace(kind, seed=i + 1), stop_ids=())
        for i, (ids, kind) in enumerate([(p, k) for p in PROMPTS for k in kinds])
    ]
    assert e.waiting == 16
    for _ in drive(e):
        assert e.running <= REQUESTS
    for handle in handles:
        assert handle.finish_reason == "length"
        assert_alone(handle)
    assert e.counters["decode_steps"] < sum(len(h.tokens) for h in handles) / 2  # they ran together
    assert_clean(e)


def test_the_same_rows_give_the_same_bits_whatever_else_runs() -> None:
    def run(others: int) -> Handle:
        e = engine()
        e._launcher.row_buckets, e._launcher.token_buckets = [4], [16]
        early = [e.submit(prompt(4, 20 + i), 14, PENALIZED, stop_ids=()) for i in range(others - 1)]
        for _ in range(len(early)):
            e.step()
        if others:
            e.submit(prompt(5, 30), 9, WHOLE, stop_ids=())
        handle = e.submit(prompt(7, 1), 12, SAMPLED, stop_ids=())
        e.run()
        return handle

    first = run(0)
    for others in (1, 3):
        found = run(others)
        assert found.tokens == first.tokens
        assert found.logprobs == first.logprobs


def test_a_stream_is_what_generate_gives() -> None:
    e, model = engine(), small_model()
    heard: list[Any] = []
    handles = [e.submit("the thé", 12, stop_ids=(), on_piece=heard.append), e.submit("a", 9, stop_ids=())]
    pieces = [list(e.stream(handle)) for handle in handles]
    wanted = generate_alone(model, [list(h.prompt) for h in handles], [12, 9], tokenizer=model.tokenizer)
    for handle, parts, result in zip(handles, pieces, wanted, strict=True):
        assert [t for p in parts for t in p.tokens] == handle.tokens == result.tokens
        assert "".join(p.text for p in parts) == handle.text == result.text
        found = [x for p in parts for x in p.logprobs]
        np.testing.assert_allclose(found, result.logprobs, atol=5e-4)
        assert list(e.stream(handle)) == []
    assert heard == [*pieces[0], None]
    assert_clean(e)


def test_nobody_at_the_door_waits_for_a_step() -> None:
    e = engine(max_waiting=2)
    first = e.submit(PROMPTS[0], 6, stop_ids=())
    e.step()
    seen: list[Any] = []

    def visit() -> None:
        seen.append(e.submit(PROMPTS[1], 3, stop_ids=()))
        seen.append(e.submit(PROMPTS[1], 4, stop_ids=()))
        e.cancel(seen[0])
        e.cancel(first)
        with pytest.raises(QueueFull):
            e.submit(PROMPTS[1], 3)
        seen.append(first.done)

    with e._lock:  # as while a step runs
        thread = threading.Thread(target=visit)
        thread.start()
        thread.join(10)
        assert len(seen) == 3 and seen[2] is False
        assert e.waiting == 2
    e.run()
    assert (first.finish_reason, seen[0].finish_reason, seen[1].finish_reason) == ("cancelled", "cancelled", "length")
    assert_alone(seen[1])
    assert_clean(e)


def test_stop_ids_and_stop_strings() -> None:
    e = engine()
    free = e.submit(PROMPTS[0], 20, stop_ids=())
    e.run()
    assert free.text is not None
    by_id = e.submit(PROMPTS[0], 20, stop_ids=[free.tokens[5]])
    cut = free.text[6:9]  # over token boundaries
    by_text = e.submit(PROMPTS[0], 20, stop_ids=[], stop=cut)
    e.run()
    first = free.tokens.index(free.tokens[5])
    assert (by_id.finish_reason, by_id.tokens) == ("stop", free.tokens[: first + 1])
    assert by_text.finish_reason == "stop" and by_text.text == free.text[: free.text.index(cut)]
    assert by_text.usage.prompt_tokens == len(PROMPTS[0]) and by_text.usage.completion_tokens == len(by_text.tokens)
    assert_clean(e)


def test_cancelling_and_deadlines_at_any_moment() -> None:
    now = [0.0]
    e = engine(clock=lambda: now[0])
    for moment in range(12):
        handles = [
            e.submit(prompt(5 + 9 * i, i), 8, stop_ids=(), timeout=moment + 0.5 if i == 2 else None) for i in range(6)
        ]
        start = now[0]
        while e.step():
            now[0] += 1
            if now[0] - start == moment:
                for handle in handles[1::2]:
                    e.cancel(handle)
        e.cancel(handles[0])  # it has ended
        for i, handle in enumerate(handles):
            assert handle.done
            if i % 2 == 0 and i != 2:
                assert handle.finish_reason == "length"
            assert_alone(handle)
        now[0] += 100
        assert_clean(e)
    assert e.counters["finished_cancelled"] > 10 and e.counters["finished_deadline"] > 3


def test_preemption_by_recompute() -> None:
    e = engine(overcommit=True, kv_tokens=6 * 16)
    handles = [
        e.submit(prompt(14, i), 40, kind, stop_ids=()) for i, kind in enumerate((GREEDY, SAMPLED, PENALIZED, WHOLE))
    ]
    e.run()
    assert e.counters["preemptions"] > 0 and max(h.usage.preemptions for h in handles) > 0
    assert handles[0].usage.preemptions == 0  # the first in order of service keeps its place
    for handle in handles:
        assert handle.finish_reason == "length" and len(handle.tokens) == 40
        assert_alone(handle)
    assert_clean(e)


def test_priorities_and_order() -> None:
    e = engine()
    low = [e.submit(prompt(5, i), 5, stop_ids=()) for i in range(6)]
    high = e.submit(prompt(5, 9), 5, stop_ids=(), priority=1)
    ended: list[Handle] = []
    for _ in drive(e):
        ended += [h for h in [*low, high] if h.done and h not in ended]
    order = [h.number for h in ended]
    assert order.index(high.number) < 4
    assert [n for n in order if n != high.number] == sorted(h.number for h in low)


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    e = engine(pages=5)
    first = e.submit(prompt(20, 0), 12, stop_ids=())  # two pages
    large = e.submit(prompt(40, 1), 24, stop_ids=())  # four
    small = [e.submit(prompt(4, i), 4, stop_ids=()) for i in range(4)]
    ended: list[Handle] = []
    for _ in drive(e):
        ended += [h for h in [first, large, *small] if h.done and h not in ended]
    assert ended[0] is first and all(h.usage.preemptions == 0 for h in ended)
    assert large.finish_reason == "length"


def test_a_shared_prefix_is_read_once() -> None:
    e = engine()
    shared = prompt(40, 4)
    first = e.submit([*shared, 1, 2, 3], 6, stop_ids=())
    e.run()
    again = [e.submit([*shared, *prompt(7, i)], 6, stop_ids=()) for i in (5, 6)]
    e.run()
    assert first.usage.cached_tokens == 0
    assert [h.usage.cached_tokens for h in again] == [32, 32]
    assert (e.counters["prefix_hits"], e.counters["prefix_tokens"]) == (2, 64)
    for handle in (first, *again):
        assert_alone(handle)
    assert e.counters["prefill_tokens"] == 43 + 2 * 15
    e.pool.prefixes.clear()
    assert_clean(e)


def test_prompts_and_continuations_are_scored() -> None:
    e, model = engine(), small_model()
    ids = prompt(50, 7)
    logits = np.asarray(model.logits([ids]))[0].astype(np.float64)
    every = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = [every[i, token] for i, token in enumerate(ids[1:])]
    others = [e.submit(prompt(20, i), 10, stop_ids=()) for i in range(2)]
    handle = e.submit(ids, 5, stop_ids=(), prompt_logprobs=True)
    e.run()
    np.testing.assert_allclose(handle.prompt_logprobs, wanted, atol=5e-4)
    for one in (handle, *others):
        assert_alone(one)
    assert others[0].prompt_logprobs == []
    e.pool.prefixes.clear()
    e.submit(ids, 1)
    e.run()  # a prefix is known now, and is not what the scores come from
    for cut in (1, 30, 49):
        np.testing.assert_allclose(e.score(ids[:cut], ids[cut:]), wanted[cut - 1 :], atol=5e-4)
    for call in (lambda: e.score([], [1]), lambda: e.score([1], [])):
        with pytest.raises(ValueError, match="is empty; it takes at least one token"):
            call()
    assert_clean(e)


def test_a_prompt_that_is_preempted_is_scored_once() -> None:
    e = engine(overcommit=True)
    ids = prompt(50, 7)
    wanted = e.submit(ids, 2, stop_ids=(), prompt_logprobs=True)
    e.run()
    other = e.submit(prompt(4, 1), 20, stop_ids=(), priority=1)
    e.step()  # a window is shared with nobody, but it is short while somebody decodes
    again = e.submit(ids, 2, stop_ids=(), prompt_logprobs=True)
    for _ in range(2):
        e.step()
    with e._lock:
        e._make_room([])
    assert again.usage.preemptions == 1 and 0 < len(again.prompt_logprobs) < len(ids) - 1
    e.run()
    assert len(again.prompt_logprobs) == len(ids) - 1
    np.testing.assert_allclose(again.prompt_logprobs, wanted.prompt_logprobs, atol=5e-4)
    assert_alone(again)
    assert_alone(other)
    assert_clean(e)


def test_clients_in_threads() -> None:
    e = engine(pages=8, overcommit=True, max_waiting=3)
    ended: list[Handle] = []
    refused = [0]

    def client(number: int) -> None:
        rng = random.Random(number)
        for turn in range(6):
            ids = [*prompt(rng.choice([0, 17, 20]), 40), *prompt(rng.randint(1, 12), rng.randint(0, 99))]
            # Greedy: where a window is cut depends on time here, and a draw has no near-tie that could be told.
            kind = rng.choice([GREEDY, dataclasses.replace(PENALIZED, temperature=0.0)])
            while True:
                try:
                    handle = e.submit(ids, rng.randint(1, 20), kind, stop_ids=(), priority=turn % 2)
                    break
                except QueueFull:
                    refused[0] += 1
                    time.sleep(0.002)
            patience = rng.choice([0.0, 0.02, 60.0, 60.0])
            start = time.monotonic()
            while not handle.done:
                if time.monotonic() - start > patience:
                    e.cancel(handle)
                time.sleep(0.001)
            ended.append(handle)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        e.step()
    for thread in threads:
        thread.join()
    e.run()
    reasons = collections.Counter(h.finish_reason for h in ended)
    assert sum(reasons.values()) == 48 and set(reasons) == {"length", "cancelled"}
    assert refused[0] > 0
    for handle in ended:
        assert_alone(handle)
    assert_clean(e)


def test_refusals() -> None:
    e = engine(pages=3, max_waiting=2)
    for call, message in (
        (lambda: e.submit([], 5), "prompt 0 is empty"),
        (lambda: e.submit([1, 262], 5), "token id 262; it takes 0 to"),
        (lambda: e.submit([1], 0), "max_new_tokens = 0; it takes an integer >= 1"),
        (lambda: e.submit([1] * 64, 5), "has 64 tokens; it takes at most max_length - 1 = 63"),
        (lambda: e.submit([1] * 40, 20), r"do not fit into kv_tokens = 256; ask for fewer"),
        (lambda: e.submit([1], 5, stop=""), "takes strings of at least one character"),
        (lambda: e.submit([1], 5, timeout=0), "timeout = 0; it takes a number of seconds > 0"),
        (lambda: engine(chunk_tokens=0), "chunk_tokens = 0; it takes an integer >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert e.waiting == 0
    e.submit([1], 2)
    e.submit([1], 2)
    with pytest.raises(QueueFull, match="2 requests wait, as many as max_waiting takes; try again later"):
        e.submit([1], 2)
    e.run()
    e.submit([1], 2)


def test_logits_that_are_not_finite_end_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), small_model().params)
    for debug in (True, False):
        e = engine()
        monkeypatch.setattr(e, "_debug", debug)
        e._launcher.params = broken
        handle = e.submit(PROMPTS[0], 5)
        if debug:
            with pytest.raises(NonFiniteLogitsError, match=r"requests \[0\]: the logits are NaN"):
                e.run()
        else:
            e.run()
        assert (handle.finish_reason, handle.tokens) == ("error", [])
        e._launcher.params = small_model().params
        assert_clean(e)
        after = e.submit(PROMPTS[0], 5, stop_ids=())
        e.run()
        assert_alone(after)


@pytest.mark.parametrize("program", ["run_prefill", "run_decode", "run_draw"])
def test_after_an_error_of_the_device_everybody_goes_on(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine()
    handles = [
        e.submit(p, 12, kind, stop_ids=()) for p, kind in zip(PROMPTS, (GREEDY, SAMPLED, PENALIZED, WHOLE), strict=True)
    ]
    original, calls = getattr(programs, program), [0]

    def fails_at_times(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        out = original(*arguments, **named)  # takes the memory of the state first
        if calls[0] in (2, 5):
            raise MemoryError("no memory on the device")
        return out

    monkeypatch.setattr(programs, program, fails_at_times)
    failures, more = 0, True
    while more:
        try:
            more = e.step()
        except MemoryError:
            failures += 1
    assert failures == 2
    for handle in handles:
        assert handle.finish_reason == "length"
        assert_alone(handle)
    assert_clean(e)


def test_requests_under_which_steps_keep_failing_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode step that never works, then a pool that cannot be made: neither goes on for ever."""
    e = engine()
    ended: list[Any] = []

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory on the device")

    for name in ("run_decode", "_make_pool", "acquire"):
        with monkeypatch.context() as patch:
            owner = {"run_decode": programs, "_make_pool": e, "acquire": StatePool}[name]
            patch.setattr(owner, name, fails)
            handles = [e.submit(p, 12, stop_ids=(), on_piece=ended.append) for p in PROMPTS[:2]]
            e._lost = name == "_make_pool"
            steps = failures = 0
            while e.waiting or e.running:
                try:
                    e.step()
                except MemoryError:
                    failures += 1
                steps += 1
                assert steps < 20
            # Who is admitted is tried three times, and so is each that waits for it.
            assert failures == (6 if name == "acquire" else 3)
            assert [h.finish_reason for h in handles] == ["error", "error"]
    assert ended == [None] * 6
    after = e.submit(PROMPTS[0], 12, stop_ids=())
    e.run()
    assert_alone(after)
    assert_clean(e)


def test_a_flood_of_token_0_ends_a_request() -> None:
    e, model = engine(), small_model()
    sane = model.params
    # Flat logits, as kernels that write nothing leave them: all tokens are alike, and 0 comes first.
    e._launcher.params = jax.tree.map(jnp.zeros_like, sane)
    flooded = e.submit(PROMPTS[0], 50, stop_ids=())
    short = e.submit(PROMPTS[1], FLOOD - 1, stop_ids=())
    e.run()
    assert (flooded.finish_reason, flooded.tokens) == ("error", [0] * FLOOD)
    assert (short.finish_reason, short.tokens) == ("length", [0] * (FLOOD - 1))
    e._launcher.params = sane
    # A model that is sure of it may say the same for as long as it likes.
    handle = e.submit(PROMPTS[0], 50, stop_ids=())
    for _ in drive(e):
        for i, flight in enumerate(e._launcher.flights):
            assert isinstance(flight, Flight)
            zeros = jnp.zeros(len(flight.emission[0]), jnp.int32)
            e._launcher.flights[i] = Flight(pack(Emission(zeros, jnp.full(zeros.shape, -0.1))), flight.handles)
    assert (handle.finish_reason, handle.tokens) == ("length", [0] * 50)
    assert_clean(e)


def test_tokens_0_that_do_not_follow_each_other_are_no_flood() -> None:
    e, ended = engine(), []
    handle = e.submit(PROMPTS[0], 50, stop_ids=())
    receiver = Receiver(collections.Counter())
    for number in range(49):
        token = jnp.asarray([9 if number == FLOOD - 1 else 0], jnp.int32)
        flight = Flight(pack(Emission(token, jnp.full(1, -3.0))), [handle])
        receiver.receive([flight], lambda *end: ended.append(end))
    assert ended == [] and len(handle.tokens) == 49 and handle.tokens.count(0) > FLOOD


def test_limits_of_the_config_hold_unless_others_are_given() -> None:
    model = small_model(**CONFIG, kv_tokens=96, max_requests=3)
    assert (Engine(model).config.max_requests, Engine(model).config.kv_tokens) == (3, 96)
    given = Engine(model, max_requests=2, kv_tokens="auto").config
    assert (given.max_requests, given.kv_tokens) == (2, derive_limits(model.config, 2).kv_tokens)
    assert given.kv_tokens != 96
    assert Engine(small_model(**CONFIG), max_requests="auto", kv_tokens=64).config.max_requests == MOST_REQUESTS


def test_decode_steps_find_everything_where_the_last_left_it() -> None:
    # What lies elsewhere than before must be told to a GPU's graph of kernels, at each step.
    e = engine()
    for seed in range(REQUESTS):
        e.submit(prompt(5, seed), 40, stop_ids=())
    for _ in range(8):
        e.step()
    places: list[list[int]] = []
    emissions = set[int]()
    for _ in range(8):
        e.step()
        kept = jax.tree.leaves((e.pool.state, e._launcher.slate, e._launcher._logits))
        places.append([array.unsafe_buffer_pointer() for array in kept])
        emissions |= {f.emission.unsafe_buffer_pointer() for f in e._launcher.flights if isinstance(f, Flight)}
    assert all(place == places[0] for place in places)
    # One is on its way, one is fetched, one was there for the draw behind the prompts.
    assert 2 <= len(emissions) <= 3

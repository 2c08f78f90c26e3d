"""Runs that are traced and guarded give what others give, through a pool, `generate` and the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from gdnjax.cli import main
from gdnjax.diagnosis.trace import read_trace
from gdnjax.engine import Engine
from gdnjax.model import verify_step
from gdnjax.state import State, verify_batch
from tests.generation.small import PROMPTS, run, small_model
from tests.helpers import assert_same_bits
from tests.state.pools import MICRO, Driver, micro

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Both in one window, and with as many tokens to come both in every step: two programs serve them.
SHORT = [PROMPTS[0], PROMPTS[0][:6]]


@jax.jit
def verify(params: Any, state: State, batch: Any) -> tuple[jax.Array, State]:
    logits, _, state = verify_step(params, state, batch)
    return logits, state


def life(driver: Driver) -> list[np.ndarray]:
    """Logits of requests that speculate, fork, are reset, saved and go, until all places have been taken."""
    pool, found = driver.pool, []

    def step(pieces: dict[int, list[int]], accepted: dict[int, int]) -> None:
        plan = pool.plan_verify({r: len(ids) for r, ids in pieces.items()})
        batch = verify_batch(driver.config, pieces, MICRO.max_requests)
        logits = np.asarray(pool.run(plan, lambda state: verify(driver.params, state, batch)))
        pool.commit(accepted)
        found.extend(logits[i, : len(ids)] for i, ids in enumerate(pieces.values()))

    first = driver.start(range(1, 8), limit=30)
    second = driver.start([9, 8, 7], limit=20)
    step({first: [4, 5, 6], second: [1]}, {first: 2, second: 1})
    third = pool.fork(first)
    step({third: [1, 2], second: [2, 5, 5], first: [3]}, {third: 1, second: 3, first: 1})
    pool.reset(second)
    driver.walk({second: [3] * 9})
    kept = pool.snapshot(third)
    pool.release(first)
    fourth = pool.restore(kept, limit=30)
    for token in range(5):
        step({second: [token], fourth: [2, 3, token], third: [4, token]}, {second: 1, fourth: 1 + token % 3, third: 2})
    pool.check(device=True)
    return found


def test_a_guarded_pool_on_records_does_what_one_on_slots_does(
    traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traced("plain")
    config = micro("in_place").replace(speculate=2, speculative_state="slots")
    plain = Driver(config)
    expected = life(plain)
    other = traced("guarded")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    driver = Driver(micro("twin").replace(speculate=2))
    driver.config = driver.pool.config
    assert driver.pool.requests.most == config.max_requests
    assert driver.pool.pages.count == config.kv_pages
    for found, logits in zip(life(driver), expected, strict=True):
        assert_same_bits(found, logits)
    assert sorted(driver.pool.live) == [2 * request for request in sorted(plain.pool.live)]
    assert main(["trace", "diff", path, other]) == 0
    assert capsys.readouterr().out.endswith(" checksums compared: equal\n")
    one, two = (read_trace(p)[0].entries for p in (path, other))
    assert {e.kind for e in one} == {"prefill", "verify"}
    assert {e.behind for e in one} == {0} and {e.behind for e in two} == {0, 1, 2, 3}
    assert all("record" in e.sums for e in two) and not any("record" in e.sums for e in one)


def test_generation_that_speculates(traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [5, 1]
    expected = [result.tokens for result in run(small_model(), SHORT, limits, loop="python")]
    path = traced("guarded")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    found = run(small_model(speculate=2), SHORT, limits, drafts="ngram", loop="device")
    assert [result.tokens for result in found] == expected
    (traced_run,) = read_trace(path)
    seen = [(e.step, e.kind, e.request) for e in traced_run.entries]
    prefill = [(0, "prefill", i) for i in range(2)]
    assert seen == prefill + [(step, "verify", 0) for step in range(1, 1 + found[0].steps)]
    assert traced_run.entries[-1].position == len(SHORT[0]) + limits[0] - 1


@pytest.mark.parametrize("speculate", [0, 2])
def test_an_engine(speculate: int, traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [result.tokens for result in run(small_model(), SHORT, 4, loop="python")]
    path = traced("engine")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    speculation: Any = {"speculate": speculate, "drafts": "ngram"} if speculate else {}
    engine = Engine(small_model(), max_requests=2, kv_tokens=8 * 16, chunk_tokens=16, **speculation)
    handles = [engine.submit(prompt, 4, stop_ids=()) for prompt in SHORT]
    engine.run()
    assert [handle.tokens for handle in handles] == expected
    (traced_run,) = read_trace(path)
    seen = [(e.kind, e.request, e.position - len(SHORT[e.request])) for e in traced_run.entries]
    assert seen[:2] == [("prefill", 0, 0), ("prefill", 1, 0)]
    if not speculate:
        assert seen[2:] == [("decode", i, step) for step in (1, 2, 3) for i in range(2)]
    else:
        # Once a step, when it has run: a step that is settled later is the same step.
        steps = [(e.step, e.request) for e in traced_run.entries]
        assert len(set(steps)) == len(steps) and {kind for kind, _, _ in seen[2:]} == {"verify"}
        assert [max(p for _, r, p in seen if r == i) for i in range(2)] == [3, 3]
        assert [e.step for e in traced_run.entries if e.request == 0] == list(range(len(steps) // 2))

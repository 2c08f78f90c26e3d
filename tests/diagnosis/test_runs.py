"""Runs that are traced and guarded give what others give, through a pool, `generate` and the engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gdnjax.cli import main
from gdnjax.diagnosis.trace import read_trace
from gdnjax.engine import Engine
from tests.generation.small import PROMPTS, run, small_model
from tests.helpers import assert_same_bits
from tests.state.pools import MICRO, Driver, micro

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Both in one window, and with as many tokens to come both in every step: two programs serve them.
SHORT = [PROMPTS[0], PROMPTS[0][:6]]


def life(driver: Driver) -> list[np.ndarray]:
    """Logits of requests that come, fork, are reset and go, until all places and nearly all pages have been taken."""
    pool = driver.pool
    first = driver.start(range(1, 8), limit=20)
    second = driver.start([9, 8, 7], limit=20)
    found = driver.feed(first, [4, 5])
    third = pool.fork(first)
    found += driver.step({third: 1, second: 2, first: 3}).values()
    pool.reset(second)
    driver.walk({second: [3] * 9})
    kept = pool.snapshot(third)
    pool.release(first)
    fourth = pool.restore(kept, limit=20)
    for token in range(6):
        found += driver.step({second: token, fourth: 2, third: token}).values()
    pool.check(device=True)
    return found


def test_a_guarded_pool_in_place_does_what_a_twin_does(
    traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = traced("plain")
    plain = Driver(micro("twin"))
    expected = life(plain)
    other = traced("guarded")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    driver = Driver(micro("in_place"))
    driver.config = driver.pool.config
    assert driver.pool.requests.most == MICRO.max_requests
    assert driver.pool.pages.count == MICRO.kv_pages
    for found, logits in zip(life(driver), expected, strict=True):
        assert_same_bits(found, logits)
    assert sorted(driver.pool.live) == [2 * request for request in sorted(plain.pool.live)]
    assert main(["trace", "diff", path, other]) == 0
    count = 4 * len(read_trace(path)[0].entries)
    assert capsys.readouterr().out == f"{count} checksums compared: equal\n"


def test_generation(traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [5, 1]
    expected = [result.tokens for result in run(small_model(), SHORT, limits, loop="python")]
    path = traced("guarded")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    found = run(small_model(), SHORT, limits, loop="device")
    assert [result.tokens for result in found] == expected
    (traced_run,) = read_trace(path)
    seen = [(e.step, e.kind, e.request, e.position - len(SHORT[e.request])) for e in traced_run.entries]
    prefill = [(0, "prefill", i, 0) for i in range(2)]
    assert seen == prefill + [(step, "decode", 0, step) for step in range(1, 5)]


def test_an_engine(traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [result.tokens for result in run(small_model(), SHORT, 4, loop="python")]
    path = traced("engine")
    monkeypatch.setenv("GDNJAX_GUARD", "1")
    engine = Engine(small_model(), max_requests=2, kv_tokens=8 * 16, chunk_tokens=16)
    handles = [engine.submit(prompt, 4, stop_ids=()) for prompt in SHORT]
    engine.run()
    assert [handle.tokens for handle in handles] == expected
    (traced_run,) = read_trace(path)
    seen = [(e.kind, e.request, e.position - len(SHORT[e.request])) for e in traced_run.entries]
    prefill = [("prefill", i, 0) for i in range(2)]
    assert seen == prefill + [("decode", i, step) for step in (1, 2, 3) for i in range(2)]

"""The soak, for seconds, on a small model: what it finds when all is well, and that it finds what is not."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from gdnjax.engine import Engine
from gdnjax.loading import random_model
from gdnjax.state.device import snapshot_bytes
from tests.generation.small import NEAR_TIE, SMALL, small_model
from tests.server.serving import running

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    sys.path.insert(0, str(SCRIPTS))
    import soak

    yield soak
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def engine() -> Engine:
    lm = small_model(prefix_cache_bytes=4 * snapshot_bytes(SMALL), prefix_interval=16, prefill_tokens=16)
    return Engine(lm, max_requests=8, kv_tokens=12 * 16, max_waiting=16, overcommit=True)


def test_of_two_hundred_at_once_each_is_answered_or_refused(scripts: Any, engine: Engine) -> None:
    # First in this file, so that the soak's seconds are not spent compiling.
    target = scripts.EngineTarget(engine)
    with target.running():
        report = scripts.burst(target, scripts.asks(12, 40, 20, seed=2), 200, NEAR_TIE)
    assert report["failures"] == []
    assert report["complete"] + report["refused"] == 200
    # as many as run and wait at the least
    assert report["complete"] >= 16 and report["refused"] > 0


def test_nothing_is_left_of_clients_that_come_and_go(scripts: Any, engine: Engine) -> None:
    target = scripts.EngineTarget(engine)
    with target.running():
        report = scripts.soak(target, scripts.asks(12, 40, 20, seed=1), 12, 2.0, NEAR_TIE)
    assert report["failures"] == []
    assert min(report["complete"], report["left"]) > 5
    assert report["counters"]["preemptions"] > 0 and report["counters"]["finished_cancelled"] > 0
    assert report["memory"]["rss"]["last_quarter"] > 10**7
    json.dumps(report)


def test_the_same_while_requests_speculate(scripts: Any) -> None:
    lm = small_model(prefix_cache_bytes=4 * snapshot_bytes(SMALL), prefix_interval=16, prefill_tokens=16)
    lm = dataclasses.replace(lm, config=lm.config.replace(state_layout="twin"))
    engine = Engine(lm, max_requests=8, kv_tokens=12 * 16, max_waiting=16, overcommit=True, speculate=2, drafts="ngram")
    # One shape: nothing compiles while clients wait.
    engine._launcher.row_buckets, engine._launcher.token_buckets = [8], [16]
    # Long answers repeat themselves, so that lookups are right.
    target, asks = scripts.EngineTarget(engine), scripts.asks(8, 40, 20, seed=2)
    asks = [*asks, *(scripts.Ask((token,), 60) for token in (1, 2, 17, 5))]
    with target.running():
        crowd = scripts.burst(target, asks, 200, NEAR_TIE)
        report = scripts.soak(target, asks, 12, 2.0, NEAR_TIE)
    assert crowd["failures"] == report["failures"] == []
    assert crowd["complete"] + crowd["refused"] == 200 and crowd["complete"] >= 16 and crowd["refused"] > 0
    assert min(report["complete"], report["left"]) > 0
    counters = engine.counters
    assert counters["preemptions"] > 0 and counters["finished_cancelled"] > 0 and counters["prefix_hits"] > 0
    assert 0 < counters["accepted_tokens"] < counters["drafted_tokens"]


def test_the_same_over_http(scripts: Any, engine: Engine) -> None:
    with running(engine, api_key=None) as server:
        target = scripts.ServerTarget(server.url, 60, os.getpid())
        with target.running():
            crowd = scripts.burst(target, scripts.asks(12, 40, 20, seed=2), 60, NEAR_TIE)
            report = scripts.soak(target, scripts.asks(12, 40, 20, seed=1), 12, 2.0, NEAR_TIE)
    assert crowd["failures"] == report["failures"] == []
    assert crowd["complete"] + crowd["refused"] == 60 and crowd["complete"] >= 16 and crowd["refused"] > 0
    assert min(report["complete"], report["left"]) > 0 and report["memory"]["rss"]["last_quarter"] > 10**7
    assert report["server"]["preemptions_total"] > 0 and report["server"]["prefix_hits_total"] > 0
    assert engine.counters["finished_cancelled"] > 0 and engine.pool.live == ()


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("a slot", "a slot was not given back"),
        ("a page", "pages leaked"),
        ("an answer that fails", "the server answered 500"),
        ("a refusal that does not say until when", "the server answered 429"),
        ("another answer", "alone"),
        ("no thread", "/health says 503"),
    ],
)
def test_what_is_wrong_with_a_server_is_found(
    scripts: Any, engine: Engine, fault: str, failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.pool, "debug", False)
    with running(engine, api_key=None) as server:
        target = scripts.ServerTarget(server.url, 2, None)
        ask, asked = target.ask, [0]

        def refuse() -> None:
            monkeypatch.setattr(engine._door, "_max_waiting", 0)
            settings = dataclasses.replace(server.service.settings, retry_after=None)
            monkeypatch.setattr(server.service, "settings", settings)

        faults: dict[str, Callable[[], Any]] = {
            "a slot": lambda: engine.pool.requests._free.pop(),
            "a page": lambda: engine.pool.pages._free.pop(),
            "an answer that fails": lambda: monkeypatch.setattr(engine, "submit", lambda *_, **__: 1 / 0),
            "a refusal that does not say until when": refuse,
            "another answer": lambda: monkeypatch.setattr(
                engine._launcher, "params", random_model(SMALL, seed=2).params
            ),
            "no thread": lambda: monkeypatch.setattr(type(server.service.worker), "alive", False),
        }

        def answered(one: Any, leave_after: int | None = None) -> Any:
            asked[0] += 1
            if asked[0] == 2:
                faults[fault]()
            return ask(one, leave_after)

        monkeypatch.setattr(target, "ask", answered)
        with target.running():
            report = scripts.burst(target, [scripts.Ask((5, 9, 2), 2)], 2, NEAR_TIE)
    assert any(failure in found for found in report["failures"]), report["failures"]


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("another token", "alone"),
        ("a token too few", "1 tokens, alone 2"),
        ("an error", "RuntimeError: the engine failed"),
        ("a slot", "a slot was not given back"),
        ("a page", "1 pages leaked"),
        ("an array", "live arrays: "),
        ("memory", "rss grew: "),
        ("nothing", None),
    ],
)
def test_what_is_wrong_is_found(
    scripts: Any, engine: Engine, fault: str, failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = scripts.EngineTarget(engine)
    requests, asked, kept = [scripts.Ask((5, 9, 2), 2)], [0], []
    ask = target.ask

    def answered(one: Any, leave_after: int | None = None) -> Any:
        answer, asked[0] = ask(one, leave_after), asked[0] + 1
        if fault == "another token" and asked[0] > 2:
            first, *rest = answer.tokens
            return scripts.Answer(answer.outcome, ((first[0] + 1, first[1] - 1), *rest))
        if fault == "a token too few" and asked[0] > 2:
            return scripts.Answer("complete", answer.tokens[:1])
        if asked[0] == 2:
            if fault == "a slot":
                engine.pool.requests._free.pop()
            elif fault == "a page":
                engine.pool.pages._free.pop()
            elif fault == "an array":
                kept.append(jnp.ones(3))
            elif fault == "an error":
                monkeypatch.setattr(engine, "step", lambda: 1 / 0)
        return answer

    monkeypatch.setattr(target, "ask", answered)
    if fault == "memory":
        sizes = itertools.count(10**9, 2**26)
        monkeypatch.setattr(target, "memory", lambda: {"rss": next(sizes)})
    monkeypatch.setattr(engine.pool, "debug", False)
    with target.running():
        report = scripts.soak(target, requests, 2, 0.4, NEAR_TIE)
    if failure is None:
        assert report["failures"] == []
    else:
        assert any(failure in found for found in report["failures"]), report["failures"]


def test_a_near_tie_is_noted_and_no_failure(scripts: Any) -> None:
    findings = scripts.Findings()
    alone = scripts.Answer("complete", ((1, -0.5), (2, -0.7), (3, -0.1)))
    tie = scripts.Answer("complete", ((1, -0.5), (4, -0.7004), (9, -3.0)))
    findings.note(tie, alone, NEAR_TIE)
    findings.note(scripts.Answer("left", ((1, -0.5),)), alone, NEAR_TIE)
    assert findings.failures == [] and findings.near_ties == [pytest.approx(0.0004)]
    findings.note(scripts.Answer("left", ((1, -0.5), (4, -0.8))), alone, NEAR_TIE)
    assert findings.failures == ["token 1 is 4, alone 2, gap 0.1"]
    assert findings.counts == {"complete": 1, "left": 2, "tokens": 6}

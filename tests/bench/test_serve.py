"""The load over an engine on CPU: what is counted and compared, not how fast it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from gdnjax import LanguageModel
from gdnjax.bench import client, serve
from gdnjax.bench.serve import Delivery, Load, arm_config, medians, run_engine, summarize
from gdnjax.cli import main
from gdnjax.cli.bench_serve import parse_arms
from gdnjax.engine import Engine, Handle
from gdnjax.loading import random_model
from tests.generation.small import SMALL, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

LOAD = Load(clients=2, prompt_tokens=8, new_tokens=5, turns=2)


def test_figures_of_known_deliveries() -> None:
    found = summarize([Delivery(1.0, [1.5, 1.51, 1.53]), Delivery(2.0, [2.1, 2.14]), Delivery(3.0)], 2.0)
    assert found == pytest.approx(
        {
            "tokens_per_second": 2.5,
            "itl_p50_ms": 20.0,  # of 10, 20 and 40
            "itl_p95_ms": 38.0,
            "itl_p99_ms": 39.6,
            "ttft_p50_ms": 300.0,  # of 500 and 100: who got nothing yet does not count
            "ttft_p95_ms": 480.0,
        }
    )


def test_medians_and_spreads() -> None:
    found = medians([{"a": 1.0, "b": 0.0}, {"a": 4.0, "b": 0.0}, {"a": 2.0, "b": 0.0}])
    assert found == {"a": 2.0, "b": 0.0, "spread": {"a": 0.75, "b": 0.0}}


def test_prompts_are_about_as_long_as_asked_and_the_same_again() -> None:
    one, other = Load(1).prompts(262), Load(64).prompts(262)
    some = [next(one) for _ in range(200)]
    assert some == [next(other) for _ in range(200)]
    lengths = sorted(map(len, some))
    assert 192 <= lengths[0] < 200 and 310 < lengths[-1] <= 320 == Load(1).longest_prompt
    assert all(0 <= token < 262 for prompt in some for token in prompt)


def test_so_many_clients_run_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(small_model(), max_requests=4, kv_tokens=256, chunk_tokens=16)
    submitted: list[Handle] = []
    submit = engine.submit

    def noted(*arguments: Any, **named: Any) -> Handle:
        submitted.append(submit(*arguments, **named))
        return submitted[-1]

    monkeypatch.setattr(engine, "submit", noted)
    figures = run_engine(engine, LOAD)
    reasons = [handle.finish_reason for handle in submitted]
    # four end, and whoever ends makes room for another one, which is cancelled at the end
    assert sorted(reasons) == ["cancelled"] * 2 + ["length"] * 4
    assert all(len(h.tokens) == 5 for h in submitted if h.finish_reason == "length")
    assert (engine.running, engine.waiting, engine.pool.live) == (0, 0, ())
    assert set(figures) > {"tokens_per_second", "itl_p99_ms", "ttft_p95_ms"}
    assert all(value > 0 for value in figures.values())
    assert engine.seconds_waiting > 0


def test_an_arm_has_room_for_its_loads() -> None:
    loads = [LOAD, dataclasses.replace(LOAD, clients=3, prompt_tokens=40, new_tokens=100)]
    config = arm_config(SMALL, loads, {"state_layout": "twin", "page_size": 8})
    assert (config.max_requests, config.state_layout, config.page_size) == (3, "twin", 8)
    assert config.max_length == 50 + 100 and config.kv_tokens == 3 * config.pages_per_request * 8
    assert arm_config(SMALL, loads, {"max_requests": 7}).max_requests == 7


def test_an_arm_may_set_how_its_engine_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def engine(lm: Any, **arguments: Any) -> Any:
        made.append(arguments | {"speculate": lm.config.speculate})
        raise InterruptedError

    monkeypatch.setattr(serve, "Engine", engine)
    arms = parse_arms(["speculate=3,adaptive=true,drafts=ngram", "speculate=0"])
    for arm in arms.values():
        with pytest.raises(InterruptedError):
            serve.bench_serve(LanguageModel(SMALL, {}), [LOAD], {"": arm})
    limits = {"max_requests": 2, "kv_tokens": made[0]["kv_tokens"]}
    assert made == [limits | {"speculate": 3, "adaptive": True, "drafts": "ngram"}, limits | {"speculate": 0}]


def test_the_step_alone_takes_no_drafts() -> None:
    model = random_model(SMALL, seed=0)
    assert serve.bare_step(model, arm_config(SMALL, [LOAD], {"speculate": 2}), LOAD) > 0


def test_arms_alternate_and_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = {f.name: getattr(SMALL, f.name) for f in dataclasses.fields(SMALL)}
    shape = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if key not in ("generation", "platform_overrides") and value is not None
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(shape | {"prefill_tokens": 16}), encoding="utf-8")
    command = ["bench", "serve", "--config", str(path), "--clients", "1", "2", "--prompt-tokens", "8"]
    command += ["--new-tokens", "4", "--rounds", "2", "--turns", "1", "--json"]
    assert main([*command, "--arm", "state_layout=twin,page_size=8", "--arm", "state_layout=in_place"]) == 0
    out, err = capsys.readouterr()
    said = [line.partition(": ")[2] for line in err.splitlines()]
    assert said == ["state_layout=twin,page_size=8", "state_layout=in_place"] * 2
    report = json.loads(out)
    assert report["rounds"] == 2
    cells = {(cell["arm"], cell["clients"]): cell for cell in report["cells"]}
    assert len(cells) == 4 and {clients for _, clients in cells} == {1, 2}
    for cell in cells.values():
        assert cell["new_tokens"] == 4 and cell["bare_ms"] > 0
        # Of two rounds median and spread tell both values, but not which of one figure goes with which of another.
        s, t = cell["spread"]["itl_p50_ms"], cell["spread"]["bare_ms"]
        ratios = [((1 + s) / (1 + t) + (1 - s) / (1 - t)) / 2, ((1 + s) / (1 - t) + (1 - s) / (1 + t)) / 2]
        found = cell["itl_over_bare"] / (cell["itl_p50_ms"] / cell["bare_ms"])
        assert min(abs(found - ratio) for ratio in ratios) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arm", "dtype=bfloat16"], "key 'dtype'; it takes adaptive, attention_pin,"),
        (["--arm", "speculate=2,adaptive=often"], "adaptive = 'often'; it takes true or false"),
        (["--clients", "0"], "--clients [0]; it takes integers >= 1"),
        (["--new-tokens", "1"], "no time between tokens"),
        (["--url", "http://localhost:1", "--arm", "page_size=8"], "has its own model and config; leave out --arm"),
    ],
)
def test_refusals(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    """The address of a server that streams as many words as tokens were asked for, and what it was asked."""
    asked: list[Any] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self.answer(200 if known else 404, json.dumps({"data": [{"id": "some"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            assert self.path == "/v1/completions"
            if len(body["prompt"]) > 100:
                return self.answer(503, "too many wait")
            scores = {"tokens": ["word"], "token_logprobs": [-0.5]}
            chunks = [{"choices": [{"text": f"word {i}", "logprobs": scores}]} for i in range(body["max_tokens"])]
            lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {"choices": []}]]
            return self.answer(200, "".join([*lines, "data: [DONE]\n\n"]))

        def answer(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            pass

    served = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = Thread(target=served.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{served.server_address[1]}", asked
    served.shutdown()
    thread.join()
    served.server_close()


def test_the_load_on_a_server(server: tuple[str, list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("httpx")
    url, asked = server
    assert main(["bench", "serve", "--url", f"{url}/v1", "--clients", "2", "--new-tokens", "3", "--rounds", "1"]) == 1
    assert "the server answered 503: too many wait" in capsys.readouterr().err
    asked.clear()
    command = ["bench", "serve", "--url", url, "--clients", "2", "--prompt-tokens", "8", "--new-tokens", "3"]
    assert main([*command, "--rounds", "2", "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert cell["tokens_per_second"] > 0 and "bare_ms" not in cell
    assert len(asked) >= 2 * 4
    for body in asked:
        assert (body["model"], body["max_tokens"], body["stream"], body["temperature"]) == ("some", 3, True, 0)
        assert 6 <= len(body["prompt"]) <= 10
    with client.connect(url, 1) as connection:
        chunks = list(client.stream(connection, "some", [1, 2], 2, logprobs=0))
    assert asked[-1]["logprobs"] == 0
    assert [[(c["text"], *client.tokens_of(c)) for c in chunk["choices"]] for chunk in chunks] == [
        [("word 0", ("word", -0.5))],
        [("word 1", ("word", -0.5))],
        [],
    ]
    assert all(a != b for a, b in pairwise(asked[:4]))

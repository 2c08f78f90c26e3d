"""What happens around answers: full queues, clients that go or do not read, stops, and an engine that fails."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from gdnjax.engine import programs
from gdnjax.server import worker
from tests.server.serving import KEY, WAITING, Running, in_thread, make_engine, running, until

pytestmark = pytest.mark.usefixtures("quick_compilation")

BODY: dict[str, Any] = {"prompt": [17], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def held(server: Running) -> Any:
    """The engine does not step in this context: what is asked for stays on its way."""
    return server.engine._lock


def stream(server: Running, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {KEY}"}
    return httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json={"stream": True} | body, headers=headers, timeout=60
    )


def events(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    """What a stream tells, without its last line."""
    with stream(server, body) as answer:
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    return [json.loads(one) for one in data]


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 8, "ignore_eos": True}


def test_a_full_queue_is_said_so_and_takes_all_choices_or_none() -> None:
    with running() as server:
        with held(server):
            first = in_thread(lambda: server.post(json=BODY | {"n": WAITING - 1}))
            until(lambda: server.engine.waiting == WAITING - 1)
            for n in (2, 3):
                answer = server.post(json=BODY | {"n": n})
                assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
                assert answer.json()["error"]["type"] == "rate_limit_error"
                assert "requests wait, too many for another" in answer.json()["error"]["message"]
                # The choice that had a place gives it back, once a step looks.
                server.engine._take_in()
                assert server.engine.waiting == WAITING - 1
            last = in_thread(lambda: server.post(json=BODY))
            until(lambda: server.engine.full)
            # Nobody looks at what a prompt is before there is room for it.
            for path, body in (("/v1/completions", BODY | {"prompt": ""}), ("/v1/chat/completions", {"messages": []})):
                assert server.post(path, body).status_code == 429
        assert first().status_code == last().status_code == 200
        assert server.post(json=BODY).status_code == 200
        assert server.service.worker.idle


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_frees_its_place(streamed: bool) -> None:
    with running() as server:
        with held(server):
            if streamed:
                with stream(server, CHAT | {"n": 2}) as answer:
                    assert next(answer.iter_lines()).startswith("data: ")
                    until(lambda: server.engine.waiting == 2)
            else:
                with pytest.raises(httpx.ReadTimeout):
                    server.post(json=BODY | {"n": 2}, timeout=0.5)
            until(lambda: server.service.worker.idle)
        until(lambda: server.engine.waiting == 0)
        assert server.engine.counters["finished_cancelled"] == 2
        assert server.post(json=BODY).status_code == 200
        assert server.engine.pool.live == ()


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    engine = make_engine(max_waiting=64)
    with running(engine, buffers=4096, client_timeout=0.5, max_choices=64) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(CHAT | {"stream": True, "n": 64, "max_tokens": 60, "logprobs": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: not server.service.worker.idle)
            (ticket,) = server.service.worker._tickets
            assert server.post(json=BODY).status_code == 200
            until(lambda: all(handle.done for handle in ticket.handles))
            # What waits for it is at most the answer, and goes with it.
            assert sum(map(len, ticket._news.values())) <= 64 * 62
            until(lambda: server.service.worker.idle)
        assert server.post(json=BODY).status_code == 200


def test_an_answer_that_is_there_before_its_request_has_been_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        submit, heard = server.engine.submit, []

        def slow(*arguments: Any, on_piece: Any, **named: Any) -> Any:
            def hear(piece: Any) -> None:
                heard.append(piece)
                on_piece(piece)

            handle = submit(*arguments, on_piece=hear, **named)
            server.service.worker._wake.set()
            until(lambda: None in heard)
            return handle

        monkeypatch.setattr(server.engine, "submit", slow)
        answer = server.post(json=BODY)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert server.service.worker.failure is None


def test_a_stop_lets_running_requests_end_and_takes_no_new_ones() -> None:
    with running() as server:
        with held(server):
            first = in_thread(lambda: server.post(json=BODY))
            until(lambda: server.engine.waiting == 1)
            server.server.drain()
            answer = server.post(json=BODY)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "shutting_down"
            health = server.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "draining")
            assert server.thread.is_alive()
        answer = first()
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        server.thread.join(30)
        assert not server.thread.is_alive() and not server.service.worker.alive


def test_a_stop_cancels_what_does_not_end() -> None:
    with running(drain=0.2) as server:
        with held(server):
            whole = in_thread(lambda: server.post(json=BODY))

            def read() -> list[str]:
                with stream(server, CHAT) as answer:
                    return [line for line in answer.iter_lines() if line]

            lines = in_thread(read)
            until(lambda: server.engine.waiting == 2)
            server.server.drain()
            until(lambda: server.server._cancelled)
        assert whole().status_code == 503
        error = json.loads(lines()[-1].removeprefix("data: "))["error"]
        assert error["code"] == "shutting_down" and error["type"] == "server_error"
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_a_request_that_gets_no_token_in_time() -> None:
    with running(timeout=0.2) as server:
        with held(server):
            answers = [in_thread(lambda: server.post(json=BODY)), in_thread(lambda: events(server, CHAT))]
            until(lambda: server.engine.waiting == 2)
            until(lambda: server.engine._clock() > server.engine._door._arrived[1].deadline)
        whole, (*_, last) = (answer() for answer in answers)
        assert whole.status_code == 504
        for error in (whole.json()["error"], last["error"]):
            assert error["code"] == "timeout" and "no token after 0.2 s, the server's limit" in error["message"]
        assert server.service.metrics.refused.labels(504)._value.get() == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_what_has_come_when_the_time_is_over_is_the_answer(streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    engine = make_engine(clock=lambda: now[0])
    step = engine.step
    with running(engine, timeout=60.0) as server:

        def step_for_a_while() -> bool:
            if engine.counters["generated_tokens"] >= 10:
                now[0] = 100.0
            return step()

        # Four choices run, and one waits until the time is over.
        body = CHAT | {"n": 5, "max_tokens": 40, "temperature": 0, "logprobs": True}
        wanted = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert engine.counters.pop("generated_tokens") == 200
        monkeypatch.setattr(engine, "step", step_for_a_while)
        with held(server):
            ask = (lambda: events(server, body)) if streamed else (lambda: server.post("/v1/chat/completions", body))
            answer = in_thread(ask)
            until(lambda: engine.waiting == 5)
        if streamed:
            chunks = answer()
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            reasons = {choice["index"]: choice["finish_reason"] for choice in choices}
            texts = ["".join(c["delta"].get("content", "") for c in choices if c["index"] == i) for i in range(5)]
        else:
            assert answer().status_code == 200
            choices = answer().json()["choices"]
            reasons = {choice["index"]: choice["finish_reason"] for choice in choices}
            texts = [choice["message"]["content"] for choice in choices]
            scores = [len(choice["logprobs"]["content"]) for choice in choices]
            assert answer().json()["usage"]["completion_tokens"] == sum(scores) == engine.counters["generated_tokens"]
        assert 10 <= engine.counters["generated_tokens"] < 30
        assert list(reasons.values()) == ["length"] * 5
        assert texts[4] == "" and all(text and wanted.startswith(text) and text != wanted for text in texts[:4])
        assert engine.counters["finished_deadline"] == 5
        assert server.service.metrics.refused.labels(504)._value.get() == 0


def test_the_server_outlives_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "PROBE_SECONDS", 0.05)
    decode = programs.run_decode

    def fails(*_: Any, **__: Any) -> Any:
        raise MemoryError("no memory on the device")

    with running() as server:
        monkeypatch.setattr(programs, "run_decode", fails)
        whole = server.post(json=BODY)
        with stream(server, CHAT) as answer:
            *_, last = [line for line in answer.iter_lines() if line]
        assert whole.status_code == 500
        for error in (whole.json()["error"], json.loads(last.removeprefix("data: "))["error"]):
            assert (error["code"], error["type"]) == ("model_error", "server_error")
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "failing", "error": "MemoryError: no memory on the device"}
        assert server.service.metrics.step_errors._value.get() >= 6
        monkeypatch.setattr(programs, "run_decode", decode)
        until(lambda: server.get("/health").status_code == 200)  # nobody has asked for anything
        answer = server.post(json=BODY)
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert server.engine.pool.live == ()


def test_a_fault_in_one_request_leaves_its_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be in an `Exception` handler: that one answers, and raises again, so that the server hangs up."""
    with running() as server, httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}) as client:
        with monkeypatch.context() as patch:
            patch.setattr(server.service, "complete", lambda *_: 1 / 0)
            answer = client.post("/v1/completions", json=BODY)
            assert answer.status_code == 500
            assert "see its log" in answer.json()["error"]["message"]
            assert answer.headers.get("connection") != "close"
        stream = answer.extensions["network_stream"]
        after = client.post("/v1/completions", json=BODY, timeout=60)
        assert after.status_code == 200
        assert after.extensions["network_stream"].get_extra_info("client_addr") == stream.get_extra_info("client_addr")

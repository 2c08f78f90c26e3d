"""What is refused, and what the refusal says."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.generation.small import STOP_ID
from tests.server.serving import Running, running

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def server(quick_compilation: None) -> Iterator[Running]:
    with running(max_body_bytes=4000, client_timeout=0.5, max_choices=4, max_tokens=30) as one:
        yield one


BASE = {"prompt": "a", "max_tokens": 2}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": None}, "prompt = null; it takes a text, a list of token ids, or a list of either"),
        ({"prompt": ["a", 1]}, 'prompt = ["a", 1]; it takes'),
        ({"prompt": [1, 262]}, "token id 262; it takes 0 to"),
        ({"prompt": []}, "prompt = []; it takes"),
        ({"prompt": ""}, "prompt 0 is empty"),
        ({"prompt": "a" * 70}, "has 70 tokens; it takes at most max_length - 1 = 63"),
        ({"prompt": "\ud800"}, "lone surrogate"),
        ({"max_tokens": 0}, "max_tokens = 0; it takes an integer from 1 to 30"),
        ({"max_tokens": 31}, "max_tokens = 31; it takes an integer from 1 to 30"),
        ({"max_tokens": 2.5}, "max_tokens = 2.5; it takes an integer"),
        ({"max_tokens": True}, "max_tokens = true; it takes an integer"),
        ({"temperature": -1}, "temperature = -1.0; it takes a number >= 0"),
        ({"temperature": "hot"}, 'temperature = "hot"; it takes a number'),
        ({"temperature": 10**400}, "it takes a number up to 1e30"),
        ({"top_p": 0}, "top_p = 0.0; it takes a number in (0, 1]"),
        ({"seed": "x"}, 'seed = "x"; it takes an integer'),
        ({"n": 5}, "n = 5; it takes an integer from 1 to 4"),
        ({"n": 3, "prompt": ["a", "b"]}, "2 prompts times n = 3; a request takes at most 4 choices"),
        ({"stop": ""}, 'stop = ""; it takes a text of at least one character, or a list of at most 16'),
        ({"stop": ["a"] * 17}, "or a list of at most 16"),
        ({"stop_token_ids": [999]}, "stop_ids: token id 999"),
        ({"stream": "yes"}, 'stream = "yes"; it takes true or false'),
        ({"stream_options": {"x": 1}}, 'stream_options = {"x": 1}; it takes {"include_usage"'),
        ({"logprobs": 2}, "logprobs = 2; it takes 0: how many other tokens to list, of which this server has none"),
        ({"logit_bias": {"5": 1}}, 'logit_bias = {"5": 1}; it takes null or {}'),
        ({"best_of": 2}, "best_of = 2; it takes null or 1"),
        ({"echo": True}, "echo = true; it takes null or false"),
        ({"temprature": 1}, "temprature = 1; this server knows no such field, leave it out"),
    ],
    ids=str,
)
def test_completions(server: Running, change: dict[str, Any], message: str) -> None:
    assert_refused(server.post(content=json.dumps(BASE | change)), 400, message)


CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f"}}
JSON = {"response_format": {"type": "json_object"}, "stop_token_ids": [STOP_ID]}


def schema(given: Any) -> dict[str, Any]:
    return JSON | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"messages": None}, "messages = null; it takes a list of objects with role and content"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "judge", "content": "a"}]}, "messages[0] has role 'judge'; the roles are"),
        ({"messages": [{"role": "user", "content": 1}]}, "content must be a str or a list of parts, got int"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            'messages[0] has a part of type "image_url"; it takes text parts',
        ),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs = 2; it takes null or 0"),
        ({"response_format": {"type": "yaml"}}, 'it takes {"type": "text"}, {"type": "json_object"} or'),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "it takes"),
        ({"response_format": {"type": "json_object"}}, "response_format: JSON ends with a stop token"),
        (JSON | {"tools": [TOOL]}, "an answer held to a schema cannot call a function"),
        (JSON | {"stop_token_ids": [5]}, "stop_ids = [5]: a constrained request ends with a control token"),
        (schema({"type": "strin"}), "response_format: the schema is refused: Invalid type: strin"),
        (schema({"not": {"type": "string"}}), 'the schema is refused: Unimplemented keys: ["not"]'),
        ({"tools": [{"name": "f"}]}, 'tools = [{"name": "f"}]; it takes a list of {"type": "function"'),
        ({"tools": [TOOL], "tool_choice": "required"}, 'tool_choice = "required"; it takes auto or none'),
        ({"chat_template_kwargs": {"x": 1}}, 'chat_template_kwargs = {"x": 1}; it takes {"enable_thinking"'),
        ({"reasoning_effort": "high"}, 'reasoning_effort = "high"; this server knows no such field'),
    ],
    ids=str,
)
def test_chat(server: Running, change: dict[str, Any], message: str) -> None:
    assert_refused(server.post("/v1/chat/completions", CHAT | change), 400, message)


def test_the_field_is_named(server: Running) -> None:
    for path, base, change in (
        ("/v1/completions", BASE, {"n": 9}),
        ("/v1/completions", BASE, {"top_p": 2}),
        ("/v1/completions", BASE, {"prompt": ""}),
        ("/v1/chat/completions", CHAT, {"messages": []}),
        ("/v1/chat/completions", CHAT, {"messages": [{"role": "user", "content": "a" * 70}]}),
    ):
        (name,) = change
        assert server.post(path, base | change).json()["error"]["param"] == name


def test_what_changes_nothing_is_taken(server: Running) -> None:
    neutral = dict(user="u", metadata={"a": "b"}, logit_bias={}, response_format={"type": "text"}, store=False)
    neutral |= dict(parallel_tool_calls=True, top_logprobs=0, tool_choice="auto", logprobs=False, frequency_penalty=0)
    assert server.post("/v1/chat/completions", CHAT | neutral | {"reasoning_effort": None}).status_code == 200
    again = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "refusal": None, "audio": None, "tool_calls": None},
        {"role": "user", "content": "d"},
    ]
    assert server.post("/v1/chat/completions", CHAT | {"messages": again}).status_code == 200
    assert server.post(json=BASE | dict(suffix=None, best_of=1, echo=False)).status_code == 200


def assert_refused(answer: Any, status: int, message: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert message in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"prompt": NaN}', b"[" * 3000, b"\xff"])
def test_bodies_that_are_no_objects(server: Running, body: bytes) -> None:
    assert_refused(server.post(content=body), 400, "the body is ")


def test_what_is_not_there(server: Running) -> None:
    assert_refused(server.post(json=BASE | {"model": "gpt"}), 404, "model = \"gpt\"; this server has 'small'")
    assert_refused(server.get("/v1/nothing"), 404, "GET /v1/nothing: Not Found")
    assert_refused(server.get("/v1/completions"), 405, "Method Not Allowed")
    with pytest.raises(openai.NotFoundError):
        server.openai().completions.create(model="gpt", prompt="a")


def test_the_key(server: Running) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.openai("Sesame").models.list()
    for given in ("sesame", "bearer sesame", "Bearer sesame2", "Bearer", ""):
        answer = server.post(json=BASE, headers={"authorization": given})
        assert_refused(answer, 401, "send the server's key as 'Authorization: Bearer KEY'")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/v1/models").status_code == 200


def test_bodies_that_are_too_large(server: Running) -> None:
    assert_refused(server.post(json=BASE | {"user": "x" * 4000}), 413, "at most 4000 are taken")

    # At once, and not when all has come: the rest of these bodies never does.
    chunks = b"3e8\r\n" + b" " * 1000 + b"\r\n"
    for said, body in ((b"Content-Length: 5000", b"{"), (b"Transfer-Encoding: chunked", 5 * chunks)):
        assert start_of_answer(server, said, body).startswith(b"HTTP/1.1 413 ")
    assert server.post(json=BASE | {"user": "x" * 3000}).status_code == 200


def test_a_body_that_does_not_come(server: Running) -> None:
    assert start_of_answer(server, b"Content-Length: 90", b"{").startswith(b"HTTP/1.1 408 ")


def start_of_answer(server: Running, header: bytes, body: bytes) -> bytes:
    """What comes back for a body that has not ended."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n"
        sock.sendall(head + header + b"\r\n\r\n" + body)
        return sock.recv(1000)

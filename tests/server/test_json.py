"""`response_format` over HTTP, through OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from gdnjax.engine import constraint
from tests.generation.small import STOP_ID
from tests.server.serving import Running, make_engine, running

pytestmark = pytest.mark.usefixtures("quick_compilation")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
# The small model's checkpoint names no stop ids.
MORE = {"stop_token_ids": [STOP_ID]}
MESSAGES: Any = [{"role": "user", "content": "age?"}]


def age(text: str | None) -> int:
    value = json.loads(text or "")
    assert value.keys() == {"age"} and type(value["age"]) is int and 0 <= value["age"] <= 9
    return value["age"]


def test_every_choice_of_a_chat_has_the_form(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = dict(model="small", messages=MESSAGES, response_format=FORMAT, n=5, seed=3)
    answer = client.chat.completions.create(**arguments, temperature=1.5, logprobs=True, extra_body=MORE)
    assert len({age(choice.message.content) for choice in answer.choices}) > 1
    assert all(choice.finish_reason == "stop" for choice in answer.choices)
    again = client.chat.completions.create(**arguments, temperature=1.5, extra_body=MORE)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def test_a_stream_has_the_form(client: openai.OpenAI) -> None:
    text, reasons = "", []
    for chunk in client.chat.completions.create(
        model="small", messages=MESSAGES, response_format=FORMAT, seed=1, stream=True, extra_body=MORE
    ):
        text += chunk.choices[0].delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
    age(text)
    assert reasons[-1] == "stop"


def test_any_object_and_completions(server: Running) -> None:
    body = {"prompt": "a", "max_tokens": 40, "seed": 2, "response_format": FORMAT, **MORE}
    (choice,) = server.post(json=body).json()["choices"]
    age(choice["text"])
    # A model that was never taught to may go on as long as it can: the beginning has the form.
    (choice,) = server.post(json=body | {"response_format": {"type": "json_object"}}).json()["choices"]
    assert choice["text"].startswith("{") and choice["finish_reason"] in ("stop", "length")
    (choice,) = server.post(json=body | {"max_tokens": 3}).json()["choices"]
    assert choice["finish_reason"] == "length" and len(choice["text"]) == 3


def test_json_comes_behind_a_think_block(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="small",
        messages=MESSAGES,
        response_format=FORMAT,
        seed=5,
        max_tokens=30,
        extra_body=MORE | {"chat_template_kwargs": {"enable_thinking": True}},
    )
    (choice,) = answer.choices
    # The small model does not find the end of its thoughts: they are free, and no end of the answer.
    assert choice.finish_reason == "length" and not choice.message.content
    assert choice.message.model_extra and choice.message.model_extra["reasoning_content"]


def test_with_speculation() -> None:
    with running(make_engine(speculate=2, drafts="ngram")) as server, server.openai() as client:
        answer = client.chat.completions.create(
            model="small", messages=MESSAGES, response_format=FORMAT, n=4, seed=3, temperature=1.5, extra_body=MORE
        )
        for choice in answer.choices:
            age(choice.message.content)


def test_a_server_without_the_library_says_so(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint, "available", lambda: False)
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": FORMAT, **MORE})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "need llguidance" in error["message"] and error["param"] == "response_format"
    assert server.post(json={"prompt": "a", "max_tokens": 2}).status_code == 200

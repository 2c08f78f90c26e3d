"""Choices of answers, built from pieces: whole and streamed say the same."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from gdnjax.engine import Handle, Piece
from gdnjax.server.wire import ChatChoice
from tests.server.serving import make_engine, model
from tests.server.test_parsing import CALL, JSON, TOOLS, cuts

TEXT = f"2 + 3 ?\n</think>\n\nLet me add.\n{CALL}\n{JSON}"


@pytest.fixture(scope="module")
def handle() -> Handle:
    """A handle that has ended with `stop`; what it says is not read here."""
    handle = make_engine().submit([1], 1)
    handle.finish_reason = "stop"
    return handle


def choice(tools: Any = TOOLS, logprobs: bool = False) -> ChatChoice:
    tokenizer = model().tokenizer
    assert tokenizer is not None
    return ChatChoice(3, tokenizer, logprobs, True, tools)


def pieces(texts: list[str]) -> list[Piece]:
    return [Piece((7,), (-0.5,), text) for text in texts]


def test_reasoning_words_and_calls(handle: Handle) -> None:
    one = choice()
    for piece in pieces([TEXT]):
        one.add(piece)
    found = one.whole(handle)
    message = found["message"]
    assert (found["index"], found["finish_reason"], found["logprobs"]) == (3, "tool_calls", None)
    assert (message["reasoning_content"], message["content"]) == ("2 + 3 ?", "Let me add.")
    for call in message["tool_calls"]:
        assert call.keys() == {"id", "type", "function"} and call["type"] == "function"
        assert call["function"] == {"name": "add", "arguments": '{"a": 5}'}
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_a_call_without_words_has_no_content(handle: Handle) -> None:
    one = choice()
    one.add(Piece((7,), (-0.5,), f"</think>{CALL}"))
    message = one.whole(handle)["message"]
    assert message["content"] is None and "reasoning_content" not in message and len(message["tool_calls"]) == 1
    handle_of_length = Handle(**{**vars(handle), "finish_reason": "length"})
    assert one.whole(handle_of_length)["finish_reason"] == "length"


def test_without_tools_a_call_is_text(handle: Handle) -> None:
    one = choice(tools=())
    one.add(Piece((7,), (-0.5,), f"</think>{CALL}"))
    found = one.whole(handle)
    assert found["message"]["content"] == CALL and found["finish_reason"] == "stop"


def test_a_stream_says_the_same_however_it_is_cut(handle: Handle) -> None:
    for texts in [*cuts(TEXT)[::97], list(TEXT)]:
        one = choice(logprobs=True)
        chunks = one.opening()
        for piece in pieces(texts):
            chunks += one.add(piece)
        chunks += one.end(handle)
        deltas = [chunk["delta"] for chunk in chunks]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "2 + 3 ?"
        assert "".join(delta.get("content", "") for delta in deltas) == "Let me add."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"a": 5}] * 2
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
        # Every token's, also where its text waits, or is no one's.
        scores = [chunk["logprobs"]["content"] for chunk in chunks if chunk["logprobs"]]
        tokens = list(itertools.chain.from_iterable(scores))
        assert [(t["logprob"], t["bytes"]) for t in tokens] == [(-0.5, [7])] * len(texts)

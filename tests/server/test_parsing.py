"""Reasoning and function calls in a model's text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.chat import render_chat
from gdnjax.server.reasoning import ReasoningSplitter
from gdnjax.server.tools import Call, ToolParser, typed

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "note": {"type": "string"},
                    "sure": {"type": "boolean"},
                    "more": {"type": "array"},
                    "map": {"type": "object"},
                },
            },
        },
    }
]


def split(pieces: Sequence[str], opened: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    parts = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(a for a, _ in parts), "".join(b for _, b in parts)


def parse(pieces: Sequence[str]) -> list[str | Call]:
    """Words that follow each other joined, as a client sees them."""
    parser = ToolParser(TOOLS)
    found: list[str | Call] = []
    for part in [*itertools.chain.from_iterable(map(parser.push, pieces)), *parser.finish()]:
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


def cuts(text: str) -> list[list[str]]:
    """The text in one, two and three pieces at every place, and letter by letter."""
    places = range(len(text) + 1)
    three = [[text[:a], text[a:b], text[b:]] for a, b in itertools.combinations(places, 2)]
    return [[text], list(text), *([text[:a], text[a:]] for a in places), *three]


def assert_same_for_all_cuts(text: str, read: Callable[[Sequence[str]], Any], wanted: Any) -> None:
    for pieces in cuts(text):
        assert read(pieces) == wanted, pieces


@pytest.mark.parametrize(
    "opened, text, reasoning, answer",
    [
        # The template has opened the block: no tag of the model's own.
        (True, "\n2 < 3 \n</think>\n\nYes. ", "2 < 3", "Yes. "),
        (True, "<think>\nhm\n</think>\n\nNo", "hm", "No"),
        (True, "</think>Yes", "", "Yes"),
        (True, "on and on \n", "on and on \n", ""),  # cut off
        (True, "a</thin", "a</thin", ""),
        (True, " \n", "", ""),
        (True, "<thi", "<thi", ""),
        (True, "a\n</think> \n", "a", ""),
        (True, "a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        # It has not, or has closed it.
        (False, " 2 < 3\n", "", " 2 < 3\n"),
        (False, "\n<think>a b</think> c", "a b", "c"),
        (False, "a<think>b</think>", "", "a<think>b</think>"),
        (False, "<thin", "", "<thin"),
        (False, "", "", ""),
    ],
)
def test_reasoning(opened: bool, text: str, reasoning: str, answer: str) -> None:
    assert_same_for_all_cuts(text, lambda pieces: split(pieces, opened), (reasoning, answer))


def call(**arguments: Any) -> Call:
    return Call("add", json.dumps(arguments, ensure_ascii=False))


CALL = "<tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call>'


@pytest.mark.parametrize(
    "text, wanted",
    [
        (CALL, [call(a=5)]),
        (JSON, [call(a=5)]),
        (f"Let me see.\n\n{CALL}\n", ["Let me see.", call(a=5)]),
        (f"{CALL}\n{JSON} so", [call(a=5), call(a=5), "so"]),
        ("<tool_call><function=add></function></tool_call>", [call()]),
        ('<tool_call>{"name": "add"}</tool_call>', [call()]),
        ('<tool_call>{"name": "add", "arguments": {"note": "</tool_call>"}}</tool_call>', [call(note="</tool_call>")]),
        # No calls, so text: broken off, of another form, without a name.
        ("1 < 2 <tool", ["1 < 2 <tool"]),
        (CALL[:-3], [CALL[:-3]]),
        (f"a <tool_call> b {CALL}", ["a <tool_call> b", call(a=5)]),
        (
            "<tool_call>\n<function=>\n</function>\n</tool_call>",
            ["<tool_call>\n<function=>\n</function>\n</tool_call>"],
        ),
        ('<tool_call>{"name": 1}</tool_call> x', ['<tool_call>{"name": 1}</tool_call> x']),
        ('<tool_call>{"name": }</tool_call>', ['<tool_call>{"name": }</tool_call>']),
        ("<tool_call><function=add>x</function></tool_call>", ["<tool_call><function=add>x</function></tool_call>"]),
    ],
)
def test_calls(text: str, wanted: list[str | Call]) -> None:
    assert_same_for_all_cuts(text, parse, wanted)


def test_a_value_may_hold_what_ends_a_value() -> None:
    code = "x</parameter>\n</tool_call>\n <function=add>\n"
    text = f"<tool_call>\n<function=add>\n<parameter=note>\n{code}\n</parameter>\n</function>\n</tool_call>"
    assert parse([text]) == parse(list(text)) == [call(note=code)]


@given(st.data())
def test_any_text_comes_out_whole_however_it_is_cut(data: st.DataObject) -> None:
    words = ["<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=a>", "</parameter>", "\n", " "]
    words += ["5", "{", "}", '{"name": "add"}', "<", "/think>", "<think>", "</think>", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=24)))
    opened = data.draw(st.booleans())
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    assert parse(pieces) == parse([text])
    assert split(pieces, opened) == split([text], opened)
    # Nothing but space and tags is lost.
    if not any(isinstance(part, Call) for part in parse([text])):
        assert "".join(map(str, parse([text]))) == text


@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "note", "sure", "more", "map"]), st.text(st.sampled_from('{}[]<>/"\\n é5'))
    ),
    st.integers(),
    st.lists(st.integers() | st.text(max_size=5), max_size=3),
)
def test_what_a_template_writes_is_read_back(texts: dict[str, str], number: int, items: list[Any]) -> None:
    # The default template's form, JSON, through the template itself.
    arguments = {**texts, "a": number, "more": items, "map": {"k": items}}
    message = {
        "role": "assistant",
        "content": "So",
        "tool_calls": [{"function": {"name": "add", "arguments": arguments}}],
    }
    text = render_chat(None, [{"role": "user", "content": "?"}, message], add_generation_prompt=False)
    text = text.split("</think>\n\n")[1].removesuffix("<|im_end|>\n")
    assert parse([text]) == ["So", Call("add", json.dumps(arguments, ensure_ascii=False))]
    # Qwen3.5's, whose values are bare where they are strings.
    strings = {"note": texts.get("note", "")}
    body = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else json.dumps(v)}\n</parameter>\n"
        for k, v in {"a": number, "more": items, "map": {"k": items}, **strings}.items()
    )
    written = f"So\n<tool_call>\n<function=add>\n{body}</function>\n</tool_call>"
    assert parse([written]) == ["So", call(a=number, more=items, map={"k": items}, **strings)]


@pytest.mark.parametrize(
    "raw, schema, value",
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"type": ["string", "integer"]}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("None", {"type": ["string", "null"]}, None),
        ("null", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ('["x"]', {"type": "array"}, ["x"]),
        ('{"x": 1}', {"type": "object"}, {"x": 1}),
        ('{"x": 1', {"type": "object"}, '{"x": 1'),
        ('"x"', {"type": ["string", "null"]}, '"x"'),
        ("NaN", {"type": "number"}, "NaN"),
        ("[" * 10**5, {"type": "array"}, "[" * 10**5),
        ("5", None, "5"),
        ("5", {"enum": ["5"]}, "5"),
    ],
)
def test_values_take_the_types_of_the_schema(raw: str, schema: Any, value: Any) -> None:
    found = typed(raw, schema)
    assert found == value and type(found) is type(value)


def test_many_parameters_are_read_in_a_moment() -> None:
    # A scan that tried every reading of the closing tags would not end.
    body = "<parameter=a>\n5\n</parameter>\n" * 2000
    text = f"<tool_call>\n<function=add>\n{body}</function>\n"
    assert parse([text]) == [text]
    assert parse([text, "</tool_call>"]) == [call(a=5)]

"""Finds the function calls that a model writes, in text that comes in pieces.

Two forms are known, those that chat templates ask for. Qwen3.5's:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

where a value is JSON unless the function's schema says that it is a string, and JSON as a whole:

    <tool_call>
    {"name": NAME, "arguments": {KEY: VALUE}}
    </tool_call>

What is in neither form is text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gdnjax.server.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER, _END = "<function=", "<parameter=", "</function>"
_NAME = re.compile(r"[^<>\n]{0,256}")
# A value may itself hold a closing tag: it ends at the first one that something follows which can.
_VALUE_END = re.compile(rf"</parameter>\s*(?={_PARAMETER}|{_END})")
_SPACE = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Call:
    """A function call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class _NotACall(Exception):
    """Whatever follows, this is no call."""


class ToolParser:
    """Splits a text into words and calls. How the text is cut into pieces does not matter.

    Args:
        tools: JSON descriptions of functions, in OpenAI's form; their schemas say which values are strings.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]]):
        functions = [tool["function"] for tool in tools]
        self._schemas = {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions}
        self._held = ""
        self._opening: str | None = None  # the tag of the call that is being read, and the space in front of it
        self._checked = 0  # no JSON call ends before
        self._after_call = False

    def push(self, text: str) -> list[str | Call]:
        """More text: the words and calls that it completes."""
        self._held += text
        found: list[str | Call] = []
        if self._opening is not None and ">" not in text:  # with which every call ends
            return found
        while self._read_words(found) if self._opening is None else self._read_call(found):
            pass
        return found

    def _read_words(self, found: list[str | Call]) -> bool:
        words, tag, rest = self._held.partition(OPEN)
        if self._after_call:
            words = words.lstrip()
        kept = words.rstrip() if tag else words[: len(words) - held_back(words, OPEN)]
        if kept:
            found.append(kept)
            self._after_call = False
        if not tag:
            self._held = words[len(kept) :]
            return False
        self._opening, self._held, self._checked = words[len(kept) :] + tag, rest, 0
        return True

    def _read_call(self, found: list[str | Call]) -> bool:
        assert self._opening is not None
        try:
            call = self._scan()
        except _NotACall:
            found.append(self._opening)
            self._opening, self._after_call = None, False
            return True
        if call is None:
            return False
        found.append(call[0])
        self._opening, self._held, self._after_call = None, self._held[call[1] :], True
        return True

    def finish(self) -> list[str | Call]:
        """What was held back, as text: a call that is not complete is none."""
        rest = (self._opening or "") + self._held
        self._held, self._opening = "", None
        return [rest] if rest else []

    def _scan(self) -> tuple[Call, int] | None:
        """The call that `_held` starts with and where it ends; None while it is not complete."""
        text, at = self._held, self._skip(0)
        if text.startswith("{", at):
            return self._scan_json()
        if not self._at(_FUNCTION, at):
            return None
        named = self._name(at + len(_FUNCTION))
        if named is None:
            return None
        name, at = named
        values: dict[str, Any] = {}
        schema = self._schemas.get(name, {})
        while self._held.startswith(_PARAMETER, at := self._skip(at)):
            named = self._name(at + len(_PARAMETER))
            if named is None:
                return None
            key, at = named
            end = _VALUE_END.search(text, at)
            if end is None:
                return None
            raw = text[at : end.start()].removeprefix("\n").removesuffix("\n")
            values[key] = typed(raw, schema.get(key))
            at = end.end()
        if not self._at(_END, at, _PARAMETER) or not self._at(CLOSE, at := self._skip(at + len(_END))):
            return None
        return Call(name, json.dumps(values, ensure_ascii=False)), at + len(CLOSE)

    def _scan_json(self) -> tuple[Call, int] | None:
        # A string in the call may hold the tag, so that a part which is no JSON yet may become some.
        while (end := self._held.find(CLOSE, self._checked)) >= 0:
            self._checked = end + len(CLOSE)
            try:
                value = _loads(self._held[:end])
            except (ValueError, RecursionError):
                continue
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
                raise _NotACall
            return Call(value["name"], json.dumps(arguments, ensure_ascii=False)), self._checked
        return None

    def _skip(self, at: int) -> int:
        space = _SPACE.match(self._held, at)
        assert space is not None
        return space.end()

    def _at(self, tag: str, at: int, *others: str) -> bool:
        """Whether `tag` is there; False where it, or one of the others, may still come."""
        rest = self._held[at : at + 32]
        if rest.startswith(tag):
            return True
        if any(one.startswith(rest) for one in (tag, *others)):
            return False
        raise _NotACall

    def _name(self, at: int) -> tuple[str, int] | None:
        name = _NAME.match(self._held, at)
        assert name is not None
        if name.end() == len(self._held):
            return None
        if not name[0].strip() or self._held[name.end()] != ">":
            raise _NotACall
        return name[0].strip(), name.end() + 1


def typed(raw: str, schema: Any) -> Any:
    """A parameter's value: `raw` itself, unless its schema names other types and it is JSON of one of them."""
    types = _types(schema)
    spelled = {"True": "true", "False": "false", "None": "null"}.get(raw.strip(), raw)
    try:
        value = _loads(spelled)
    except (ValueError, RecursionError):
        return raw
    kind = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null", int: "integer"}.get(
        type(value), "number"
    )
    if kind == "number" and "number" not in types and "integer" in types and value.is_integer():
        return int(value)
    if kind == "string":  # the quotes are a part of it
        return raw
    return value if kind in types or (kind == "integer" and "number" in types) else raw


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else {t for t in given or [] if isinstance(t, str)}
    for key in ("anyOf", "oneOf"):
        for one in schema.get(key) or []:
            types |= _types(one)
    return types


def _loads(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    return json.loads(text, parse_constant=refuse)

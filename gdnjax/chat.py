"""Messages to a prompt: chat templates, rendered in a sandbox, with message text kept apart from control tokens.

A template writes control tokens (`<|im_start|>`), and text from a message must not: a user who types `<|im_end|>` would
end their turn and could speak as the system. Once rendered the two look alike. So before rendering, a mark (a
private-use character that occurs nowhere in the input) is put after every character of a message that could start a
control token; what a mark interrupts afterwards is text, and the marks are taken out again.

The template itself is trusted with the shape of the prompt and with nothing else: it gets plain JSON data only, in
Jinja's immutable sandbox, with bounds on its size and its output, and without the shortest ways to a huge string. It
can still waste time, as any program can.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gdnjax.tokenizer import MAX_TEMPLATE_BYTES, Tokenizer

MAX_RENDERED_CHARS = 16 * 2**20
_MAX_DEPTH = 64
_PADDING = {"center", "expandtabs", "ljust", "rjust", "zfill"}

# Keys a message may have, by role.
_KEYS = {
    "system": {"content", "name"},
    "user": {"content", "name"},
    "assistant": {"content", "name", "reasoning_content", "tool_calls"},
    "tool": {"content", "name", "tool_call_id"},
}
# Types of content parts, and what a template is told; image_url is OpenAI's word.
_PARTS = {"text": "text", "image": "image", "image_url": "image", "video": "video"}

Messages = Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
    """The chat template cannot be compiled, refused the messages, or broke a bound."""


@functools.cache
def default_template() -> str:
    """The ChatML template that stands in where a checkpoint has none."""
    return resources.files("gdnjax").joinpath("chatml.jinja").read_text(encoding="utf-8")


def render_chat(
    tokenizer: Tokenizer | None,
    messages: Messages,
    *,
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt of a conversation as a string, to read. `encode_chat` makes the ids.

    Args:
        tokenizer: its chat template is used, or the default one if it has none or is None.
        messages: dicts with `role` (system, user, assistant, tool) and `content`, a string or a list of parts
            `{"type": "text", "text": ...}`, `{"type": "image"}`, `{"type": "video"}`. Optional: `name`;
            `reasoning_content` and `tool_calls` of an assistant; `tool_call_id` of a tool.
        thinking: true opens a think block in the generation prompt, false closes an empty one, None leaves the choice
            to the template.
        tools: JSON descriptions of functions.
        add_generation_prompt: end with the opening of the assistant's turn.

    Raises:
        TypeError, ValueError: a message or tool is malformed; the error names its index, role and key.
        ChatTemplateError: the template does not compile, refuses these messages, or outgrows a bound.
    """
    return _render(tokenizer, _checked_messages(messages), _checked_tools(tools), thinking, add_generation_prompt)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    thinking: bool | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    allow_control: bool = False,
) -> list[int]:
    """The prompt of a conversation as token ids; arguments and errors as in `render_chat`.

    Control tokens that the template writes are control tokens. In messages and tools they are text, unless
    `allow_control`. One exception: the first `</think>` of an assistant's string content, and a `<think>` that opens
    that content, stay what they are when the message has no `reasoning_content`, because templates cut past reasoning
    out there.
    """
    chat, functions = _checked_messages(messages), _checked_tools(tools)
    if allow_control:
        prompt = _render(tokenizer, chat, functions, thinking, add_generation_prompt)
        return tokenizer.encode(prompt, allow_control=True)
    mark = _unused_character(chat, functions, _template_of(tokenizer))
    if tokenizer.control_tokens:
        starts = _control_starts(tokenizer)
        chat = [_marked_message(message, starts, mark) for message in chat]
        functions = _marked(functions, starts, mark)
    return tokenizer.encode_marked(_render(tokenizer, chat, functions, thinking, add_generation_prompt, mark), mark)


def _control_starts(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches a character that could start a control token.

    Every `<`, and not only the one of a whole `<|im_end|>`: a template may join two parts of a message, each of which
    holds half of a token. A letter or a space, too common to mark everywhere, counts only before the rest of its token.
    """
    starts = set()
    for token in tokenizer.control_tokens:
        common = token[0].isalnum() or token[0].isspace()
        starts.add(re.escape(token[0]) + (f"(?={re.escape(token[1:])})" if common else ""))
    return re.compile("|".join(sorted(starts)))


def _marked(value: Any, starts: re.Pattern[str], mark: str) -> Any:
    """`value` with `mark` after every character that could start a control token, in every string and key."""
    if isinstance(value, str):
        return starts.sub(lambda match: match.group() + mark, value)
    if isinstance(value, dict):
        return {_marked(key, starts, mark): _marked(item, starts, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [_marked(item, starts, mark) for item in value]
    return value


def _marked_message(message: dict[str, Any], starts: re.Pattern[str], mark: str) -> dict[str, Any]:
    marked = {"role": message["role"]} | {
        key: _marked(item, starts, mark) for key, item in message.items() if key != "role"
    }
    content = message["content"]
    if message["role"] == "assistant" and "reasoning_content" not in message and isinstance(content, str):
        before, close, after = content.partition("</think>")
        if close:
            opening = "<think>" if before.lstrip().startswith("<think>") else ""
            margin, _, thought = before.partition(opening) if opening else ("", "", before)
            marked["content"] = margin + opening + _marked(thought, starts, mark) + close + _marked(after, starts, mark)
    return marked


def _unused_character(messages: list[Any], tools: list[Any] | None, template: str) -> str:
    taken = set(json.dumps([messages, tools], ensure_ascii=False)) | set(template)
    for code in itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)):
        if chr(code) not in taken:
            return chr(code)
    raise ValueError("the messages use every private-use character; pass allow_control=True or remove one")


def _render(
    tokenizer: Tokenizer | None,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    thinking: bool | None,
    add_generation_prompt: bool,
    mark: str = "",
) -> str:
    variables: dict[str, Any] = dict(tokenizer.special_tokens) if tokenizer is not None else {}
    variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
    if thinking is not None:  # a template tells "not given" by `is defined`
        variables["enable_thinking"] = bool(thinking)
    variables["chat_mark"] = mark
    pieces: list[str] = []
    size = 0
    try:
        for piece in _compiled(_template_of(tokenizer)).generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise ChatTemplateError(f"the chat template wrote more than {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
    except ChatTemplateError:
        raise
    except jinja2.exceptions.SecurityError as error:
        raise ChatTemplateError(f"the chat template tried something the sandbox forbids: {error}") from error
    except _RefusedError as error:
        raise ChatTemplateError(f"the chat template refused these messages: {error}") from error
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise ChatTemplateError(
            f"the chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error
    return "".join(pieces)


def _template_of(tokenizer: Tokenizer | None) -> str:
    template = tokenizer.chat_template if tokenizer is not None else None
    return default_template() if template is None else template


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, less the operations that make a huge string from a small template."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        elif isinstance(left, int | float) and isinstance(right, int | float):
            if operator == "**" and not (-(2**16) <= left <= 2**16 and -64 <= right <= 64):
                raise jinja2.exceptions.SecurityError(f"{left!r:.40} ** {right!r:.40}")
        elif operator == "*":
            sequence: Any = left if isinstance(right, int) else right
            count: Any = right if isinstance(right, int) else left
            if not isinstance(count, int) or len(sequence) * count > MAX_RENDERED_CHARS:
                raise jinja2.exceptions.SecurityError(f"repetition beyond {MAX_RENDERED_CHARS} characters")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        padding = isinstance(obj, str) and attr in _PADDING
        return not padding and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)  # None unless value is the format method of a string
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped


def _check_format(text: str) -> None:
    """Refuses widths of four digits and more, and those that come from an argument."""
    if re.search(r"%[^a-zA-Z%]*(\d{4}|\*)|\{[^}]*:[^}]*(\d{4}|\{)", text):
        raise jinja2.exceptions.SecurityError(f"a width above 999 in the format {text!r:.40}")


def _format(text: Any, *values: Any) -> str:
    _check_format(str(text))
    return str(text) % values


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, by which training templates mark the assistant's words. Here its body is just rendered."""

    tags: ClassVar[set[str]] = {"generation"}  # pyright: ignore[reportIncompatibleVariableOverride]

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_BYTES:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_BYTES} are taken"
        )
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag])
    del environment.filters["center"]
    environment.filters["format"] = _format
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except (RecursionError, MemoryError, OverflowError, SyntaxError) as error:
        raise ChatTemplateError(f"the chat template does not compile: {type(error).__name__}: {error}") from error


@jinja2.pass_context
def _tojson(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as prompts want it: Jinja's own filter would write `<` as an HTML escape."""
    if isinstance(indent, int) and indent > 16:
        raise jinja2.exceptions.SecurityError(f"tojson with indent {indent}, above 16")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii:  # all but the mark, which must still be found in the output
        mark = context.get("chat_mark")
        text = re.sub(r"[^\x00-\x7f]", lambda m: m.group() if m.group() == mark else json.dumps(m.group())[1:-1], text)
    return text


class _RefusedError(jinja2.TemplateError):
    """What a template raises by raise_exception."""


def _raise_exception(message: Any) -> None:
    raise _RefusedError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """A copy of `messages` as plain JSON data, every one with a content."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with role and content, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; give at least one, such as {'role': 'user', 'content': 'Hello'}")
    return [_checked_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _checked_message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"{where} must be a dict with role and content, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        raise ValueError(f"{where} has role {role!r}; the roles are {', '.join(_KEYS)}")
    if unknown := sorted(str(key) for key in message if key != "role" and key not in _KEYS[role]):
        raise ValueError(f"{where} ({role}) has the key {unknown[0]!r}; it may have {', '.join(sorted(_KEYS[role]))}")
    for key in ("name", "reasoning_content", "tool_call_id"):
        if not isinstance(message.get(key, ""), str | None):
            raise TypeError(f"{where} ({role}): {key} must be a str, got {type(message[key]).__name__}")
    checked = {key: _plain(f"{where}.{key}", value) for key, value in message.items() if key != "content"}
    if checked.get("reasoning_content", "") is None:
        del checked["reasoning_content"]
    calls = checked.get("tool_calls") or []
    if not isinstance(calls, list):
        raise TypeError(f"{where} ({role}): tool_calls must be a list, got {type(calls).__name__}")
    for j, call in enumerate(calls):
        _check_call(f"{where}.tool_calls[{j}]", call)
    content = message.get("content")
    if content is None and calls:  # an answer that only calls functions
        content = ""
    checked["content"] = content if isinstance(content, str) else _checked_parts(f"{where} ({role})", content)
    return checked


def _checked_parts(where: str, content: Any) -> list[dict[str, str]]:
    if not isinstance(content, list | tuple):
        raise TypeError(f"{where}: content must be a str or a list of parts, got {type(content).__name__}")
    parts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in _PARTS:
            raise ValueError(f"{where}: content[{j}] has type {kind!r}; a part is a dict of type {', '.join(_PARTS)}")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise TypeError(f"{where}: content[{j}] needs a str under 'text', got {type(part.get('text')).__name__}")
        # An image itself stays outside: a template could call its methods.
        parts.append({"type": "text", "text": part["text"]} if kind == "text" else {"type": _PARTS[kind]})
    return parts


def _check_call(where: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must be {{'function': {{'name': ..., 'arguments': ...}}}}, got {call!r:.200}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):  # servers send them as JSON text, templates want the object
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: arguments is a str that is not JSON ({error}); pass a dict") from None
    if not isinstance(arguments, dict):
        raise TypeError(f"{where}: arguments must be a dict, got {type(arguments).__name__}")
    function["arguments"] = arguments


def _checked_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise TypeError(f"tools must be a list of JSON descriptions, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{i}] must be a dict that describes a function, got {type(tool).__name__}")
    return _plain("tools", tools)


def _plain(where: str, value: Any, depth: int = 0) -> Any:
    """A copy of `value` if it is JSON data; a template must get no object with methods of its own."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if bad := [key for key in value if type(key) is not str]:
            raise TypeError(f"{where} has the key {bad[0]!r}; keys must be str")
        return {key: _plain(f"{where}.{key}", item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    raise TypeError(f"{where} must be JSON data, got {type(value).__name__}")

"""The bodies of requests: what is taken, what is ignored because it changes nothing, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from gdnjax.config import ConfigError, GenerationDefaults
from gdnjax.generation.sampling import SamplingParams
from gdnjax.server.errors import ApiError
from gdnjax.server.settings import Settings

# What clients send along, and no answer depends on.
_IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention".split()
)
# What would change the answer, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
MAX_STOPS = 16


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What both kinds of requests ask for.

    `sampling` has the seed of the first choice; choice i takes that plus i. `max_tokens` is None where the request
    does not say. `json_schema` is what answers are held to, None where they are free.
    """

    sampling: SamplingParams
    max_tokens: int | None
    n: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    json_schema: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """`/v1/completions`: one prompt or several, as texts or token ids."""

    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class ChatRequest:
    """`/v1/chat/completions`. `messages` and `tools` are as `encode_chat` takes them; `tools` is empty where the
    model is not to call any."""

    wanted: Wanted
    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...]
    thinking: bool | None


def parse_json(data: bytes) -> dict[str, Any]:
    """The object in a body.

    Raises:
        ApiError: 400, it is no JSON object.
    """

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON number")

    try:
        value = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {_kind(value)}; it takes an object")
    return value


def completion_request(body: Mapping[str, Any], defaults: GenerationDefaults, settings: Settings) -> CompletionRequest:
    """A checked request.

    Args:
        body: the JSON object.
        defaults: the checkpoint's way of sampling, for what is not given.
        settings: limits.

    Raises:
        ApiError: 400 (404 for a model that is not here); the message names the field.
    """
    fields = Fields(body)
    logprobs = fields.integer("logprobs", None, 0, 0, "how many other tokens to list, of which this server has none")
    wanted = _wanted(fields, defaults, settings, logprobs is not None, ("max_tokens",))
    given = fields.take("prompt")
    prompts = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    for prompt in prompts:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and prompt and all(map(_is_id, prompt))):
            raise _bad("prompt", given, "a text, a list of token ids, or a list of either")
    fields.finish()
    _check_choices(len(prompts), wanted.n, settings)
    return CompletionRequest(wanted, tuple(p if isinstance(p, str) else tuple(p) for p in prompts))


def chat_request(body: Mapping[str, Any], defaults: GenerationDefaults, settings: Settings) -> ChatRequest:
    """A checked request; arguments and errors as in `completion_request`."""
    fields = Fields(body)
    wanted = _wanted(fields, defaults, settings, fields.boolean("logprobs"), ("max_completion_tokens", "max_tokens"))
    messages = fields.take("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise _bad("messages", messages, "a list of objects with role and content")
    tools = fields.take("tools") or []
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise _bad("tools", tools, 'a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}')
    choice = fields.take("tool_choice")
    if choice not in (None, "auto", "none"):
        raise _bad("tool_choice", choice, "auto or none: what the model writes is not constrained")
    if tools and choice != "none" and wanted.json_schema is not None:
        raise ApiError(
            400,
            "response_format and tools: an answer held to a schema cannot call a function; leave one of them out, or "
            'send tool_choice = "none"',
            param="response_format",
        )
    extra = fields.take("chat_template_kwargs") or {}
    if not isinstance(extra, dict) or extra.keys() - {"enable_thinking"}:
        raise _bad("chat_template_kwargs", extra, '{"enable_thinking": true or false}')
    thinking = extra.get("enable_thinking")
    if not isinstance(thinking, bool | None):
        raise _bad("chat_template_kwargs.enable_thinking", thinking, "true or false")
    fields.finish()
    _check_choices(1, wanted.n, settings)
    return ChatRequest(
        wanted, [_message(i, m) for i, m in enumerate(messages)], () if choice == "none" else tuple(tools), thinking
    )


class Fields:
    """The fields of a body, each taken once; `finish` looks at what is left."""

    def __init__(self, body: Mapping[str, Any]):
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        """A field as it is; None where it is not there, or null."""
        return self._left.pop(name, None)

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool | None):
            raise _bad(name, value, "true or false")
        return bool(value)

    def integer(self, name: str, default: Any, low: int, high: int, why: str = "") -> Any:
        value = self.take(name)
        if value is None:
            return default
        if not _is_id(value) or not low <= value <= high:
            span = f"an integer from {low} to {high}" if low < high else f"{low}"
            raise _bad(name, value, span + (f": {why}" if why else ""))
        return value

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise _bad(name, value, "a number")
        try:
            return default if value is None else float(value)
        except OverflowError:
            raise _bad(name, value, "a number up to 1e30") from None

    def finish(self) -> None:
        """Refuses what is left and would have changed the answer."""
        for name, value in self._left.items():
            neutral = _NEUTRAL.get(name)
            if name in _IGNORED or (neutral is not None and value in neutral):
                continue
            if neutral is not None:
                raise _bad(name, value, f"null or {' or '.join(map(json.dumps, neutral))}; the rest is not supported")
            raise ApiError(400, f"{name} = {_short(value)}; this server knows no such field, leave it out", param=name)


def _wanted(
    fields: Fields, defaults: GenerationDefaults, settings: Settings, logprobs: bool, lengths: Sequence[str]
) -> Wanted:
    model = fields.take("model")
    if model is not None and model != settings.model:
        raise ApiError(
            404, f"model = {_short(model)}; this server has {settings.model!r}", code="model_not_found", param="model"
        )
    most = 2**31 - 1 if settings.max_tokens is None else settings.max_tokens
    given = [fields.integer(name, None, 1, most) for name in lengths]
    seed = fields.integer("seed", None, -(2**63), 2**63 - 1)
    options = fields.take("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise _bad("stream_options", options, '{"include_usage": true or false}')
    stop = fields.take("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop", stop, f"a text of at least one character, or a list of at most {MAX_STOPS}")
    more_ids = fields.take("stop_token_ids") or []
    if not isinstance(more_ids, list) or not all(map(_is_id, more_ids)):
        raise _bad("stop_token_ids", more_ids, "a list of token ids")
    stop_ids: tuple[int, ...] = () if fields.boolean("ignore_eos") else defaults.stop_ids
    json_schema = _json_schema(fields.take("response_format"))
    if json_schema is not None and not (stop_ids or more_ids):
        message = "response_format: JSON ends with a stop token; leave out ignore_eos, or give stop_token_ids"
        raise ApiError(400, message, param="response_format")
    try:
        sampling = SamplingParams(
            temperature=fields.number("temperature", defaults.temperature if defaults.do_sample else 0.0),
            top_k=fields.integer("top_k", defaults.top_k, 0, 2**31 - 1),
            top_p=fields.number("top_p", defaults.top_p),
            min_p=fields.number("min_p", defaults.min_p),
            repetition_penalty=fields.number("repetition_penalty", defaults.repetition_penalty),
            presence_penalty=fields.number("presence_penalty", 0.0),
            frequency_penalty=fields.number("frequency_penalty", 0.0),
            seed=secrets.randbits(32) if seed is None else seed % 2**32,
        )
    except ConfigError as error:
        raise ApiError(400, str(error), param=str(error).split(" ")[0]) from None
    return Wanted(
        sampling=sampling,
        max_tokens=next((count for count in given if count is not None), None),
        n=fields.integer("n", 1, 1, settings.max_choices),
        stop=tuple(stops),
        stop_ids=(*stop_ids, *more_ids),
        stream=fields.boolean("stream"),
        include_usage=bool(options.get("include_usage")),
        logprobs=logprobs,
        json_schema=json_schema,
    )


def _json_schema(given: Any) -> dict[str, Any] | None:
    """The schema that a `response_format` asks for."""
    described = given.get("json_schema") if isinstance(given, dict) else None
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema"} if isinstance(described, dict) and isinstance(described.get("schema"), dict):
            return described["schema"]
    takes = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}'
    raise _bad("response_format", given, takes)


def _check_choices(prompts: int, n: int, settings: Settings) -> None:
    if prompts * n > settings.max_choices:
        raise ApiError(
            400, f"{prompts} prompts times n = {n}; a request takes at most {settings.max_choices} choices", param="n"
        )


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message as the chat template takes it: without what clients send back as null, and of text only."""
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if kept.get("role") == "developer":  # OpenAI's newer word
        kept["role"] = "system"
    content = kept.get("content")
    for part in content if isinstance(content, list) else []:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ApiError(
                400, f"messages[{index}] has a part of type {_short(kind)}; it takes text parts", param="messages"
            )
    return kept


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return (
        isinstance(function, dict)
        and tool.get("type", "function") == "function"
        and isinstance(function.get("name"), str)
        and isinstance(function.get("parameters", {}), dict | None)
    )


def _bad(name: str, value: Any, takes: str) -> ApiError:
    return ApiError(400, f"{name} = {_short(value)}; it takes {takes}", param=name)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:200] + "..."


def _kind(value: Any) -> str:
    return {list: "list", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")

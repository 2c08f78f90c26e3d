"""The JSON of answers, whole and in chunks."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gdnjax.engine import Handle, Piece
from gdnjax.server.errors import ApiError
from gdnjax.server.reasoning import ReasoningSplitter
from gdnjax.server.settings import Settings
from gdnjax.server.tools import Call, ToolParser

if TYPE_CHECKING:
    from gdnjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Envelope:
    """What all objects of one answer share."""

    id: str
    model: str
    created: int

    def wrap(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        """An object of a kind: `chat.completion`, `chat.completion.chunk`, `text_completion`."""
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def envelope(prefix: str, model: str) -> Envelope:
    """A new answer's."""
    return Envelope(f"{prefix}-{uuid.uuid4().hex}", model, int(time.time()))


def usage(handles: Sequence[Handle], n: int) -> dict[str, Any]:
    """Tokens of all choices; a prompt counts once, whatever `n`."""
    prompts = [handle.usage for handle in handles[::n]]
    read, written = sum(u.prompt_tokens for u in prompts), sum(len(handle.tokens) for handle in handles)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
    }


def check_ended(handle: Handle, handles: Sequence[Handle], settings: Settings) -> None:
    """Refuses an answer that is of no use once one of its choices has ended.

    Raises:
        ApiError: 504 after the timeout, if no choice has a token; 500 after an error, 503 if the server cancelled it.
    """
    match handle.finish_reason:
        case "deadline" if not any(one.tokens for one in handles):
            message = f"no token after {settings.timeout:g} s, the server's limit; try again later"
            raise ApiError(504, message, code="timeout")
        case "error":
            raise ApiError(500, "the model failed on this request: see the server's log", code="model_error")
        case "cancelled":
            message = "the server is shutting down"
            raise ApiError(503, message, code="shutting_down", retry_after=settings.retry_after)


def reason_of(handle: Handle) -> str | None:
    """Why a choice ended, in OpenAI's words. They have none for a time limit: what it cut is `length` to them."""
    return "length" if handle.finish_reason == "deadline" else handle.finish_reason


class TextChoice:
    """One choice of `/v1/completions`, built up piece by piece."""

    kind = chunk_kind = "text_completion"

    def __init__(self, index: int, tokenizer: Tokenizer, logprobs: bool):
        self._index, self._tokenizer, self._logprobs = index, tokenizer, logprobs
        self._text = ""
        self._all: list[Piece] = []
        self._offset, self._stream = 0, tokenizer.stream()

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token."""
        return []

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the chunks that a piece becomes."""
        self._text += piece.text
        self._all.append(piece)
        if not piece.text and not (self._logprobs and piece.tokens):
            return []
        return [self._choice(piece.text, [piece], None)]

    def end(self, handle: Handle) -> list[dict[str, Any]]:
        """Choices of the last chunks."""
        return [self._choice("", [], reason_of(handle))]

    def whole(self, handle: Handle) -> dict[str, Any]:
        """The choice of an answer that is not streamed, after all pieces have been added."""
        self._offset, self._stream = 0, self._tokenizer.stream()
        return self._choice(self._text, self._all, reason_of(handle))

    def _choice(self, text: str, pieces: Sequence[Piece], reason: str | None) -> dict[str, Any]:
        found = self._scores(pieces) if self._logprobs else None
        return {"index": self._index, "text": text, "logprobs": found, "finish_reason": reason}

    def _scores(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        ids = [token for piece in pieces for token in piece.tokens]
        offsets = []
        for token in ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.push([token]))
        return {
            "tokens": [self._tokenizer.decode([token], skip_control=False) for token in ids],
            "token_logprobs": [logprob for piece in pieces for logprob in piece.logprobs],
            "top_logprobs": None,
            "text_offset": offsets,
        }


class ChatChoice:
    """One choice of `/v1/chat/completions`: reasoning, words and calls told apart.

    Args:
        index: its number.
        tokenizer: the model's.
        logprobs: whether it carries them.
        thinking: whether the prompt ends inside a think block.
        tools: the functions that the model may call.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, index: int, tokenizer: Tokenizer, logprobs: bool, thinking: bool, tools: Sequence[dict[str, Any]]
    ):
        self._index, self._tokenizer, self._logprobs = index, tokenizer, logprobs
        self._splitter = ReasoningSplitter(thinking)
        self._parser = ToolParser(tools) if tools else None
        self._reasoning, self._content = "", ""
        self._calls: list[dict[str, Any]] = []
        self._scores: list[dict[str, Any]] = []

    def opening(self) -> list[dict[str, Any]]:
        """Choices of the chunks before the first token."""
        return [self._chunk({"role": "assistant", "content": ""}, [], None)]

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Choices of the chunks that a piece becomes."""
        deltas = self._read(*self._splitter.push(piece.text))
        scores = self._score(piece)
        if not deltas and not scores:
            return []
        return [self._chunk(delta, scores if i == 0 else [], None) for i, delta in enumerate(deltas or [{}])]

    def end(self, handle: Handle) -> list[dict[str, Any]]:
        """Choices of the last chunks."""
        deltas = self._read(*self._splitter.finish())
        if self._parser is not None:
            deltas += self._words_and_calls(self._parser.finish())
        reason = self._reason(handle)
        return [*(self._chunk(delta, [], None) for delta in deltas), self._chunk({}, [], reason)]

    def whole(self, handle: Handle) -> dict[str, Any]:
        """The choice of an answer that is not streamed, after all pieces have been added."""
        self.end(handle)
        message: dict[str, Any] = {"role": "assistant", "content": self._content}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in self._calls]
            message["content"] = self._content or None
        found = {"content": self._scores, "refusal": None} if self._logprobs else None
        return {"index": self._index, "message": message, "logprobs": found, "finish_reason": self._reason(handle)}

    def _read(self, reasoning: str, answer: str) -> list[dict[str, Any]]:
        self._reasoning += reasoning
        deltas: list[dict[str, Any]] = [{"reasoning_content": reasoning}] if reasoning else []
        parts = [answer] if self._parser is None else self._parser.push(answer)
        return deltas + self._words_and_calls(parts)

    def _words_and_calls(self, parts: Sequence[str | Call]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, Call):
                function = {"name": part.name, "arguments": part.arguments}
                number = len(self._calls)
                call = {"index": number, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self._calls.append({**call, "function": function})
                deltas.append({"tool_calls": [self._calls[-1]]})
            elif part:
                self._content += part
                deltas.append({"content": part})
        return deltas

    def _score(self, piece: Piece) -> list[dict[str, Any]]:
        if not self._logprobs:
            return []
        new = [
            {
                "token": self._tokenizer.decode([token], skip_control=False),
                "bytes": list(self._tokenizer.token_bytes(token)),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for token, logprob in zip(piece.tokens, piece.logprobs, strict=True)
        ]
        self._scores += new
        return new

    def _chunk(self, delta: dict[str, Any], scores: list[dict[str, Any]], reason: str | None) -> dict[str, Any]:
        found = {"content": scores, "refusal": None} if scores else None
        return {"index": self._index, "delta": delta, "logprobs": found, "finish_reason": reason}

    def _reason(self, handle: Handle) -> str | None:
        return "tool_calls" if self._calls and handle.finish_reason == "stop" else reason_of(handle)

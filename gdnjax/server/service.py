"""From a checked request to its answer: what the endpoints have in common."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from gdnjax.chat import encode_chat
from gdnjax.engine import Engine, QueueFull, constraint
from gdnjax.engine.constraint import Constraint
from gdnjax.lm import LanguageModel
from gdnjax.server.errors import ApiError
from gdnjax.server.metrics import Metrics
from gdnjax.server.schema import ChatRequest, CompletionRequest, Wanted
from gdnjax.server.settings import Settings
from gdnjax.server.wire import ChatChoice, TextChoice, check_ended, envelope, usage
from gdnjax.server.worker import Choice, Ticket, Worker
from gdnjax.tokenizer import Tokenizer

log = logging.getLogger("gdnjax.server")
CLIENT_CLOSED = 499
"""nginx's status for a client that has gone; nobody reads it."""
COMPLETION_TOKENS = 16
"""OpenAI's `max_tokens` of a text completion that does not say."""
THINK_TAIL = 8
"""Tokens at a prompt's end in which an open think block is looked for."""


@dataclasses.dataclass
class Service:
    """One model behind HTTP.

    `draining` is set when the server is told to stop: nothing new is taken from then on.
    """

    lm: LanguageModel
    engine: Engine
    settings: Settings
    metrics: Metrics
    worker: Worker
    draining: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.lm.tokenizer is not None  # make_service checks
        return self.lm.tokenizer

    @property
    def _most_tokens(self) -> int:
        return self.settings.max_tokens or self.engine.config.max_length

    async def complete(self, request: Request, asked: CompletionRequest) -> Response:
        """The answer of `/v1/completions`."""
        self._check_room()
        n, wanted = asked.wanted.n, asked.wanted
        prompts = [prompt for prompt in asked.prompts for _ in range(n)]
        choices = [TextChoice(i, self.tokenizer, wanted.logprobs) for i in range(len(prompts))]
        most = wanted.max_tokens or min(COMPLETION_TOKENS, self._most_tokens)
        held_to = await self._constraint(wanted, thinking=False)
        return await self._answer(
            request, wanted, "cmpl", choices, lambda: self._choices(prompts, wanted, most, held_to)
        )

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """The answer of `/v1/chat/completions`."""
        self._check_room()
        wanted = asked.wanted
        try:
            prompt = await asyncio.to_thread(
                encode_chat, self.tokenizer, asked.messages, thinking=asked.thinking, tools=asked.tools or None
            )
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error), param="messages") from None
        opened = self.tokenizer.decode(prompt[-THINK_TAIL:], skip_control=False).rstrip().endswith("<think>")
        choices = [ChatChoice(i, self.tokenizer, wanted.logprobs, opened, asked.tools) for i in range(wanted.n)]
        most = wanted.max_tokens or self._most_tokens
        prompts = [prompt] * wanted.n
        held_to = await self._constraint(wanted, thinking=opened)
        return await self._answer(
            request, wanted, "chatcmpl", choices, lambda: self._choices(prompts, wanted, most, held_to)
        )

    async def _constraint(self, wanted: Wanted, thinking: bool) -> Constraint | None:
        """What the answers are held to, behind a think block where the prompt has opened one."""
        if wanted.json_schema is None:
            return None
        try:
            return await asyncio.to_thread(constraint.json_schema, self.lm, wanted.json_schema, thinking=thinking)
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format") from None

    def _check_room(self) -> None:
        # Before a prompt is encoded for nothing: a burst must cost little where it is refused.
        if self.engine.full:
            raise self._no_room()

    def _no_room(self) -> ApiError:
        message = f"{self.engine.waiting} requests wait, too many for another; try again later"
        return ApiError(429, message, code="queue_full", retry_after=self.settings.retry_after)

    def _choices(
        self, prompts: Sequence[str | Sequence[int]], wanted: Wanted, most: int, held_to: Constraint | None
    ) -> list[Choice]:
        # A text is encoded once, not n times.
        encoded = {p: self.tokenizer.encode(p) for p in prompts if isinstance(p, str)}
        return [
            Choice(
                encoded[prompt] if isinstance(prompt, str) else prompt,
                most,
                dataclasses.replace(wanted.sampling, seed=(wanted.sampling.seed + i % wanted.n) % 2**32),
                wanted.stop_ids,
                wanted.stop,
                held_to,
            )
            for i, prompt in enumerate(prompts)
        ]

    async def _answer(
        self,
        request: Request,
        wanted: Wanted,
        prefix: str,
        parts: Sequence[TextChoice] | Sequence[ChatChoice],
        choices: Callable[[], list[Choice]],
    ) -> Response:
        ticket = self.worker.ticket()
        try:
            await self._submit(ticket, choices, "prompt" if prefix == "cmpl" else "messages")
            if wanted.stream:
                return _Events(self._events(ticket, wanted, prefix, parts), ticket, self.settings.client_timeout)
            body = await _unless_gone(request, self._whole(ticket, wanted, prefix, parts))
        except BaseException:
            ticket.close()
            raise
        ticket.close()
        return Response(status_code=CLIENT_CLOSED) if body is None else JSONResponse(body)

    async def _submit(self, ticket: Ticket, choices: Callable[[], list[Choice]], param: str) -> None:
        try:
            # Elsewhere, because a long prompt takes long to encode.
            await asyncio.to_thread(lambda: self.worker.submit(ticket, choices(), self.settings.timeout))
        except QueueFull:
            raise self._no_room() from None
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from None

    async def _whole(
        self, ticket: Ticket, wanted: Wanted, prefix: str, parts: Sequence[TextChoice] | Sequence[ChatChoice]
    ) -> dict[str, Any]:
        async for index, piece in ticket.pieces():
            if piece is not None:
                parts[index].add(piece)
            else:
                check_ended(ticket.handles[index], ticket.handles, self.settings)
        whole = [part.whole(handle) for part, handle in zip(parts, ticket.handles, strict=True)]
        return envelope(prefix, self.settings.model).wrap(parts[0].kind, whole, usage=usage(ticket.handles, wanted.n))

    async def _events(
        self, ticket: Ticket, wanted: Wanted, prefix: str, parts: Sequence[TextChoice] | Sequence[ChatChoice]
    ) -> AsyncIterator[str]:
        head, kind = envelope(prefix, self.settings.model), parts[0].chunk_kind
        more = {"usage": None} if wanted.include_usage else {}

        def chunks(choices: Sequence[dict[str, Any]]) -> list[str]:
            return [_dump(head.wrap(kind, [choice], **more)) for choice in choices]

        for part in parts:
            for chunk in chunks(part.opening()):
                yield chunk
        try:
            async for index, piece in ticket.pieces():
                if piece is None:
                    check_ended(ticket.handles[index], ticket.handles, self.settings)
                    new = parts[index].end(ticket.handles[index])
                else:
                    new = parts[index].add(piece)
                for chunk in chunks(new):
                    yield chunk
        except ApiError as error:
            self.metrics.refused.labels(error.status).inc()
            yield _dump(error.body())
            return
        if wanted.include_usage:
            yield _dump(head.wrap(kind, [], usage=usage(ticket.handles, wanted.n)))
        yield "[DONE]"


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Events(EventSourceResponse):
    """A stream that closes its ticket however it ends: read, left, stuck, or never begun."""

    def __init__(self, events: AsyncIterator[str], ticket: Ticket, timeout: float):
        super().__init__(events, sep="\n", send_timeout=timeout)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.warning("a client left its stream unread for %g s and is dropped", self.send_timeout)
        finally:
            self._ticket.close()


async def _unless_gone(request: Request, work: Any) -> Any:
    """What `work` returns; None once the client has gone, and `work` is cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()


def make_service(lm: LanguageModel, engine: Engine, settings: Settings) -> Service:
    """A service over an engine that nobody else steps.

    Raises:
        ValueError: the model has no tokenizer.
    """
    if lm.tokenizer is None:
        raise ValueError("this model has no tokenizer, and a server answers in text; add tokenizer.json to the model")
    if constraint.available():
        constraint.prepare(lm.tokenizer)
    metrics = Metrics(engine)
    return Service(lm, engine, settings, metrics, Worker(engine, metrics))

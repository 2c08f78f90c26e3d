"""The routes, and what comes before every one of them: the key, the size of the body, the way errors look."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gdnjax.server.errors import ApiError
from gdnjax.server.schema import chat_request, completion_request, parse_json
from gdnjax.server.service import CLIENT_CLOSED, Service

log = logging.getLogger("gdnjax.server")
Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(service: Service) -> Starlette:
    """The application; its lifespan starts and stops the service's worker."""
    settings, defaults = service.settings, service.lm.config.generation
    created = int(time.time())

    def guarded(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            if settings.api_key is not None:
                given = request.headers.get("authorization", "").encode()
                if not hmac.compare_digest(given, f"Bearer {settings.api_key}".encode()):
                    raise ApiError(401, "send the server's key as 'Authorization: Bearer KEY'", code="invalid_api_key")
            try:
                return await endpoint(request)
            except (ApiError, HTTPException, ClientDisconnect):
                raise
            except Exception as error:
                # Not left to the handler of Exception: behind that, the connection is closed under whoever else sends.
                return await unexpected(request, error)

        return checked

    async def body_of(request: Request) -> bytes:
        if service.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=settings.retry_after)
        try:
            async with asyncio.timeout(settings.client_timeout):
                return await read_body(request, settings.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"the body did not come in {settings.client_timeout:g} s") from None

    async def completions(request: Request) -> Response:
        body = parse_json(await body_of(request))
        return await service.complete(request, completion_request(body, defaults, settings))

    async def chat(request: Request) -> Response:
        body = parse_json(await body_of(request))
        return await service.chat(request, chat_request(body, defaults, settings))

    def model() -> dict[str, object]:
        limit = service.engine.config.max_length
        head = {"id": settings.model, "object": "model", "created": created, "owned_by": "gdnjax"}
        return {**head, "max_model_len": limit}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model()]})

    async def one_model(request: Request) -> Response:
        if (name := request.path_params["name"]) != settings.model:
            raise ApiError(404, f"model = {name!r}; this server has {settings.model!r}", code="model_not_found")
        return JSONResponse(model())

    async def health(request: Request) -> Response:
        failure = service.worker.failure
        if service.draining:
            status = "draining"
        elif failure is not None or not service.worker.alive:
            status = "failing"
        else:
            status = "ok"
        return JSONResponse({"status": status, "error": failure}, 200 if status == "ok" else 503)

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE_LATEST})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.stop)

    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        service.metrics.refused.labels(error.status).inc()
        return error.response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await api_error(request, ApiError(error.status_code, message))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED)

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return await api_error(request, ApiError(500, "the server failed on this request: see its log"))

    return Starlette(
        routes=[
            Route("/v1/completions", guarded(completions), methods=["POST"]),
            Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(one_model)),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            ApiError: api_error,
            HTTPException: http_error,
            ClientDisconnect: gone,
            Exception: unexpected,
        },
        lifespan=lifespan,
    )


async def read_body(request: Request, limit: int) -> bytes:
    """A request's body.

    Raises:
        ApiError: 413, it has more than `limit` bytes. No more than that are kept.
    """
    said = request.headers.get("content-length", "")
    size = int(said) if said.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise ApiError(413, f"the body has {said or 'more'} bytes; at most {limit} are taken", code="too_large")
    return b"".join(parts)

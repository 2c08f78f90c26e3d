"""Runs the application until it is told to stop, and then lets running requests end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from gdnjax.server.app import create_app
from gdnjax.server.service import Service

CLOSING_SECONDS = 5
"""After draining: for answers to reach clients, then for connections to close."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet; port 0 is any free one.

    Raises:
        OSError: names the address.
    """
    sock = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, OverflowError) as error:
        if sock is not None:
            sock.close()
        raise OSError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from None
    return sock


class Server(uvicorn.Server):
    """A uvicorn server that drains before it closes: at the first signal, it answers new requests with 503 and goes on
    with the others, up to `Settings.drain` seconds; then it cancels them. A second signal ends it at once."""

    def __init__(self, service: Service, ready: Callable[[], None] = lambda: None):
        config = uvicorn.Config(
            create_app(service),
            log_config=None,
            access_log=False,
            lifespan="on",
            limit_concurrency=service.settings.max_connections,
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        super().__init__(config)
        self._service, self._ready = service, ready
        self._until: float | None = None
        self._cancelled = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self.drain()

    def drain(self) -> None:
        """Begins to stop; from any thread."""
        self._service.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.draining:
            now = time.monotonic()
            if self._until is None:
                self._until = now + self._service.settings.drain
            if now >= self._until and not self._cancelled:
                self._cancelled = True
                self._service.worker.cancel_all()
            if self._service.worker.idle or now >= self._until + CLOSING_SECONDS:
                self.should_exit = True
        return await super().on_tick(counter)

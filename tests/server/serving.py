"""A real server in a thread, over the small model, and clients for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai

from gdnjax.engine import Engine
from gdnjax.lm import LanguageModel
from gdnjax.server.run import Server, bind
from gdnjax.server.service import Service, make_service
from gdnjax.server.settings import Settings
from gdnjax.state.device import snapshot_bytes
from gdnjax.tokenizer import Tokenizer
from tests.generation.small import SMALL, byte_tokenizer, small_model

# The shapes of tests/engine, so that one process compiles them once.
CONFIG = dict(state_layout="twin", prefix_cache_bytes=4 * snapshot_bytes(SMALL), prefix_interval=16)
REQUESTS, KV_TOKENS, WAITING = 4, 16 * 16, 6
KEY = "sesame"
# Short, for a byte is a token and a request has 64.
TEMPLATE = (
    "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}\n{% endfor %}"
    "{% if tools %}{{ tools[0].function.name }}\n{% endif %}{% if enable_thinking %}<think>\n{% endif %}"
)


@functools.cache
def model() -> LanguageModel:
    plain = byte_tokenizer()
    tokenizer = Tokenizer(plain._bpe, plain.control_tokens.values(), chat_template=TEMPLATE)
    return dataclasses.replace(small_model(**CONFIG), tokenizer=tokenizer)


def make_engine(**arguments: Any) -> Engine:
    limits = dict(max_requests=REQUESTS, kv_tokens=KV_TOKENS, chunk_tokens=16, max_waiting=WAITING)
    return Engine(model(), **(limits | arguments))


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that answers at `url`."""

    service: Service
    server: Server
    thread: threading.Thread
    url: str

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def openai(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, path: str = "/v1/completions", json: Any = None, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}", **more.pop("headers", {})}
        return httpx.post(self.url + path, json=json, headers=headers, timeout=more.pop("timeout", 60), **more)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {KEY}"}, timeout=60)


@contextlib.contextmanager
def running(engine: Engine | None = None, buffers: int | None = None, **settings: Any) -> Iterator[Running]:
    """Args:
    engine: None makes one.
    buffers: bytes that the system keeps of what a client has not read.
    settings: changes of `Settings`.
    """
    service = make_service(
        model(), engine or make_engine(), Settings(**({"model": "small", "api_key": KEY} | settings))
    )
    ready = threading.Event()
    server = Server(service, ready.set)
    with bind("127.0.0.1", 0) as sock:
        if buffers is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffers)
        url = "http://{}:{}".format(*sock.getsockname())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(60)
            yield Running(service, server, thread, url)
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits for what another thread is about to do."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.005)


def in_thread(call: Callable[[], Any]) -> Callable[[], Any]:
    """Starts a call in a thread; what it returns waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()

    def result() -> Any:
        thread.join(60)
        return found[0]

    return result

"""Clients of a server that speaks OpenAI's completions: one streamed request, and a closed loop of many."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from gdnjax.bench.serve import Delivery, Load, summarize

if TYPE_CHECKING:
    import httpx


class ServerError(RuntimeError):
    """The server's answer is not a completion; `status` is its HTTP status, `retry_after` its header of that name."""

    def __init__(self, status: int, text: str, retry_after: str | None = None):
        super().__init__(f"the server answered {status}: {text[:500]}")
        self.status, self.retry_after = status, retry_after


def connect(url: str, clients: int) -> httpx.Client:
    """A client of so many connections to `url` (`http://host:port`), with or without `/v1` behind it.

    Raises:
        RuntimeError: httpx is not installed.
    """
    try:
        import httpx
    except ImportError:
        raise RuntimeError("--url needs httpx, which is not installed; pip install httpx") from None
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    return httpx.Client(base_url=url.rstrip("/").removesuffix("/v1"), timeout=httpx.Timeout(600.0), limits=limits)


def only_model(client: httpx.Client) -> str:
    """The first model that a server lists."""
    response = client.get("/v1/models")
    if response.is_error:
        raise ServerError(response.status_code, response.text)
    return response.json()["data"][0]["id"]


def stream(
    client: httpx.Client, model: str, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> Generator[Any, None, None]:
    """The chunks of one streamed completion, as JSON, as they come. Closing the generator disconnects.

    Args:
        client: from `connect`.
        model, prompt, max_tokens: the request; `prompt` is token ids.
        **fields: more fields of the request.

    Raises:
        ServerError: any status but 200, or an error within the stream.
    """
    body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body | fields) as response:
        if response.is_error:
            response.read()
            raise ServerError(response.status_code, response.text, response.headers.get("retry-after"))
        for line in response.iter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data:"))
            if "error" in chunk:
                raise ServerError(response.status_code, str(chunk["error"]))
            yield chunk


def tokens_of(choice: Any) -> list[tuple[str, float]]:
    """A chunk's tokens with their log-probabilities, of a request with `logprobs=0`.

    Its chunks tell every token, also one that completes no character.
    """
    found = choice.get("logprobs") or {"tokens": [], "token_logprobs": []}
    return list(zip(found["tokens"], found["token_logprobs"], strict=True))


def run_server(url: str, load: Load, vocab_size: int) -> dict[str, float]:
    """`gdnjax.bench.serve.run_engine` against a server.

    Requests that the server ends early (a stop id) count like the others. Raises as `stream`.
    """
    prompts, lock, ended = load.prompts(vocab_size), threading.Lock(), [0]
    deliveries: list[Delivery] = []

    def client_loop(connection: httpx.Client, model: str) -> None:
        while True:
            with lock:
                if ended[0] >= load.clients * load.turns:
                    return
                prompt, delivery = next(prompts), Delivery(time.perf_counter())
                deliveries.append(delivery)
            for chunk in stream(connection, model, prompt, load.new_tokens, logprobs=0):
                count = sum(len(tokens_of(choice)) for choice in chunk["choices"])
                delivery.tokens += [time.perf_counter()] * count
                if ended[0] >= load.clients * load.turns:
                    return
            with lock:
                ended[0] += 1

    with connect(url, load.clients) as connection, ThreadPoolExecutor(load.clients) as pool:
        model = only_model(connection)
        start = time.perf_counter()
        running = [pool.submit(client_loop, connection, model) for _ in range(load.clients)]
        for one in running:
            one.result()
        return summarize(deliveries, time.perf_counter() - start)

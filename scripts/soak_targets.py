"""What a soak runs against: an engine in this process, or a server that speaks OpenAI's completions."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import jax
from prometheus_client.parser import text_string_to_metric_families

from gdnjax.bench.client import ServerError, connect, only_model, stream, tokens_of
from gdnjax.engine import Engine, Piece, QueueFull

PATIENCE = 300.0
"""Seconds without a token after which a request is stuck."""
BUSY = (429, 503)


@dataclasses.dataclass(frozen=True)
class Ask:
    """One greedy request."""

    prompt: tuple[int, ...]
    new_tokens: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came: the tokens (ids from an engine, strings from a server) with their log-probabilities.

    `left`: the client went away after `leave_after` tokens. `refused`: nothing came, for too many wait; a server
    says when to come again.
    """

    outcome: Literal["complete", "left", "refused"]
    tokens: tuple[tuple[Any, float], ...] = ()


class Target(Protocol):
    """A place to send requests to, from any number of threads, within `running`."""

    def running(self) -> contextlib.AbstractContextManager[None]: ...

    def ask(self, ask: Ask, leave_after: int | None = None) -> Answer:
        """Sends a request and waits for its answer; leaves it after so many tokens.

        Raises:
            Exception: anything but an answer or a clean refusal.
        """
        ...

    def memory(self) -> dict[str, int]:
        """Bytes, by what holds them."""
        ...

    def check_idle(self) -> dict[str, Any]:
        """Once nobody asks: counters. Raises AssertionError where something of a request is left."""
        ...


class EngineTarget:
    """An engine, stepped by a thread of its own. A step that fails fails whoever asks then."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._at_rest = self._live_bytes()

    def _live_bytes(self) -> int:
        self.engine._launcher._rows.clear()  # those of the last steps are kept, and differ
        return live_bytes()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._step, name="engine")
        thread.start()
        try:
            yield
        finally:
            self._closing.set()
            thread.join()

    def _step(self) -> None:
        try:
            while not self._closing.is_set():
                if not self.engine.step():
                    time.sleep(0.001)
        except BaseException as failure:
            self._failure = failure

    def ask(self, ask: Ask, leave_after: int | None = None) -> Answer:
        heard: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        try:
            handle = self.engine.submit(ask.prompt, ask.new_tokens, stop_ids=(), on_piece=heard.put)
        except QueueFull:
            return Answer("refused")
        came: list[tuple[Any, float]] = []
        waited = 0.0
        while True:
            if leave_after is not None and len(came) >= leave_after:
                self.engine.cancel(handle)
                return Answer("left", tuple(came))
            try:
                piece = heard.get(timeout=1.0)
            except queue.Empty:
                waited += 1.0
                if self._failure is not None:
                    raise RuntimeError("the engine failed") from self._failure
                if waited >= PATIENCE:
                    raise TimeoutError(f"no token of request {handle.number} within {PATIENCE} s") from None
                continue
            waited = 0.0
            if piece is None:
                break
            came += zip(piece.tokens, piece.logprobs, strict=True)
        if handle.finish_reason != "length" or len(came) != ask.new_tokens:
            raise RuntimeError(f"request {handle.number} ended with {handle.finish_reason} after {len(came)} tokens")
        return Answer("complete", tuple(came))

    def memory(self) -> dict[str, int]:
        return {"rss": resident("self")}

    def check_idle(self) -> dict[str, Any]:
        assert self._failure is None, f"a step failed: {self._failure!r}"
        e, limit = self.engine, time.monotonic() + 60
        while (e.waiting or e.running) and time.monotonic() < limit:
            time.sleep(0.01)
        # The lock of a step: the last one has ended, with what it had on its way.
        with e._lock:
            e.run()
            assert (e.waiting, e.running, e.pool.live) == (0, 0, ()), f"{e.waiting} wait, {e.running} run"
            assert e.pool.requests.free == e.config.max_requests, "a slot was not given back"
            pages = e.pool.pages
            assert pages.free + pages.idle == pages.count, f"{pages.count - pages.free - pages.idle} pages leaked"
            e.pool.check(device=True)
            found = self._live_bytes()
            assert found == self._at_rest, f"live arrays: {found} bytes after, {self._at_rest} before"
        stats = jax.devices()[0].memory_stats() or {}
        in_use = {key: stats[key] for key in ("bytes_in_use", "peak_bytes_in_use") if key in stats}
        return {"counters": dict(sorted(e.counters.items())), "live_bytes": found, **in_use}


class ServerTarget:
    """A server at `url`; `pid` is its process, if it runs on this machine and its memory is to be watched."""

    def __init__(self, url: str, clients: int, pid: int | None):
        self._client, self._pid = connect(url, clients), pid
        self._model = only_model(self._client)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.closing(self._client):
            yield

    def ask(self, ask: Ask, leave_after: int | None = None) -> Answer:
        came: list[tuple[Any, float]] = []
        reason = None
        chunks = stream(self._client, self._model, ask.prompt, ask.new_tokens, logprobs=0)
        with contextlib.closing(chunks):
            try:
                for chunk in chunks:
                    for choice in chunk["choices"]:
                        came += tokens_of(choice)
                        reason = choice.get("finish_reason") or reason
                    if leave_after is not None and len(came) >= leave_after:
                        return Answer("left", tuple(came))
            except ServerError as error:
                if error.status in BUSY and error.retry_after is not None and not came:
                    return Answer("refused")
                raise
        if reason not in ("stop", "length"):
            raise RuntimeError(f"a stream ended with {reason!r} after {len(came)} tokens")
        return Answer("complete", tuple(came))

    def memory(self) -> dict[str, int]:
        return {} if self._pid is None else {"rss": resident(str(self._pid))}

    def check_idle(self) -> dict[str, Any]:
        limit = time.monotonic() + 60
        while (found := self._gauges()) and found["requests_running"] + found["requests_waiting"]:
            assert time.monotonic() < limit, f"requests are left: {found}"
            time.sleep(0.05)
        if found:
            assert found["requests_free"] == found["requests_limit"], f"a slot was not given back: {found}"
            assert found["kv_pages_used"] == found["kv_pages_idle"], f"pages leaked: {found}"
            health = self._client.get("/health")
            assert health.status_code == 200, f"/health says {health.status_code}: {health.text}"
        return {"server": {"model": self._model, **found}}

    def _gauges(self) -> dict[str, float]:
        """This project's gauges and counters, without their prefix; nothing of another's server."""
        response = self._client.get("/metrics")
        if response.status_code != 200:
            return {}
        samples = [s for family in text_string_to_metric_families(response.text) for s in family.samples]
        names = {s.name: s.value for s in samples if s.name.startswith("gdnjax_") and not s.labels}
        return {name.removeprefix("gdnjax_"): v for name, v in names.items() if not name.endswith("_created")}


def live_bytes() -> int:
    """Bytes of all arrays on the device."""
    gc.collect()
    # By address: an array that was asked to come to the host is listed twice by JAX.
    live = [array for array in jax.live_arrays() if not array.is_deleted()]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in live}.values())


def resident(process: str) -> int:
    """Bytes of a process that are in memory (Linux)."""
    with open(f"/proc/{process}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

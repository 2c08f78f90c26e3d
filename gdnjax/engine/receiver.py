"""From the device to the requests: fetches what was launched, and sees which requests end by it."""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from gdnjax.engine.constraint import ConstraintError
from gdnjax.engine.handle import FinishReason, Handle
from gdnjax.engine.launcher import AnyFlight, Flight, ScoreFlight, VerifyFlight
from gdnjax.engine.programs import unpack
from gdnjax.generation.accept import NOT_FINITE, NOTHING

log = logging.getLogger("gdnjax.engine")
Finish = Callable[[Handle, FinishReason], None]
FLOOD, FLOOD_LOGPROB = 32, math.log(0.5)
"""So many tokens 0 on end, each less probable than this, are what broken kernels leave: logits that are flat, or that
have lost their NaN. A model that really repeats itself is sure of it."""


class Receiver:
    """Hands tokens to their handles.

    Args:
        counters: `generated_tokens` counts here.

    Attributes:
        seconds_waiting: spent waiting for the device.
    """

    def __init__(self, counters: collections.Counter[str]):
        self._counters = counters
        self.seconds_waiting = 0.0

    def receive(self, flights: Sequence[AnyFlight], finish: Finish) -> list[int]:
        """Takes what flights bring, in order.

        Args:
            flights: of `Launcher`.
            finish: called where a request ends, with the reason.

        Returns:
            Numbers of the requests that have ended because their logits are NaN or infinite.
        """
        broken: list[int] = []
        for flight in flights:
            if isinstance(flight, ScoreFlight):
                self._scores(flight)
            elif isinstance(flight, VerifyFlight):
                broken += self._verified(flight, finish)
            else:
                broken += self._tokens(flight, finish)
        return broken

    def _scores(self, flight: ScoreFlight) -> None:
        handle = flight.handle
        # Behind the prompt's last token there is nothing to score, unless the caller has said what.
        most = len(handle.prompt) - (handle.followed_by is None)
        (scores,) = self.fetch(flight.logprobs)
        handle.prompt_logprobs += scores[: flight.count]
        del handle.prompt_logprobs[most:]

    def _tokens(self, flight: Flight, finish: Finish) -> list[int]:
        broken: list[int] = []
        (packed,) = self._wait(flight.emission)
        emission = unpack(packed)
        for handle, token, logprob in zip(
            flight.handles, emission.token.tolist(), emission.logprob.tolist(), strict=False
        ):
            if handle is not None and handle.finish_reason is None:
                self._take(handle, token, logprob, finish, broken)
        return broken

    def _verified(self, flight: VerifyFlight, finish: Finish) -> list[int]:
        broken: list[int] = []
        rows = self.fetch(flight.verdict.token, flight.verdict.logprob, flight.drafted)
        for handle, tokens, logprobs, drafted in zip(flight.handles, *rows, strict=False):
            if handle.finish_reason is not None:
                continue
            before = len(handle.tokens)
            for token, logprob in zip(tokens, logprobs, strict=True):
                # A stop may stand inside of what was accepted: what is behind it was never emitted.
                if token == NOTHING or handle.finish_reason is not None:
                    break
                self._take(handle, token, logprob, finish, broken)
            self._counters["drafted_tokens"] += drafted
            self._counters["accepted_tokens"] += max(0, len(handle.tokens) - before - 1)
        return broken

    def _take(self, handle: Handle, token: int, logprob: float, finish: Finish, broken: list[int]) -> None:
        """One more token of a request, which may end it; or none, where its logits were not finite."""
        if token == NOT_FINITE:
            finish(handle, "error")
            broken.append(handle.number)
            return
        self._counters["generated_tokens"] += 1
        more = handle.collector.push(token, logprob)
        handle.zeros = handle.zeros + 1 if token == 0 and logprob < FLOOD_LOGPROB else 0
        if handle.zeros >= FLOOD:
            finish(handle, "error")
        elif not more or len(handle.tokens) == handle.max_new_tokens:
            finish(handle, "length" if more else "stop")
        elif handle.matcher is not None:
            try:
                handle.matcher.advance(token)
            except ConstraintError as error:
                log.warning("request %d ends: %s", handle.number, error)
                finish(handle, "error")

    def fetch(self, *arrays: jax.Array) -> list[list[Any]]:
        """Arrays as lists, once the device has them."""
        return [array.tolist() for array in self._wait(*arrays)]

    def _wait(self, *arrays: jax.Array) -> list[np.ndarray]:
        start = time.perf_counter()
        fetched = [np.asarray(array) for array in arrays]
        self.seconds_waiting += time.perf_counter() - start
        return fetched

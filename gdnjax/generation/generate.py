"""Generation over a batch of unequal prompts: prefill in windows, then one of the two loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.generation.accept import NOT_FINITE, NOTHING
from gdnjax.generation.collect import Collector, GenerationResult, StreamCallback
from gdnjax.generation.loop import (
    Decoding,
    Loop,
    PythonLoop,
    device_loop,
    jitted_emit,
    make_decoding,
)
from gdnjax.generation.sampling import SamplingParams, make_sampler
from gdnjax.model.step import prefill
from gdnjax.state.batch import Batch, check_ids, prefill_batch, row_bucket
from gdnjax.state.pytree import State, init_state
from gdnjax.weights.declaration import Params

if TYPE_CHECKING:
    from gdnjax.tokenizer import Tokenizer

jitted_prefill = jax.jit(prefill, donate_argnames="state")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is continued."""

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams


class NonFiniteLogitsError(FloatingPointError):
    """The model's logits are NaN or infinite: damaged weights, or numbers beyond the dtype."""


def generate(
    params: Params,
    config: Config,
    requests: Sequence[Request],
    *,
    tokenizer: Tokenizer | None = None,
    stop_ids: tuple[int, ...] = (),
    stop: Sequence[str] = (),
    callback: StreamCallback | None = None,
    logprobs: bool = False,
    loop: Loop = "device",
) -> list[GenerationResult]:
    """Continues every request, all in one batch.

    Args:
        params: params, or packed weights.
        config: limits: at most `max_requests` requests, each prompt shorter than `max_length`.
        requests: the prompts; a request that would outgrow `max_length` ends there with `length`.
        tokenizer: needed for text, stop strings and streamed text.
        stop_ids: ids that end a request; empty never stops early.
        stop: strings that end a request; the text is cut before them.
        callback: called for every new token as it comes (Python loop).
        logprobs: whether results carry log-probabilities.
        loop: `device` or `python`; stop strings and a callback need the host, so they take `python`.

    Raises:
        ValueError: no or too many requests, an empty or too long prompt, ids outside the vocabulary.
        NonFiniteLogitsError: the model produced NaN or infinity.
    """
    limits = check_requests(config, requests, stop_ids)
    if loop not in get_args(Loop):
        raise ValueError(f"loop = {loop!r}; it takes {' or '.join(get_args(Loop)[::-1])}")
    if stop and tokenizer is None:
        raise ValueError(f"stop = {list(stop)!r} needs a tokenizer, and this model has none; use stop_ids")
    if not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop = {list(stop)!r}; it takes strings of at least one character")
    prompts = [request.prompt for request in requests]
    working = working_config(config, prompts, limits)
    state = init_state(working, [len(p) + n for p, n in zip(prompts, limits, strict=True)])
    sampler = make_sampler([request.sampling for request in requests], working.max_requests)
    decoding = make_decoding(state, sampler, limits, stop_ids, prompts)
    collectors = [Collector(i, len(p), tokenizer, stop_ids, stop, callback) for i, p in enumerate(prompts)]

    state, logits = prefill_prompts(params, decoding.state, prompts)
    decoding, first = jitted_emit(dataclasses.replace(decoding, state=state), logits)
    _collect(collectors, np.asarray(first.token), np.asarray(first.logprob))

    if loop == "python" or stop or callback is not None:
        _python(params, decoding, collectors)
    elif max(limits) > 1:
        # A power of two, so that another max_new_tokens rarely compiles another loop.
        _, emissions = device_loop(params, decoding, row_bucket(max(limits) - 1))
        tokens, values = np.asarray(emissions.token), np.asarray(emissions.logprob)
        for token, value in zip(tokens, values, strict=True):
            _collect(collectors, token, value)
    return [collector.result(logprobs) for collector in collectors]


def _python(params: Params, decoding: Decoding, collectors: list[Collector]) -> None:
    driver = PythonLoop(params, decoding)
    for row, collector in enumerate(collectors):
        if collector.finish_reason is not None:
            driver.stop(row)
    if all(collector.finish_reason is not None for collector in collectors):
        return
    for tokens, values in driver:
        for row in _collect(collectors, tokens, values):
            driver.stop(row)


def _collect(collectors: list[Collector], tokens: np.ndarray, values: np.ndarray) -> list[int]:
    """Hands a step's emissions to the collectors; returns the rows that ended."""
    ended = []
    for row, collector in enumerate(collectors):
        token = int(tokens[row])
        if token == NOTHING or collector.finish_reason is not None:
            continue
        if token == NOT_FINITE:
            raise NonFiniteLogitsError(
                f"prompt {row}: the logits are NaN or infinite; check the weights, or load them with dtype='float32'"
            )
        if not collector.push(token, float(values[row])):
            ended.append(row)
    return ended


def check_requests(config: Config, requests: Sequence[Request], stop_ids: Sequence[int]) -> list[int]:
    """Refuses requests that cannot run; returns how many tokens each may emit."""
    if not requests:
        raise ValueError("no prompts; generate takes at least one")
    if len(requests) > config.max_requests:
        raise ValueError(
            f"{len(requests)} prompts; it takes at most max_requests = {config.max_requests} at once; "
            "send fewer, or load the model with a larger max_requests"
        )
    limits = []
    for index, request in enumerate(requests):
        if not request.prompt:
            raise ValueError(f"prompt {index} is empty; it takes at least one token")
        try:
            check_ids(request.prompt, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        count = request.max_new_tokens
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"max_new_tokens = {count!r}; it takes an integer >= 1")
        room = config.max_length - len(request.prompt)
        if room < 1:
            raise ValueError(
                f"prompt {index} has {len(request.prompt)} tokens; it takes at most max_length - 1 = "
                f"{config.max_length - 1}; shorten it, or load the model with a larger max_length"
            )
        limits.append(min(int(count), room))
    if len(stop_ids):
        try:
            check_ids(stop_ids, config.vocab_size)
        except ValueError as error:
            raise ValueError(f"stop_ids: {error}") from None
    return limits


def working_config(config: Config, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> Config:
    """The config of a state that is just large enough, in sizes that repeat: powers of two."""
    longest = max(len(p) + n for p, n in zip(prompts, limits, strict=True))
    length = min(config.max_length, row_bucket(longest, 256))
    rows = min(config.max_requests, row_bucket(len(prompts), 1))
    fits = rows * -(-length // config.page_size) * config.page_size
    kv_tokens = None if config.kv_tokens is None else min(config.kv_tokens, fits)
    return config.replace(max_requests=rows, max_length=length, kv_tokens=kv_tokens)


def prefill_prompts(params: Params, state: State, prompts: Sequence[Sequence[int]]) -> tuple[State, jax.Array]:
    """Runs all prompts in windows of at most `prefill_tokens` rows; request i takes prompt i.

    Returns:
        The state, and logits `[max_requests, V]` float32 of every prompt's last token.
    """
    config = state.config
    logits: jax.Array | None = None
    for pieces, complete in windows(prompts, config.prefill_tokens):
        batch = prefill_batch(config, pieces)
        new, state = jitted_prefill(params, state, Batch(batch.tokens, batch.request, batch.logits_rows))
        if logits is None:
            logits = new
        else:
            mask = np.isin(np.arange(config.max_requests), complete)
            logits = jnp.where(jnp.asarray(mask)[:, None], new, logits)
    assert logits is not None
    return state, logits


def windows(prompts: Sequence[Sequence[int]], size: int) -> list[tuple[dict[int, Sequence[int]], list[int]]]:
    """Cuts prompts into windows of at most `size` tokens, in order.

    Returns:
        For each window the pieces by request, and the requests whose last token is in it.
    """
    plan: list[tuple[dict[int, Sequence[int]], list[int]]] = []
    pieces: dict[int, Sequence[int]] = {}
    complete: list[int] = []
    room = size
    for request, prompt in enumerate(prompts):
        start = 0
        while start < len(prompt):
            piece = prompt[start : start + room]
            pieces[request] = piece
            start += len(piece)
            room -= len(piece)
            if start == len(prompt):
                complete.append(request)
            if room == 0:
                plan.append((pieces, complete))
                pieces, complete, room = {}, [], size
    if pieces:
        plan.append((pieces, complete))
    return plan

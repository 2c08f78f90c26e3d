"""Generation over a batch of unequal prompts: prefill in windows, then one of the two loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.config.schema import MOST_DRAFTS
from gdnjax.diagnosis.watch import Watch
from gdnjax.generation.accept import NOT_FINITE, NOTHING
from gdnjax.generation.collect import Collector, GenerationResult, StreamCallback
from gdnjax.generation.drafting import PROPOSE, Source
from gdnjax.generation.loop import Emission, Loop, PythonLoop, device_loop, jitted_emit, jitted_step, make_decoding
from gdnjax.generation.prompts import prefill_prompts
from gdnjax.generation.sampling import SamplingParams, make_sampler
from gdnjax.generation.speculation import Verified, make_speculation, python_step, speculative_device_loop
from gdnjax.state.batch import check_ids, row_bucket
from gdnjax.state.pytree import init_state
from gdnjax.weights.declaration import Params

if TYPE_CHECKING:
    from gdnjax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how it is continued. `speculate`: most drafts a step; None takes the config's."""

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams
    speculate: int | None = None


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
    drafts: Source = "mtp",
    adaptive: bool = False,
) -> list[GenerationResult]:
    """Continues every request, all in one batch.

    Args:
        params: params, or packed weights.
        config: limits: at most `max_requests` requests, each prompt shorter than `max_length`.
        requests: the prompts; a request that would outgrow `max_length` ends there with `length`.
        tokenizer: needed for text, stop strings and streamed text.
        stop_ids: ids that end a request; empty never stops early.
        stop: strings that end a request; the text is cut before them.
        callback: called with what each step brings (Python loop).
        logprobs: whether results carry log-probabilities.
        loop: `device` or `python`; stop strings and a callback need the host, so they take `python`.
        drafts: where drafts come from if a request speculates: `mtp` (the draft head) or `ngram` (the text so far).
        adaptive: whether requests draft less where little is accepted (`gdnjax.generation.adapt`).

    Raises:
        ValueError: no or too many requests, an empty or too long prompt, ids outside the vocabulary, a number of
            drafts over 7, or drafts of a head that the model does not have.
        NonFiniteLogitsError: the model produced NaN or infinity.
    """
    limits = check_requests(config, requests, stop_ids)
    counts = check_speculation(config, requests, drafts)
    if loop not in get_args(Loop):
        raise ValueError(f"loop = {loop!r}; it takes {' or '.join(get_args(Loop)[::-1])}")
    if stop and tokenizer is None:
        raise ValueError(f"stop = {list(stop)!r} needs a tokenizer, and this model has none; use stop_ids")
    if not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop = {list(stop)!r}; it takes strings of at least one character")
    prompts = [request.prompt for request in requests]
    watch = Watch(speculating_config(working_config(config, prompts, limits), max(counts), drafts))
    collectors = {
        watch.every * i: Collector(i, len(p), tokenizer, stop_ids, stop, callback) for i, p in enumerate(prompts)
    }
    prompts, limits, counts = watch.spread(prompts, []), watch.spread(limits, 0), watch.spread(counts, 0)
    samplings = watch.spread([request.sampling for request in requests], SamplingParams())
    state = watch.begin(init_state(watch.config, [len(p) + n for p, n in zip(prompts, limits, strict=True)]))
    decoding = make_decoding(state, make_sampler(samplings, watch.config.max_requests), limits, stop_ids, prompts)

    state, logits, hidden = prefill_prompts(params, decoding.state, prompts, watch)
    decoding, first = jitted_emit(dataclasses.replace(decoding, state=state), logits)
    _collect(collectors, jax.tree.map(np.asarray, first))

    step: Any = jitted_step
    run: Any = device_loop
    if watch.config.speculate:
        decoding = make_speculation(decoding, counts, drafts, prompts, hidden, adaptive)
        step = functools.partial(python_step, propose=PROPOSE[drafts])
        run = functools.partial(speculative_device_loop, propose=PROPOSE[drafts])
    if loop == "python" or stop or callback is not None or watch.on:
        _python(PythonLoop(params, decoding, step, watch), collectors)
    elif max(limits) > 1:
        # A power of two, so that another max_new_tokens rarely compiles another loop.
        _, emissions = run(params, decoding, steps=row_bucket(max(limits) - 1))
        emissions = jax.tree.map(np.asarray, emissions)
        for number in range(len(emissions.token)):
            _collect(collectors, jax.tree.map(lambda x, number=number: x[number], emissions))
    return [collector.result(logprobs) for collector in collectors.values()]


def _python(driver: PythonLoop, collectors: Mapping[int, Collector]) -> None:
    for row, collector in collectors.items():
        if collector.finish_reason is not None:
            driver.stop(row)
    if all(collector.finish_reason is not None for collector in collectors.values()):
        return
    for emission in driver:
        for row in _collect(collectors, emission):
            driver.stop(row)


def _collect(collectors: Mapping[int, Collector], emission: Emission) -> list[int]:
    """Hands a step's emissions to the collectors of their rows; returns the rows that ended."""
    rows = len(emission.token)
    tokens, logprobs = emission.token.reshape(rows, -1).tolist(), emission.logprob.reshape(rows, -1).tolist()
    drafted = emission.drafted.tolist() if isinstance(emission, Verified) else [0] * rows
    ended = []
    for index, (row, collector) in enumerate(collectors.items()):
        new = [token for token in tokens[row] if token not in (NOTHING, NOT_FINITE)]
        if collector.finish_reason is not None:
            continue
        # What comes before logits that are not finite may end the request, as in plain decoding.
        if new and not collector.push_step(new, logprobs[row][: len(new)], drafted[row]):
            ended.append(row)
        elif NOT_FINITE in tokens[row]:
            raise NonFiniteLogitsError(
                f"prompt {index}: the logits are NaN or infinite; check the weights, or load them with dtype='float32'"
            )
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


def check_speculation(config: Config, requests: Sequence[Request], drafts: Source) -> list[int]:
    """Refuses drafts that cannot be made; returns how many each request takes a step."""
    if drafts not in get_args(Source):
        raise ValueError(f"drafts = {drafts!r}; it takes {' or '.join(get_args(Source))}")
    counts = []
    for request in requests:
        count = config.speculate if request.speculate is None else request.speculate
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or not 0 <= count <= MOST_DRAFTS:
            raise ValueError(f"speculate = {count!r}; it takes an integer from 0 (plain decoding) to {MOST_DRAFTS}")
        counts.append(int(count))
    if any(counts) and drafts == "mtp" and config.mtp_num_hidden_layers == 0:
        raise ValueError(
            f"speculate = {max(counts)} with drafts = 'mtp', and this model has no draft head (mtp_num_hidden_layers = "
            "0); take drafts = 'ngram' (--drafts ngram), which needs none, or a checkpoint with mtp.* tensors"
        )
    return counts


def speculating_config(config: Config, most: int, drafts: Source) -> Config:
    """The config of a state for steps of at most `most` drafts."""
    form = config.speculative_state if most else "record"
    return config.replace(speculate=most, speculative_state=form, draft_kv=most > 0 and drafts == "mtp")


def working_config(config: Config, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> Config:
    """The config of a state that is just large enough, in sizes that repeat: powers of two."""
    longest = max(len(p) + n for p, n in zip(prompts, limits, strict=True))
    length = min(config.max_length, row_bucket(longest, 256))
    rows = min(config.max_requests, row_bucket(len(prompts), 1))
    fits = rows * -(-length // config.page_size) * config.page_size
    kv_tokens = None if config.kv_tokens is None else min(config.kv_tokens, fits)
    return config.replace(max_requests=rows, max_length=length, kv_tokens=kv_tokens)

"""A closed loop of clients over an engine, and the decode step alone that its tokens are compared with.

Every client sends its next request when the last one has ended. Times are the host's, taken where a token is
handed out. A round makes an engine for each arm in turn, so that arms alternate and only one engine at a time
takes memory; an engine is warmed up before anything is measured.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.engine import Engine, Handle, Piece
from gdnjax.engine.scheduler import row_buckets, smallest
from gdnjax.model.step import decode_and_commit
from gdnjax.state.batch import Batch
from gdnjax.state.pytree import init_state

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel

SPREAD = 0.25
"""Prompts are this share shorter or longer than asked for, at most."""
PLAIN_IDS = 1000
"""Prompts are of ids under this: every vocabulary has them, and none of them controls anything."""
ENGINE_KEYS = frozenset({"adaptive", "drafts"})
"""Arguments of `Engine` that an arm may set, beside keys of the config."""
BARE_STEPS = 32
BARE_REPETITIONS = 5
run_bare = jax.jit(decode_and_commit, donate_argnames="state", keep_unused=True)


@dataclasses.dataclass(frozen=True)
class Load:
    """What the clients ask for: each of `clients` sends requests one after the other, `turns` on average."""

    clients: int
    prompt_tokens: int = 256
    new_tokens: int = 256
    turns: int = 2

    def prompts(self, vocab_size: int, seed: int = 0) -> Iterator[list[int]]:
        """Random prompts without an end, the same for the same seed."""
        rng = np.random.default_rng(seed)
        least, most = int(self.prompt_tokens * (1 - SPREAD)), self.longest_prompt
        while True:
            yield rng.integers(0, min(vocab_size, PLAIN_IDS), rng.integers(max(1, least), most + 1)).tolist()

    @property
    def longest_prompt(self) -> int:
        return max(1, int(self.prompt_tokens * (1 + SPREAD)))


@dataclasses.dataclass
class Delivery:
    """When a request was sent, and when each of its tokens was handed out: seconds of `time.perf_counter`."""

    sent: float
    tokens: list[float] = dataclasses.field(default_factory=list)

    def hear(self, piece: Piece | None) -> None:
        """What `Engine.submit` takes as `on_piece`."""
        if piece is not None:
            self.tokens += [time.perf_counter()] * len(piece.tokens)


def run_engine(engine: Engine, load: Load) -> dict[str, float]:
    """Serves a load until `turns` requests a client have ended; those still running then are cancelled.

    Returns:
        `summarize` of it, and `host_ms`: what the median step took besides waiting for the device.

    Raises:
        RuntimeError: a request ended early, as with NaN in the logits.
    """
    prompts = load.prompts(engine.config.vocab_size)
    deliveries: list[Delivery] = []

    def send() -> Handle:
        prompt, delivery = next(prompts), Delivery(time.perf_counter())
        deliveries.append(delivery)
        return engine.submit(prompt, load.new_tokens, stop_ids=(), on_piece=delivery.hear)

    start, ended, host = time.perf_counter(), 0, []
    clients = [send() for _ in range(load.clients)]
    while ended < load.clients * load.turns:
        before, waited = time.perf_counter(), engine.seconds_waiting
        engine.step()
        host.append(time.perf_counter() - before - (engine.seconds_waiting - waited))
        for number, handle in enumerate(clients):
            if handle.done:
                if handle.finish_reason != "length":
                    raise RuntimeError(f"a request ended with {handle.finish_reason} after {len(handle.tokens)} tokens")
                ended += 1
                clients[number] = send()
    seconds = time.perf_counter() - start
    found = summarize(deliveries, seconds)
    for handle in clients:
        engine.cancel(handle)
    engine.run()
    return {**found, "host_ms": 1e3 * statistics.median(host)}


def summarize(deliveries: Sequence[Delivery], seconds: float) -> dict[str, float]:
    """Figures of what was delivered in so many seconds.

    Returns:
        `tokens_per_second`, percentiles of the time between two tokens of a request (`itl_p50_ms`, `itl_p95_ms`,
        `itl_p99_ms`) and of the time to the first one (`ttft_p50_ms`, `ttft_p95_ms`).
    """
    between = np.concatenate([np.diff(d.tokens) for d in deliveries])
    first = [d.tokens[0] - d.sent for d in deliveries if d.tokens]
    figures = {"tokens_per_second": sum(len(d.tokens) for d in deliveries) / seconds}
    for name, times, percentiles in (("itl", between, (50, 95, 99)), ("ttft", first, (50, 95))):
        for p in percentiles:
            figures[f"{name}_p{p}_ms"] = 1e3 * float(np.percentile(times, p))
    return figures


def bare_step(lm: LanguageModel, config: Config, load: Load) -> float:
    """Seconds of one decode step without the engine, sampling and drafts, dispatched again and again, on requests
    halfway through their answers."""
    rows = smallest(row_buckets(config.max_requests), min(load.clients, config.max_requests))
    state = init_state(config.replace(speculate=0))
    halfway = load.prompt_tokens + load.new_tokens // 2
    batch = Batch(jnp.zeros(rows, jnp.int32), jnp.arange(rows, dtype=jnp.int32))
    times = []
    for _ in range(1 + BARE_REPETITIONS):
        position = jnp.full(config.max_requests, halfway, jnp.int32)
        state = jax.block_until_ready(dataclasses.replace(state, position=position))
        start = time.perf_counter()
        for _ in range(BARE_STEPS):
            _, state = run_bare(lm.params, state, batch)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / BARE_STEPS)
    return statistics.median(times[1:])


def arm_config(config: Config, loads: Sequence[Load], overrides: Mapping[str, Any]) -> Config:
    """The config of an arm: room for the largest load, and the arm's own keys."""
    longest = max(load.longest_prompt + load.new_tokens for load in loads)
    # The timed steps without the engine start halfway through an answer and must end within it.
    longest = max(longest, *(load.prompt_tokens + load.new_tokens // 2 + BARE_STEPS for load in loads))
    limits = {"max_length": longest, "max_requests": max(load.clients for load in loads), "kv_tokens": None}
    config = config.replace(**limits | dict(overrides))
    return config.replace(kv_tokens=config.kv_pages * config.page_size)


def bench_serve(
    lm: LanguageModel,
    loads: Sequence[Load],
    arms: Mapping[str, Mapping[str, Any]] | None = None,
    rounds: int = 3,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Every load on every arm, `rounds` times, arms in turn.

    Args:
        lm: the model.
        loads: what to serve.
        arms: by name, serving keys of `Config` that the arm changes, and `ENGINE_KEYS`; None is one arm that changes
            none.
        rounds: at least 1. Figures are medians over them.
        say: is told what is going on.

    Returns:
        `device`, `rounds` and `cells`: per arm and load its name, the load, and per figure (`run_engine`'s,
        `bare_ms`, and `itl_over_bare`, the ratio of `itl_p50_ms` to it) the median and `spread`, half the range
        over the median.
    """
    configs, options = {}, {}
    for name, keys in (arms or {"": {}}).items():
        options[name] = {key: value for key, value in keys.items() if key in ENGINE_KEYS}
        configs[name] = arm_config(lm.config, loads, {key: keys[key] for key in keys.keys() - ENGINE_KEYS})
    seen: dict[tuple[str, Load], list[dict[str, float]]] = {}
    for turn in range(rounds):
        for name, config in configs.items():
            say(f"round {turn + 1} of {rounds}{name and ': '}{name}")
            served = _serve(lm, config, loads, options[name])
            for load, figures in zip(loads, served, strict=True):
                bare = 1e3 * bare_step(lm, config, load)
                figures |= {"bare_ms": bare, "itl_over_bare": figures["itl_p50_ms"] / bare}
                seen.setdefault((name, load), []).append(figures)
    return {
        "device": jax.devices()[0].device_kind,
        "rounds": rounds,
        "cells": [{"arm": name, **dataclasses.asdict(load), **medians(found)} for (name, load), found in seen.items()],
    }


def _serve(
    lm: LanguageModel, config: Config, loads: Sequence[Load], options: Mapping[str, Any]
) -> list[dict[str, float]]:
    # The engine ends with this function: its memory is free before anything else is made.
    limits: dict[str, Any] = {"max_requests": config.max_requests, "kv_tokens": config.kv_tokens}
    engine = Engine(dataclasses.replace(lm, config=config), **limits, **options)
    engine.warm_up()
    # What is only slow the first time (caches of the dispatch, pages of memory) is not measured either.
    run_engine(engine, dataclasses.replace(max(loads, key=lambda load: load.clients), new_tokens=2, turns=1))
    figures = [run_engine(engine, load) for load in loads]
    engine.pool.close()
    del engine
    gc.collect()
    return figures


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The median of each figure, and under `spread` half of its range over the median."""
    middle = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    ranges = {name: max(f[name] for f in rounds) - min(f[name] for f in rounds) for name in middle}
    return {
        **{name: round(value, 4) for name, value in middle.items()},
        "spread": {name: round(ranges[name] / 2 / value, 4) if value else 0.0 for name, value in middle.items()},
    }

"""Times a verify step against a plain decode step, both inside loops on the device, and prints one JSON object.

    python scripts/verify_speed.py --config 0.8b --requests 1 64 --speculate 3

Random weights, packed, every request behind 384 tokens. `accepted` rows of a request count in each step, so the next
one replays them. Medians of `REPETITIONS` runs of `STEPS` steps; `spread` is half the range over the median.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from gdnjax.loading import random_model
from gdnjax.model.step import decode_and_commit
from gdnjax.model.verify import verify_step
from gdnjax.state.batch import Batch, VerifyBatch
from gdnjax.state.pytree import State, init_state
from gdnjax.state.speculation import commit_verified
from gdnjax.weights.declaration import Params
from gdnjax.weights.packing import pack

POSITION, STEPS, REPETITIONS = 384, 32, 6

Step = Callable[[Params, State, jax.Array], tuple[jax.Array, State]]


def plain(params: Params, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
    """One token of every request. tokens: `[R]`."""
    logits, state = decode_and_commit(params, state, Batch(tokens, jnp.arange(tokens.shape[0], dtype=jnp.int32)))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state


def verify(params: Params, state: State, tokens: jax.Array, accepted: int) -> tuple[jax.Array, State]:
    """All candidate rows of every request, of which `accepted` count. tokens: `[R, T]`."""
    requests, rows = tokens.shape
    batch = VerifyBatch(tokens, jnp.arange(requests, dtype=jnp.int32), jnp.full(requests, rows, jnp.int32))
    logits, _, state = verify_step(params, state, batch)
    # As in decode_and_commit: merged with the step's reads, the commit could not run in place.
    logits, pending = jax.lax.optimization_barrier((logits, state.pending))
    state = commit_verified(dataclasses.replace(state, pending=pending), jnp.full(requests, accepted, jnp.int32))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state


def milliseconds(step: Step, params: Params, state: State, tokens: jax.Array) -> tuple[float, float]:
    """Of one step: median, and spread."""

    @functools.partial(jax.jit, donate_argnames="state")
    def loop(params: Params, state: State, tokens: jax.Array) -> State:
        body = lambda _, carry: step(params, carry[1], carry[0])  # noqa: E731
        return jax.lax.fori_loop(0, STEPS, body, (tokens, state))[1]

    times = []
    for _ in range(1 + REPETITIONS):
        position = jnp.full(tokens.shape[0], POSITION, jnp.int32)
        state = jax.block_until_ready(dataclasses.replace(state, position=position))
        start = time.perf_counter()
        state = jax.block_until_ready(loop(params, state, tokens))
        times.append(1e3 * (time.perf_counter() - start) / STEPS)
    median = statistics.median(times[1:])
    return median, (max(times[1:]) - min(times[1:])) / 2 / median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="0.8b", help="a shape from configs/ (0.8b)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64], metavar="N", help="(1 64)")
    parser.add_argument("--speculate", type=int, default=3, metavar="K", help="drafts of a request (3)")
    args = parser.parse_args()
    rows = 1 + args.speculate
    model = random_model(args.config)
    params = jax.block_until_ready(pack(model.params, model.config))
    cells: list[dict[str, Any]] = []
    for requests in args.requests:
        longest = POSITION + rows * STEPS + rows
        base = model.config.replace(max_requests=requests, max_length=longest, kv_tokens=None)
        once, _ = milliseconds(plain, params, init_state(base), jnp.zeros(requests, jnp.int32))
        for kind in ("record", "slots"):
            config = base.replace(speculate=args.speculate, speculative_state=kind)
            for accepted in sorted({1, 2, rows} & set(range(1, rows + 1))):
                step = functools.partial(verify, accepted=accepted)
                tokens = jnp.zeros((requests, rows), jnp.int32)
                took, spread = milliseconds(step, params, init_state(config), tokens)
                cell = {"requests": requests, "state": kind, "accepted": accepted, "plain_ms": once, "verify_ms": took}
                cells.append({k: round(v, 4) if isinstance(v, float) else v for k, v in cell.items()})
                cells[-1] |= {"ratio": round(took / once, 3), "spread": round(spread, 4)}
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "config": args.config, "rows": rows}
    print(json.dumps({**report, "cells": cells}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

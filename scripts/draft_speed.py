"""Times the drafts of one step by the draft head, with either `draft_head`, against the bytes that they must read.

    python scripts/draft_speed.py --config 0.8b --requests 1 64 --speculate 3 --pack --json

Random weights, every request behind `POSITION` tokens and more. `draft_ms` is one call of `gdnjax.model.draft`, all
drafts of all requests: the median of `REPETITIONS` runs of `STEPS` calls in a loop on the device; `spread` is half the
range over the median. `floor_ms` is `bytes`, what the call must read, over the bandwidth of a large copy in the same
run; `ratio` is floor_ms / draft_ms, 1 at best.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from gdnjax.bench.timing import copy_bandwidth
from gdnjax.config import Config, from_preset
from gdnjax.loading import random_model
from gdnjax.model.draft import draft
from gdnjax.platform import current_platform
from gdnjax.state.batch import Batch
from gdnjax.state.pytree import State, init_state
from gdnjax.weights.declaration import Params, vocabulary_matrix
from gdnjax.weights.draft_head import DRAFT_HEAD
from gdnjax.weights.packing import pack

POSITION, STEPS, REPETITIONS = 384, 32, 7
HEADS = ("weights", "fp8")


def read_bytes(params: Params, config: Config, requests: int, count: int) -> int:
    """What one call must read: for each of `count` drafts the draft head's weights, the vocabulary matrix or its fp8
    copy, and the keys and values of `requests` requests at the middle of the loop."""
    matrix = vocabulary_matrix(params) if config.draft_head == "weights" else params[DRAFT_HEAD]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves((params["mtp"], matrix)))
    token = 2 * config.num_key_value_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    keys = count * (POSITION + STEPS // 2) + count * (count - 1) // 2
    return count * weights + requests * keys * token


def milliseconds(params: Params, state: State, count: int) -> tuple[float, float]:
    """Of one call: median, and spread."""
    requests = jnp.arange(state.config.max_requests, dtype=jnp.int32)
    shape = 2, len(requests), state.config.hidden_size
    hiddens = jax.random.normal(jax.random.key(0), shape, jnp.dtype(state.config.dtype))

    @functools.partial(jax.jit, donate_argnames="state")
    def loop(params: Params, state: State, hiddens: jax.Array) -> tuple[jax.Array, State]:
        def body(number: int, carry: tuple[jax.Array, State]) -> tuple[jax.Array, State]:
            tokens, state = carry
            # Hiddens, tokens and positions are new in every call: nothing can be taken out of the loop.
            hidden = jax.lax.dynamic_index_in_dim(hiddens, number % 2, keepdims=False)
            drafts, _, state = draft(params, state, Batch(tokens, requests), hidden, count)
            return drafts[:, -1], dataclasses.replace(state, position=state.position + 1)

        return jax.lax.fori_loop(0, STEPS, body, (jnp.zeros_like(requests), state))

    times = []
    for _ in range(1 + REPETITIONS):
        state = dataclasses.replace(state, position=jnp.full(len(requests), POSITION, jnp.int32))
        jax.block_until_ready(state)
        start = time.perf_counter()
        _, state = jax.block_until_ready(loop(params, state, hiddens))
        times.append(1e3 * (time.perf_counter() - start) / STEPS)
    median = statistics.median(times[1:])
    return median, (max(times[1:]) - min(times[1:])) / 2 / median


def study(config: Config, requests: list[int], count: int, packed: bool, bandwidth: float) -> list[dict[str, Any]]:
    """One cell a number of requests and `draft_head`.

    Args:
        config: sizes; of a model with a draft head.
        requests: how many draft at once.
        count: drafts of each.
        packed: whether weights are packed.
        bandwidth: bytes a second, for the floor.
    """
    # The model's layers take no part in drafts: one stands for all, and is quickly drawn.
    one = config.replace(num_hidden_layers=1, layer_types=config.layer_types[:1], draft_kv=True)
    model = random_model(one.replace(draft_head="fp8"))
    params = jax.block_until_ready(pack(model.params, model.config) if packed else model.params)
    cells = []
    for rows, head in itertools.product(requests, HEADS):
        longest = POSITION + STEPS + count
        shape = model.config.replace(max_requests=rows, max_length=longest, kv_tokens=None, draft_head=head)
        took, spread = milliseconds(params, init_state(shape), count)
        moved = read_bytes(params, shape, rows, count)
        floor = 1e3 * moved / bandwidth
        cells.append(
            {
                "requests": rows,
                "head": head,
                "bytes": moved,
                "floor_ms": round(floor, 4),
                "draft_ms": round(took, 4),
                "spread": round(spread, 4),
                "ratio": round(floor / took, 3),
            }
        )
    return cells


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="0.8b", help="a shape from configs/ with a draft head (0.8b)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64], metavar="N", help="(1 64)")
    parser.add_argument("--speculate", type=int, default=3, metavar="K", help="drafts of a request (3)")
    parser.add_argument("--pack", action="store_true", help="pack the weights first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    config = from_preset(args.config)
    if current_platform() == "cpu":
        print("draft_speed: JAX runs on a CPU here; this times compiled kernels on accelerators", file=sys.stderr)
        return 1
    bandwidth = copy_bandwidth()
    cells = study(config, args.requests, args.speculate, args.pack, bandwidth)
    if args.json:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "config": args.config}
        about |= {"drafts": args.speculate, "packed": args.pack, "copy_bytes_per_second": round(bandwidth)}
        print(json.dumps({**about, "cells": cells}, indent=1))
        return 0
    print(f"{'requests':>8}{'head':>9}{'floor ms':>10}{'draft ms':>10}{'spread':>9}{'ratio':>7}")
    for cell in cells:
        numbers = f"{cell['floor_ms']:>10}{cell['draft_ms']:>10}{cell['spread']:>9}{cell['ratio']:>7}"
        print(f"{cell['requests']:>8}{cell['head']:>9}{numbers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A small model, and a pool driven by token ids: what the pool's tests share."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.state import Batch, cached_kv, conv_window, prefill_batch, recurrent_state
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.pool import StatePool
from gdnjax.state.prefix_cache import PrefixCache
from gdnjax.weights.declaration import Params, init_params
from tests.helpers import jit_decode_step, jit_prefill

MICRO = Config(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=("linear_attention", "full_attention"),
    initializer_range=0.5,
    dtype="float32",
    max_requests=3,
    max_length=40,
    page_size=4,
    prefill_tokens=16,
    state_layout="twin",
    prefix_interval=4,
)
STEP_ROWS = 4


MICRO = MICRO.replace(prefix_cache_bytes=3 * snapshot_bytes(MICRO))


def micro(layout: str = "twin") -> Config:
    """The small config. One a layout: every other config would compile every program again."""
    return MICRO.replace(state_layout=layout)


@functools.cache
def micro_params() -> Params:
    return init_params(MICRO, jax.random.key(3))


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, MICRO.vocab_size, count)]


class Driver:
    """A pool and the model over it. Logits come back by request, `[V]` float32."""

    def __init__(self, config: Config, pages: int | None = None, snapshots: int | None = None):
        """`pages`, `snapshots`: fewer than the config pays for, so that a test runs out of them."""
        self.config, self.params = config, micro_params()
        self.pool = pool = StatePool(config, params=self.params)
        if pages is not None or snapshots is not None:
            pool.pages = Pages(config.kv_pages if pages is None else pages, config.page_size)
            places = pool.prefixes.places if snapshots is None else snapshots
            pool.prefixes = PrefixCache(pool.pages, places, config.prefix_interval)

    def walk(self, pieces: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """One prefill window."""
        plan = self.pool.plan_walk({r: len(ids) for r, ids in pieces.items()})
        batch = prefill_batch(self.config, pieces, self.config.prefill_tokens)
        np.testing.assert_array_equal(plan.rows(self.config.prefill_tokens), batch.request)
        logits = np.asarray(self.pool.run(plan, lambda state: jit_prefill(self.params, state, batch)))
        return {r: logits[r] for r in pieces}

    def step(self, chosen: Mapping[int, int], commit: bool = True) -> dict[int, np.ndarray]:
        """One token of each request."""
        plan = self.pool.plan_decode(list(chosen))
        ids = np.zeros(STEP_ROWS, np.int32)
        ids[: len(chosen)] = list(chosen.values())
        batch = Batch(jnp.asarray(ids), jnp.asarray(plan.rows(STEP_ROWS)))
        logits = np.asarray(self.pool.run(plan, lambda state: jit_decode_step(self.params, state, batch)))
        if commit:
            self.pool.commit()
        return {r: logits[row] for row, r in enumerate(chosen)}

    def start(self, prompt: Sequence[int], limit: int | None = None, **arguments: Any) -> int:
        """A request that has read its prompt in one window."""
        request = self.pool.acquire(self.config.max_length if limit is None else limit, **arguments)
        self.walk({request: prompt})
        return request

    def feed(self, request: int, ids: Sequence[int]) -> list[np.ndarray]:
        """Decode steps of one request alone; the logits of each."""
        return [self.step({request: token})[request] for token in ids]

    def current(self, request: int) -> dict[str, np.ndarray]:
        """Copies of all that a request's committed state means: state, conv window, keys and values."""
        state, found = self.pool.state, {}
        for layer in range(len(self.config.gdn_layers)):
            found[f"recurrent {layer}"] = np.array(recurrent_state(state, layer, request))
            found[f"window {layer}"] = np.array(conv_window(state, layer, request))
        for layer in range(len(self.config.attention_layers)):
            found[f"keys {layer}"], found[f"values {layer}"] = map(np.array, cached_kv(state, layer, request))
        return found


def bookkeeping(pool: StatePool) -> str:
    """Everything that the host knows, to be compared before and after a call that fails."""
    pages = {k: v for k, v in vars(pool.pages).items() if k != "reclaim"}
    prefixes = {k: v for k, v in vars(pool.prefixes).items() if k != "_pages"}
    # What is remembered of the last step saves time and decides nothing: tests/state/test_requests.py.
    remembered = {"config", "_planned", "_ran", "_committed", "_room"}
    requests = {k: v for k, v in vars(pool.requests).items() if k not in remembered}
    return repr((pages, prefixes, requests))

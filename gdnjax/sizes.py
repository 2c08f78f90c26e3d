"""Bytes: of weights, of a request's state by layout, of a KV token; and what fits into a memory."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.platform import device_memory
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pytree import state_shapes
from gdnjax.weights.declaration import abstract_params
from gdnjax.weights.draft_head import abstract_draft_head

CPU_MEMORY = 2**30
"""What `derive_limits` counts with on a CPU, whose memory belongs to others too."""
MOST_REQUESTS = 64
"""The most requests that `derive_limits` asks for: beyond it a step's time grows with its rows."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a model costs, in bytes: its weights, the copy of the vocabulary matrix that `draft_head: fp8` puts beside
    them, and a request's state by layout, without its KV tokens, with what the config's `speculate` and
    `speculative_state` add."""

    parameters: int
    weight_bytes: int
    draft_head_bytes: int
    bytes_per_request: dict[str, int]
    bytes_per_kv_token: int


def _bytes(tree: object) -> int:
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def sizes(config: Config) -> Sizes:
    """The costs of a config, read off the declaration of its weights and of its state."""
    weights = abstract_params(config)
    return Sizes(
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights)),
        weight_bytes=_bytes(weights),
        draft_head_bytes=_bytes(abstract_draft_head(config)),
        bytes_per_request={layout: _request_bytes(config, layout) for layout in ("in_place", "twin")},
        bytes_per_kv_token=_kv_token_bytes(config),
    )


def layouts(config: Config, speculate: int) -> dict[tuple[str, str], Config]:
    """A config with so many drafts a step in all ways to keep them: by (`state_layout`, `speculative_state`).

    Raises:
        ConfigError: not 1 to 7 drafts.
    """
    ways = [(layout, kind) for kind in ("record", "slots") for layout in ("in_place", "twin")]
    return {way: config.replace(speculate=speculate, state_layout=way[0], speculative_state=way[1]) for way in ways}


def _request_bytes(config: Config, layout: str) -> int:
    # What one more request adds to the arrays: the reserved slot and row are there once.
    def total(requests: int) -> int:
        state = state_shapes(config.replace(state_layout=layout, max_requests=requests, kv_tokens=config.page_size))
        return _bytes((state.recurrent, state.conv, state.record and state.record.layers))

    return total(2) - total(1)


def _kv_token_bytes(config: Config) -> int:
    state = state_shapes(config.replace(max_requests=1, kv_tokens=config.page_size))
    return _bytes((state.keys, state.values)) // (2 * config.page_size)


def fit(config: Config, memory: int) -> tuple[int, int]:
    """Requests of `max_length` that fit into a memory beside the weights, and KV tokens they leave.

    Counts weights, state, KV cache in the config's layout, and what sampling keeps of a request, not a step's
    temporaries. At most what a `Config` takes, so a large memory may be left with room.

    Returns:
        (requests, KV tokens); KV tokens are whole pages.

    Raises:
        ValueError: not even one request fits.
    """
    free, request, page = _room(config, memory)
    whole = request + config.pages_per_request * page
    most_requests, most_pages = _index_limits(config)
    requests = min(free // whole, most_requests, most_pages // config.pages_per_request)
    if requests < 1:
        costs = sizes(config)
        weights = costs.weight_bytes + costs.draft_head_bytes
        raise ValueError(
            f"memory of {memory:,} bytes holds no request of max_length = {config.max_length}: the weights take "
            f"{weights:,}, and one request needs {memory - free + whole:,} in all; lower max_length or the dtype"
        )
    pages = (free - requests * request) // page if page else most_pages
    return requests, min(pages, most_pages) * config.page_size


def derive_limits(
    config: Config, max_requests: int | None = None, kv_tokens: int | None = None, memory: int | None = None
) -> Config:
    """A config whose `max_requests` and `kv_tokens` fill `memory_fraction` of the device's memory.

    Weights and prefix snapshots come off first. What is given stays as it is. Derived are at most
    `MOST_REQUESTS` requests, and at most the KV tokens that these can fill, unless prefix caching can use more.

    Args:
        config: sizes, layout and `max_length`; its own `max_requests` and `kv_tokens` are not read.
        max_requests, kv_tokens: None is derived.
        memory: bytes; None is what JAX may use on its default device, and `CPU_MEMORY` on a CPU.

    Raises:
        ValueError: the memory does not hold one request of `max_length`, or what is given.
    """
    if max_requests is not None and kv_tokens is not None:
        return config.replace(max_requests=max_requests, kv_tokens=kv_tokens)
    if memory is None:
        memory = device_memory() or CPU_MEMORY
    budget = int(memory * config.memory_fraction) - config.prefix_cache_bytes
    config = config.replace(max_requests=1, kv_tokens=None)
    free, request, page = _room(config, budget)
    most_requests, most_pages = _index_limits(config)
    if kv_tokens is not None:
        free -= kv_tokens // config.page_size * page
        max_requests = min(MOST_REQUESTS, most_requests, free // request)
        fits = max_requests >= 1
    else:
        if max_requests is None:
            max_requests = min(MOST_REQUESTS, fit(config, budget)[0])
        free -= max_requests * request
        pages = min(most_pages, free // page if page else most_pages)
        fits = pages >= config.pages_per_request
        if not config.prefix_cache_bytes:
            pages = min(pages, max_requests * config.pages_per_request)
        kv_tokens = pages * config.page_size
    if not fits:
        raise ValueError(
            f"memory_fraction = {config.memory_fraction} of {memory:,} bytes: weights, prefix snapshots and what is "
            f"given leave {max(0, free):,}; a request takes {request:,}, and its max_length = {config.max_length} "
            f"tokens {page * config.pages_per_request:,}: lower max_requests, kv_tokens, max_length or "
            "prefix_cache_bytes"
        )
    return config.replace(max_requests=max_requests, kv_tokens=kv_tokens)


def _room(config: Config, memory: int) -> tuple[int, int, int]:
    """Bytes beside the weights and what is reserved; bytes of one more request, and of one more KV page."""
    costs = sizes(config)
    page = costs.bytes_per_kv_token * config.page_size
    # A few int32 a request (its slots, position and pending tokens; three for a record) and its row of the page table;
    # for penalties, a bool and an int32 for every token that there is.
    numbers = 4 + 3 * config.records + config.pages_per_request
    request = costs.bytes_per_request[config.state_layout] + 4 * numbers + 5 * config.vocab_size
    # The reserved slot, ring row and page.
    reserved = snapshot_bytes(config) + page
    return memory - costs.weight_bytes - costs.draft_head_bytes - reserved, request, page


def _index_limits(config: Config) -> tuple[int, int]:
    # What `Config` accepts: every layer's array under 2^31 elements.
    most = 2**31 - 1
    slots = most // config.slot_elements - 1
    requests = min(slots // config.slots_per_request, most // config.request_elements - 1)
    pages = most // (config.page_size * config.num_key_value_heads * config.head_dim) - 1
    return min(requests, 65536), pages

"""The pure functions over the state: `prefill` and `decode_step`. (`commit` is in `gdnjax.state`, and `verify_step`,
which takes the place of `decode_step` under speculation, in `gdnjax.model.verify`.)

`prefill_hidden` and `decode_hidden` are the same without the head, for callers that also feed the draft head.

Both take packed weights (`gdnjax.weights.packing`) as well as params. Jit them with the state donated:
`jax.jit(decode_step, donate_argnames="state")`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.model.layers import (
    attention_output,
    attention_project,
    embed,
    gdn_output,
    gdn_project,
    head,
    run_layers,
)
from gdnjax.state.batch import Batch, segments_of
from gdnjax.state.pytree import State, commit
from gdnjax.state.record import replay
from gdnjax.weights.declaration import Params
from pallas_kernels.attention_prologue import attention_prologue
from pallas_kernels.attention_prologue.reference import rope_table
from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed
from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_prefill import gated_delta_prefill
from pallas_kernels.paged_attention import paged_attention_decode, paged_attention_packed

Qkv = jax.Array | Columns
Convolve = Callable[[Qkv, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""(inputs `[R, C]`, weight, the layer's ring) -> outputs and the ring."""
Gates = tuple[jax.Array, jax.Array]
"""A_log and dt_bias, `[Hv]` float32."""
Rule = Callable[[int, jax.Array, Qkv, Qkv, Gates, jax.Array], tuple[jax.Array, jax.Array]]
"""(number of the GDN layer, convolved rows, a, b, gates, the layer's pool) -> outputs and the pool."""
Attend = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
"""(the layer's `self_attn`, x `[R, H]`, its keys, its values) -> `[R, H]` and both caches."""


def decode_step(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """One token for every row's request, at most one row a request.

    Reads each request's `read_slot` and writes its `write_slot`; until `commit`, positions and current
    slots stay as they were, so in the `twin` layout a step that is not committed can simply be run again.

    Args:
        params: weights.
        state: the state (donate it).
        batch: rows; padding rows (request -1) store nothing and their logits mean nothing.

    Returns:
        Logits `[R, V]` (or `[K, V]` with `logits_rows`) float32, and the state with the step pending.

    Raises:
        ValueError: a state of a config that speculates.
    """
    hidden, state = decode_hidden(params, state, batch)
    return head(params, _wanted(hidden, batch)), state


def decode_hidden(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """`decode_step` up to the head: the hidden after the final norm, `[R, H]` whatever `logits_rows`, and the state.

    Raises: as `decode_step`.
    """
    c = state.config
    if c.speculate:
        raise ValueError(
            f"speculate = {c.speculate}: the state takes verify_step (one row of a request decodes it plainly); "
            "set speculate to 0 for decode_step"
        )
    live = batch.request >= 0
    request = jnp.maximum(batch.request, 0)
    position = jnp.where(live, state.position[request], 0)
    read_slot = jnp.where(live, state.read_slot[request], 0)
    write_slot = jnp.where(live, state.write_slot[request], 0)
    places = kv_places(state, live, request, position)
    has_state = position > 0

    def convolve(qkv: Qkv, weight: jax.Array, ring: jax.Array) -> tuple[jax.Array, jax.Array]:
        return causal_conv_decode(qkv, weight, ring, batch.request + 1, position, c.kernels)

    def rule(_: int, qkv: jax.Array, a: Qkv, b: Qkv, gates: Gates, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gated_delta_decode(qkv, a, b, *gates, pool, read_slot, write_slot, has_state, c.kernels)

    hidden, state = run_over_state(params, state, batch.tokens, convolve, rule, attend_from(c, position, *places))
    requests = jnp.arange(c.max_requests, dtype=jnp.int32)
    pending = jnp.any(batch.request == requests[:, None], axis=1).astype(jnp.int32)
    return hidden, dataclasses.replace(state, pending=pending)


def decode_and_commit(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """`decode_step`, made current at once. Jit it with `keep_unused=True`: see `gdnjax.generation.loop`."""
    logits, state = decode_step(params, state, batch)
    # The commit comes last: merged with the step's reads of the same vectors, it could not run in place.
    logits, pending = jax.lax.optimization_barrier((logits, state.pending))
    return logits, commit(dataclasses.replace(state, pending=pending))


def run_over_state(
    params: Params, state: State, tokens: jax.Array, convolve: Convolve, rule: Rule, attend: Attend
) -> tuple[jax.Array, State]:
    """Rows through all layers over a state: what a step of any kind does, given how each kind of layer mixes.

    Args:
        tokens: `[R]`.

    Returns:
        The hidden after the final norm `[R, H]`, and the state with its pools, rings and caches updated.
    """
    c = state.config
    recurrent, conv, keys, values = map(list, (state.recurrent, state.conv, state.keys, state.values))

    def mix_gdn(p: Any, x: jax.Array, layer: int) -> jax.Array:
        qkv, z, b, a = gdn_project(p, x, c)
        qkv, conv[layer] = convolve(qkv, p["conv1d"]["weight"], conv[layer])
        out, recurrent[layer] = rule(layer, qkv, a, b, (p["A_log"], p["dt_bias"]), recurrent[layer])
        return gdn_output(p, out, z, c, c.kernels)

    def mix_attention(p: Any, x: jax.Array, layer: int) -> jax.Array:
        y, keys[layer], values[layer] = attend(p, x, keys[layer], values[layer])
        return y

    hidden, _ = run_layers(params, c, embed(params, tokens), mix_gdn, mix_attention)
    return hidden, dataclasses.replace(
        state, recurrent=tuple(recurrent), conv=tuple(conv), keys=tuple(keys), values=tuple(values)
    )


def kv_places(
    state: State, live: jax.Array, request: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What attention needs of rows `[R]` that are tokens of `request` at `position`, with their page tables: `slot`,
    `pages` and `length` as `attention_decode` takes them."""
    size, pages = state.config.page_size, state.page_table[request]
    page = jnp.take_along_axis(pages, (position // size)[:, None], axis=1)[:, 0]
    return kv_slot(live, page, position, size), pages, jnp.where(live, position + 1, 0)


def attend_from(c: Config, position: jax.Array, slot: jax.Array, pages: jax.Array, length: jax.Array) -> Attend:
    """Attention of rows over the pages of their requests: see `kv_places`; pages also once for rows that share them."""
    cos, sin = rope_table(position, c.rope_theta, c.rotary_dim)

    def attend(p: Any, x: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return attention_decode(p, x, keys, values, cos, sin, slot, pages, length, c)

    return attend


def attention_decode(
    p: Any,
    x: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot: jax.Array,
    pages: jax.Array,
    length: jax.Array,
    c: Config,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """An attention layer's mixer for one token a row: the model's own layers and the draft head's.

    Args:
        p: the layer's `self_attn`. x: `[R, H]`, normed.
        keys, values: the layer's cache. cos, sin: the rows' rope.
        slot: `[R]`, where each row's key and value go (`kv_slot`).
        pages: `[R, pages_per_request]`, or `[G, pages_per_request]`: each of R / G rows of one request.
        length: `[R]`, keys that each row sees, its own included.

    Returns:
        `[R, H]`, and the cache.
    """
    q, gate, keys, values = attention_prologue(
        attention_project(p, x),
        p["q_norm"]["weight"],
        p["k_norm"]["weight"],
        cos,
        sin,
        slot,
        keys,
        values,
        c.rms_norm_eps,
        c.kernels,
    )
    gated = paged_attention_decode(
        q, keys, values, pages, length, c.page_size, gate, c.attention_pin, c.attention_segment, c.kernels
    )
    return attention_output(p, gated), keys, values


def prefill(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """Any number of tokens of any requests, continuing from what each request's state contains.

    A walk over a prompt updates the request's current slot in place and is current at once, whatever
    the layout; cutting it into windows gives the same state within rounding. What a request of the batch
    has recorded is replayed first.

    Args:
        params: weights.
        state: the state (donate it).
        batch: packed rows, see `prefill_batch`.

    Returns:
        Logits `[R, V]` (or `[K, V]` with `logits_rows`) float32, and the state.
    """
    hidden, state = prefill_hidden(params, state, batch)
    return head(params, _wanted(hidden, batch)), state


def prefill_hidden(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """`prefill` up to the head: the hidden after the final norm, `[R, H]` whatever `logits_rows`, and the state."""
    c = state.config
    segments = segments_of(batch, state.position, state.read_slot)
    if c.records:
        # As many as can have a row in the batch, so that what is read for them does not grow with `max_requests`.
        most = min(c.max_requests, batch.tokens.shape[0])
        (walking,) = jnp.nonzero(segments.length > 0, size=most, fill_value=-1)
        state = replay(params, state, walking.astype(jnp.int32))
    live = batch.request >= 0
    request = jnp.maximum(batch.request, 0)
    row = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    position = jnp.where(live, state.position[request] + row - segments.start[request], 0)
    page = state.page_table[request, jnp.clip(position // c.page_size, 0, c.pages_per_request - 1)]
    slot = kv_slot(live & (position < c.max_length), page, position, c.page_size)
    cos, sin = rope_table(position, c.rope_theta, c.rotary_dim)

    def convolve(qkv: Qkv, weight: jax.Array, ring: jax.Array) -> tuple[jax.Array, jax.Array]:
        return causal_conv_packed(qkv, weight, ring, segments, batch.request, c.kernels)

    def rule(_: int, qkv: jax.Array, a: Qkv, b: Qkv, gates: Gates, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        return gated_delta_prefill(qkv, a, b, *gates, pool, segments, c.kernels)

    def attend(p: Any, x: jax.Array, keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        norms = p["q_norm"]["weight"], p["k_norm"]["weight"]
        projected = attention_project(p, x)
        q, gate, keys, values = attention_prologue(
            projected, *norms, cos, sin, slot, keys, values, c.rms_norm_eps, c.kernels
        )
        gated = paged_attention_packed(q, keys, values, state.page_table, segments, c.page_size, gate, c.kernels)
        return attention_output(p, gated), keys, values

    hidden, state = run_over_state(params, state, batch.tokens, convolve, rule, attend)
    return hidden, dataclasses.replace(state, position=state.position + segments.length)


def kv_slot(live: jax.Array, page: jax.Array, position: jax.Array, page_size: int) -> jax.Array:
    """`[R]`: where a row's key and value go, given the page of its position; -1 for rows that store nothing."""
    # Page 0 is what unused entries of the page table point at: nothing is ever written there.
    return jnp.where(live & (page > 0), page * page_size + position % page_size, -1)


def _wanted(hidden: jax.Array, batch: Batch) -> jax.Array:
    return hidden if batch.logits_rows is None else hidden[batch.logits_rows]

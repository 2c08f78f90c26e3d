"""The pure functions over the state: `prefill` and `decode_step`. (`commit` is in `gdnjax.state`.)

`prefill_hidden` and `decode_hidden` are the same without the head, for callers that also feed the draft head.

Both take packed weights (`gdnjax.weights.packing`) as well as params. Jit them with the state donated:
`jax.jit(decode_step, donate_argnames="state")`.
"""

from __future__ import annotations

import dataclasses
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
from gdnjax.state.backend import Backend
from gdnjax.state.batch import Batch, segments_of
from gdnjax.state.pytree import State, commit
from gdnjax.weights.declaration import Params
from pallas_kernels.attention_prologue import attention_prologue
from pallas_kernels.attention_prologue.reference import rope_table
from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_prefill import gated_delta_prefill
from pallas_kernels.paged_attention import paged_attention_decode, paged_attention_packed


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
    """
    hidden, state = decode_hidden(params, state, batch)
    return head(params, _wanted(hidden, batch)), state


def decode_hidden(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """`decode_step` up to the head: the hidden after the final norm, `[R, H]` whatever `logits_rows`, and the state."""
    c = state.config
    live = batch.request >= 0
    request = jnp.maximum(batch.request, 0)
    position = jnp.where(live, state.position[request], 0)
    read_slot = jnp.where(live, state.read_slot[request], 0)
    write_slot = jnp.where(live, state.write_slot[request], 0)
    pages = state.page_table[request]
    page = jnp.take_along_axis(pages, (position // c.page_size)[:, None], axis=1)[:, 0]
    slot = kv_slot(live, page, position, c.page_size)
    length, has_state = jnp.where(live, position + 1, 0), position > 0
    cos, sin = rope_table(position, c.rope_theta, c.rotary_dim)
    implementation = c.kernels
    recurrent, conv, keys, values = map(list, (state.recurrent, state.conv, state.keys, state.values))

    def mix_gdn(p: Any, x: jax.Array, layer: int) -> jax.Array:
        qkv, z, b, a = gdn_project(p, x, c)
        qkv, conv[layer] = causal_conv_decode(
            qkv, p["conv1d"]["weight"], conv[layer], batch.request + 1, position, implementation
        )
        out, recurrent[layer] = gated_delta_decode(
            qkv, a, b, p["A_log"], p["dt_bias"], recurrent[layer], read_slot, write_slot, has_state, implementation
        )
        return gdn_output(p, out, z, c, implementation)

    def mix_attention(p: Any, x: jax.Array, layer: int) -> jax.Array:
        y, keys[layer], values[layer] = attention_decode(
            p, x, keys[layer], values[layer], cos, sin, slot, pages, length, c
        )
        return y

    hidden, _ = run_layers(params, c, embed(params, batch.tokens), mix_gdn, mix_attention)
    requests = jnp.arange(c.max_requests, dtype=jnp.int32)
    state = dataclasses.replace(
        state,
        recurrent=tuple(recurrent),
        conv=tuple(conv),
        keys=tuple(keys),
        values=tuple(values),
        pending=jnp.any(batch.request == requests[:, None], axis=1).astype(jnp.int32),
    )
    return hidden, state


def decode_and_commit(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """`decode_step`, made current at once. Jit it with `keep_unused=True`: see `gdnjax.generation.loop`."""
    logits, state = decode_step(params, state, batch)
    # The commit comes last: merged with the step's reads of the same vectors, it could not run in place.
    logits, pending = jax.lax.optimization_barrier((logits, state.pending))
    return logits, commit(dataclasses.replace(state, pending=pending))


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
        slot: `[R]`, where each row's key and value go (`kv_slot`). pages: `[R, pages_per_request]`.
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
    the layout; cutting it into windows gives the same state within rounding.

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
    live = batch.request >= 0
    request = jnp.maximum(batch.request, 0)
    row = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32)
    position = jnp.where(live, state.position[request] + row - segments.start[request], 0)
    page = state.page_table[request, jnp.clip(position // c.page_size, 0, c.pages_per_request - 1)]
    slot = kv_slot(live & (position < c.max_length), page, position, c.page_size)
    cos, sin = rope_table(position, c.rope_theta, c.rotary_dim)
    implementation = c.kernels
    recurrent, conv, keys, values = map(list, (state.recurrent, state.conv, state.keys, state.values))

    def mix_gdn(p: Any, x: jax.Array, layer: int) -> jax.Array:
        qkv, z, b, a = gdn_project(p, x, c)
        qkv, conv[layer] = causal_conv_packed(
            qkv, p["conv1d"]["weight"], conv[layer], segments, batch.request, implementation
        )
        out, recurrent[layer] = gated_delta_prefill(
            qkv, a, b, p["A_log"], p["dt_bias"], recurrent[layer], segments, implementation
        )
        return gdn_output(p, out, z, c, implementation)

    def mix_attention(p: Any, x: jax.Array, layer: int) -> jax.Array:
        norms = p["q_norm"]["weight"], p["k_norm"]["weight"]
        q, gate, keys[layer], values[layer] = attention_prologue(
            attention_project(p, x),
            *norms,
            cos,
            sin,
            slot,
            keys[layer],
            values[layer],
            c.rms_norm_eps,
            implementation,
        )
        gated = paged_attention_packed(
            q, keys[layer], values[layer], state.page_table, segments, c.page_size, gate, implementation
        )
        return attention_output(p, gated)

    hidden, _ = run_layers(params, c, embed(params, batch.tokens), mix_gdn, mix_attention)
    state = dataclasses.replace(
        state,
        recurrent=tuple(recurrent),
        conv=tuple(conv),
        keys=tuple(keys),
        values=tuple(values),
        position=state.position + segments.length,
    )
    return hidden, state


BACKEND = Backend("gdnjax", prefill, decode_step)
"""These functions, which take both layouts: what the pool and the engine step with unless told otherwise."""


def kv_slot(live: jax.Array, page: jax.Array, position: jax.Array, page_size: int) -> jax.Array:
    """`[R]`: where a row's key and value go, given the page of its position; -1 for rows that store nothing."""
    # Page 0 is what unused entries of the page table point at: nothing is ever written there.
    return jnp.where(live & (page > 0), page * page_size + position % page_size, -1)


def _wanted(hidden: jax.Array, batch: Batch) -> jax.Array:
    return hidden if batch.logits_rows is None else hidden[batch.logits_rows]

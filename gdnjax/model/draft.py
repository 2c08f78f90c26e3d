"""The draft (MTP) head: guesses the tokens after the next one, over whole sequences and with a cache of its own.

One full-attention layer. At position t it takes the model's hidden h_t after the final norm and the token after
it, x_{t+1}; through the model's own head, or an fp8 copy of that, it predicts x_{t+2}. Fed with its output and its
guess it goes on from there. Its keys and values lie in the state (`draft_kv`), in the request's pages, at the hiddens'
positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.model.forward import sequence_attention
from gdnjax.model.layers import decoder_layer, embed, head, linear
from gdnjax.model.step import attention_decode, kv_slot
from gdnjax.state.batch import Batch, segments_of
from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params
from gdnjax.weights.draft_head import DRAFT_HEAD
from pallas_kernels.attention_prologue.reference import rope_table
from pallas_kernels.gated_rms_norm.reference import rms_norm


def mtp_logits(params: Params, config: Config, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """The draft head over whole sequences; differentiable in params.

    Args:
        params: with an `mtp` part.
        config: the config.
        hidden: `[b, t, H]` after the model's final norm. The last one is not read.
        tokens: `[b, t]`.

    Returns:
        `[b, t - 1, V]` float32: at t the logits of x_{t+2}, from h_t and x_{t+1}.

    Raises:
        ValueError: params without a draft head.
    """
    c, mtp = config, _mtp(params)
    x = _joined(params, c, tokens[:, 1:], hidden[:, :-1])
    cos, sin = rope_table(jnp.arange(x.shape[1], dtype=jnp.int32), c.rope_theta, c.rotary_dim)
    layer = mtp["layers"][0]
    x = decoder_layer(layer, x, c, lambda y: sequence_attention(layer["self_attn"], y, c, cos, sin)[0])
    return head(params, rms_norm(x, mtp["norm"]["weight"], c.rms_norm_eps))


def draft(
    params: Params, state: State, batch: Batch, hidden: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, State]:
    """`count` greedy drafts for every row's request, at most one row a request.

    For a request of n tokens the first step is at position n - 1 and reads h_{n-1} and the row's token x_n, which
    the state does not contain yet; step i is at n - 1 + i and reads the output and the draft of the step before.
    All steps write the head's cache. What the later ones write is made from guesses; it lies behind the position
    and is not seen before `fill_draft_kv` or the next draft have written over it.

    The steps are unrolled: a loop in the program would keep it out of a GPU's command buffers.

    Args:
        params: weights, with an `mtp` part.
        state: the state, committed and with `draft_kv` (donate it).
        batch: the rows that the next decode step takes; those of padding or of an empty request store nothing
            and their drafts mean nothing. So do drafts behind the request's last page.
        hidden: `[R, H]`, each request's newest hidden after the final norm (`decode_hidden`, `prefill_hidden`).
        count: drafts a row, at least 1.

    Returns:
        Drafts `[R, count]` int32, their logits (`draft_logits`) `[R, count, V]` float32, and the state.

    Raises:
        ValueError: params without a draft head, or without the copy that the config asks for; a state without the
            head's cache; or a count under 1.
    """
    if count < 1:
        raise ValueError(f"count = {count}; it takes an integer >= 1")
    position = state.position[jnp.maximum(batch.request, 0)] - 1
    tokens, drafts, logits = batch.tokens, [], []
    for number in range(count):
        with jax.named_scope(f"draft_{number}"):
            place = jnp.where(position >= 0, position + number, -1)
            hidden, state = _step(params, state, tokens, hidden, batch.request, place)
            logits.append(draft_logits(params, state.config, hidden))
            tokens = jnp.argmax(logits[-1], axis=-1).astype(jnp.int32)
            drafts.append(tokens)
    return jnp.stack(drafts, axis=1), jnp.stack(logits, axis=1), state


def draft_logits(params: Params, config: Config, hidden: jax.Array) -> jax.Array:
    """Logits `[..., V]` float32 that drafts are chosen by, of the draft head's output `[..., H]`: by the model's own
    head, or with `draft_head` fp8 by the copy of it (`gdnjax.weights.draft_head`).

    Raises:
        ValueError: `draft_head` fp8, and params without the copy.
    """
    if config.draft_head == "weights":
        return head(params, hidden)
    if DRAFT_HEAD not in params:
        raise ValueError(
            "draft_head = 'fp8', and params have no fp8 copy of the vocabulary matrix; make it with "
            "gdnjax.weights.draft_head.with_draft_head, or load the model with draft_head='fp8'"
        )
    copy = params[DRAFT_HEAD]
    with jax.named_scope("draft_head"):
        # A GPU's compiler converts inside of the product: memory is read as fp8, and no copy in `dtype` is written.
        return linear(hidden, copy["weight"].astype(hidden.dtype), jnp.float32) * copy["scale"]


def draft_prefill(params: Params, state: State, batch: Batch, hidden: jax.Array, following: jax.Array) -> State:
    """Fills the head's cache with the rows of a prefill, right after it.

    Every row takes the token of the row behind it. A request's last row takes `following`: the first token of the
    prompt's next window, or -1 where it is not known yet; `draft` then does that row with the sampled token.

    Args:
        params: weights, with an `mtp` part.
        state: the state that the prefill returned, with `draft_kv` (donate it).
        batch: the prefill's.
        hidden: `[R, H]` from `prefill_hidden`.
        following: `[max_requests]` int32, by request.

    Raises:
        ValueError: params without a draft head, or a state without its cache.
    """
    segments = segments_of(batch, state.position, state.read_slot)
    request = jnp.maximum(batch.request, 0)
    length = segments.length[request]
    offset = jnp.arange(batch.tokens.shape[0], dtype=jnp.int32) - segments.start[request]
    tokens = jnp.where(offset == length - 1, following[request], jnp.roll(batch.tokens, -1))
    position = jnp.where(tokens >= 0, state.position[request] - length + offset, -1)
    return fill_draft_kv(params, state, jnp.maximum(tokens, 0), hidden, batch.request, position)


def fill_draft_kv(
    params: Params, state: State, tokens: jax.Array, hidden: jax.Array, request: jax.Array, position: jax.Array
) -> State:
    """Writes the head's keys and values of some rows: of tokens that were accepted, or decoded without drafts.

    Each key is made of its own row alone. A row that is left out stays in the cache as whatever lay there: nothing
    but later drafts is worse for it.

    Args:
        params: weights, with an `mtp` part.
        state: the state, with `draft_kv` (donate it).
        tokens: `[R]` int32, the token after each hidden.
        hidden: `[R, H]` after the model's final norm.
        request: `[R]` int32; -1 is padding.
        position: `[R]` int32, the hiddens' positions; -1 stores nothing. No two rows share request and position.

    Raises:
        ValueError: params without a draft head, or a state without its cache.
    """
    # Under `jit` what lies behind the write (attention, MLP) is never computed.
    return _step(params, state, tokens, hidden, request, position)[1]


def fill_accepted(
    params: Params, state: State, tokens: jax.Array, hidden: jax.Array, request: jax.Array, accepted: jax.Array
) -> tuple[jax.Array, State]:
    """`fill_draft_kv` of a verify step's accepted rows, before the step is committed.

    The next drafts write the newest row again; a step without drafts does not.

    Args:
        params: weights, with an `mtp` part.
        state: the state with the step pending, with `draft_kv` (donate it).
        tokens: `[G, T]` int32, what each row emitted, which is the token behind it; below 0 where it emitted nothing.
        hidden: `[G, T, H]`, the rows' hiddens after the model's final norm.
        request: `[G]` int32; -1 is padding.
        accepted: `[G]` int32, rows that count.

    Returns:
        The newest hidden of each group `[G, H]`, that of its last accepted row, and the state.

    Raises:
        ValueError: as `fill_draft_kv`.
    """
    groups, rows = tokens.shape
    offset = jnp.arange(rows, dtype=jnp.int32)
    first = state.position[jnp.maximum(request, 0)]
    position = jnp.where(offset < accepted[:, None], first[:, None] + offset, -1)
    each = jnp.broadcast_to(request[:, None], tokens.shape)
    behind, seen = jnp.maximum(tokens, 0), hidden.reshape(groups * rows, -1)
    state = fill_draft_kv(params, state, behind.reshape(-1), seen, each.reshape(-1), position.reshape(-1))
    return hidden[jnp.arange(groups), jnp.maximum(accepted - 1, 0)], state


def _step(
    params: Params, state: State, tokens: jax.Array, hidden: jax.Array, request: jax.Array, position: jax.Array
) -> tuple[jax.Array, State]:
    # The head's output after its norm, [R, H], and the state with the rows' keys and values.
    c, mtp = state.config, _mtp(params)
    if not c.draft_kv:
        raise ValueError("draft_kv = False: the state has no keys and values of a draft head; set draft_kv to True")
    live = (request >= 0) & (position >= 0) & (position < c.max_length)
    pages = state.page_table[jnp.maximum(request, 0)]
    page = jnp.take_along_axis(pages, jnp.clip(position // c.page_size, 0, c.pages_per_request - 1)[:, None], axis=1)
    slot = kv_slot(live, page[:, 0], position, c.page_size)
    # A row without a place of its own sees nothing: it would attend to another page's keys.
    length = jnp.where(slot >= 0, position + 1, 0)
    cos, sin = rope_table(jnp.maximum(position, 0), c.rope_theta, c.rotary_dim)
    keys, values = state.keys[-1], state.values[-1]
    layer = mtp["layers"][0]

    def mix(x: jax.Array) -> jax.Array:
        nonlocal keys, values
        y, keys, values = attention_decode(layer["self_attn"], x, keys, values, cos, sin, slot, pages, length, c)
        return y

    x = decoder_layer(layer, _joined(params, c, tokens, hidden), c, mix)
    x = rms_norm(x, mtp["norm"]["weight"], c.rms_norm_eps)
    return x, dataclasses.replace(state, keys=(*state.keys[:-1], keys), values=(*state.values[:-1], values))


def _joined(params: Params, c: Config, tokens: jax.Array, hidden: jax.Array) -> jax.Array:
    # fc over [embedding, hidden], each behind a norm of its own: in this order.
    mtp = _mtp(params)
    embedded = rms_norm(embed(params, tokens), mtp["pre_fc_norm_embedding"]["weight"], c.rms_norm_eps)
    seen = rms_norm(hidden, mtp["pre_fc_norm_hidden"]["weight"], c.rms_norm_eps)
    return linear(jnp.concatenate([embedded, seen], axis=-1), mtp["fc"]["weight"])


def _mtp(params: Params) -> Any:
    if "mtp" not in params:
        raise ValueError(
            "params have no draft head (no 'mtp' part); load a checkpoint with mtp.* tensors, with "
            "mtp_num_hidden_layers = 1"
        )
    return params["mtp"]

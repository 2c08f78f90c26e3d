"""Reading prompts into a state, in windows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.diagnosis.watch import Watch
from gdnjax.model.draft import draft_prefill
from gdnjax.model.layers import head
from gdnjax.model.step import prefill, prefill_hidden
from gdnjax.state.batch import Batch, prefill_batch
from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params

jitted_prefill = jax.jit(prefill, donate_argnames="state")


@functools.partial(jax.jit, donate_argnames="state")
def prefill_with_head(
    params: Params, state: State, batch: Batch, following: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], State]:
    """A prefill that also fills the draft head's cache.

    Args:
        params, state, batch: as `prefill` takes them.
        following: `[max_requests]` int32, as `draft_prefill` takes it.

    Returns:
        Logits `[K, V]` float32 and hiddens `[K, H]` after the final norm of `batch.logits_rows`, and the state.
    """
    hidden, state = prefill_hidden(params, state, batch)
    state = draft_prefill(params, state, batch, hidden, following)
    newest = hidden[batch.logits_rows]
    return (head(params, newest), newest), state


def prefill_prompts(
    params: Params, state: State, prompts: Sequence[Sequence[int]], watch: Watch | None = None
) -> tuple[State, jax.Array, jax.Array | None]:
    """Runs all prompts in windows of at most `prefill_tokens` rows; request i takes prompt i, an empty one nothing.
    `watch` sees every window.

    Returns:
        The state, and of every prompt's last token the logits `[max_requests, V]` float32 and, where the state has the
        draft head's cache, which is filled too, the hidden after the final norm `[max_requests, H]`.
    """
    config = state.config
    newest: list[jax.Array] | None = None
    read = [0] * len(prompts)
    for pieces, complete in windows(prompts, config.prefill_tokens):
        batch = prefill_batch(config, pieces)
        for request, piece in pieces.items():
            read[request] += len(piece)
        if config.draft_kv:
            following = np.full(config.max_requests, -1, np.int32)
            for request in pieces.keys() - complete:
                following[request] = prompts[request][read[request]]
            both, state = prefill_with_head(params, state, batch, jnp.asarray(following))
            new = list(both)
        else:
            logits, state = jitted_prefill(params, state, batch)
            new = [logits]
        if watch is not None:
            watch.after_step("prefill", state)
        if newest is None:
            newest = new
        else:
            mask = jnp.asarray(np.isin(np.arange(config.max_requests), complete))[:, None]
            newest = [jnp.where(mask, n, o) for n, o in zip(new, newest, strict=True)]
    assert newest is not None
    return state, newest[0], newest[1] if config.draft_kv else None


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

"""What a step emits: how many of a request's drafts the target itself would have chosen, and the token behind them.

Drafts are definite, so rejection sampling (Leviathan et al., 2023, algorithm 1, with all of the draft's probability on
one token) comes to this: sample at every row from the target's distribution, emit what was sampled, and go on for as
long as it is the draft. Each row samples with the key that plain decoding would use there; so greedy or sampled, the
tokens are those of plain decoding with the same seed, and a step without drafts is a plain step.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.generation.sampling import Sampler, logprob_of, penalize, sample

NOTHING = -1
"""Emitted by a row that is padding, was rejected, or has finished."""
NOT_FINITE = -2
"""Emitted by a row whose logits are NaN or infinite; the host raises."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Acceptance:
    """What G requests emit after a step of T rows each, and what they go on with.

    * `token`: `[G, T]`, the emitted tokens in order, then `NOTHING`; `NOT_FINITE` ends a request.
    * `logprob`: `[G, T]`, the log-probability of each under the model itself, before penalties, temperature and
      truncation.
    * `accepted`: `[G]`, rows that the state keeps: as many as tokens were emitted; 0 where nothing ran.
    * `last`: `[G]`, the token emitted last, which the next step feeds.
    * `live`: `[G]` bool, whether the request goes on.
    * `counts`: `[G, V]`, with what was emitted, or None.
    """

    token: jax.Array
    logprob: jax.Array
    accepted: jax.Array
    last: jax.Array
    live: jax.Array
    counts: jax.Array | None


def accept(
    logits: jax.Array,
    drafts: jax.Array,
    count: jax.Array,
    sampler: Sampler,
    live: jax.Array,
    emitted: jax.Array,
    limit: jax.Array,
    stop_ids: jax.Array,
    in_prompt: jax.Array | None = None,
    counts: jax.Array | None = None,
    allowed: jax.Array | None = None,
) -> Acceptance:
    """Accepts each request's longest run of drafts that are what the target samples, and emits one token more.

    A stop id, the limit, or logits that are not finite end a request where they are met, also inside of accepted
    drafts: nothing is emitted behind them.

    Args:
        logits: `[G, T, V]` float32; row 0 is that of the token emitted last, row t that of draft t - 1.
        drafts: `[G, T - 1]` int32.
        count: `[G]` int32, rows that mean something: 1 and the drafts. Less than 1 is 1, more than T is T.
        sampler: of the requests, arrays `[G]`.
        live: `[G]` bool. Requests that are not emit nothing and accept nothing.
        emitted: `[G]` int32, tokens emitted so far. limit: `[G]` int32, most tokens to emit.
        stop_ids: `[G, S]` int32, padded with -1.
        in_prompt, counts: `[G, V]` for the penalties, see `penalize`. A row's penalties count the drafts before it.
        allowed: `[G, V]` bool, the tokens that each may emit, for requests without drafts; None is all.
    """
    groups, rows, vocab = logits.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    flat = logits.reshape(groups * rows, vocab)
    samplers = _each(sampler, rows)
    if sampler.penalized:
        assert in_prompt is not None and counts is not None
        fed = jax.nn.one_hot(drafts, vocab, dtype=jnp.int32)
        before = counts[:, None] + jnp.pad(jnp.cumsum(fed, axis=1), ((0, 0), (1, 0), (0, 0)))
        flat = penalize(flat, samplers, _each(in_prompt, rows), before.reshape(flat.shape))
    if allowed is not None:
        flat = jnp.where(_each(allowed, rows), flat, -jnp.inf)
    sampled = sample(flat, samplers, (emitted[:, None] + row).reshape(-1)).reshape(groups, rows)
    logprob = logprob_of(logits, sampled)
    finite = jnp.isfinite(logprob)

    ends = ~finite | (emitted[:, None] + row + 1 >= limit[:, None])
    for column in range(stop_ids.shape[1]):  # few: unrolled they are no launch of their own, as `any` would be
        ends |= sampled == stop_ids[:, column, None]
    goes_on = (sampled[:, :-1] == drafts) & ~ends[:, :-1] & (row[1:] < count[:, None])
    # Unrolled as well: with one row nothing of this is left.
    emits, last, ended, accepted = [live], sampled[:, 0], ends[:, 0], live.astype(jnp.int32)
    for t in range(1, rows):
        emits.append(emits[-1] & goes_on[:, t - 1])
        last, ended = jnp.where(emits[t], sampled[:, t], last), jnp.where(emits[t], ends[:, t], ended)
        accepted += emits[t]
    emitting = jnp.stack(emits, axis=1)

    if counts is not None:
        counts = counts.at[jnp.arange(groups)[:, None], sampled].add(emitting.astype(jnp.int32))
    return Acceptance(
        token=jnp.where(emitting, jnp.where(finite, sampled, NOT_FINITE), NOTHING),
        logprob=logprob,
        accepted=accepted,
        last=last,
        live=live & ~ended,
        counts=counts,
    )


def _each(tree: Any, rows: int) -> Any:
    # What belongs to a request, for each of its rows.
    def repeat(x: jax.Array) -> jax.Array:
        repeated = jnp.broadcast_to(x[:, None], (x.shape[0], rows, *x.shape[1:]))
        return repeated.reshape(-1, *x.shape[1:])

    return jax.tree.map(repeat, tree)

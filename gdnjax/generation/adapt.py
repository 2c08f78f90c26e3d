"""How many drafts a request's next step takes, from how many of its drafts were accepted.

A draft costs a step some more work, accepted or not. If each is accepted with probability a where all before it were,
k drafts give 1 + a + ... + a^k tokens for the work of 1 + c k plain steps, with c the cost of one draft in plain steps
(Leviathan et al., 2023, theorem 3.8). The k with the best ratio is taken.

a is measured: accepted drafts among those that were judged. (What stands behind a rejected draft was not judged.)
Both counts fade, so that the measure follows the text; and they start from a guess that they fade back to where nothing
is judged, so that a request that has stopped drafting tries again after a while.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

DRAFT_COST = 0.15
FADING = 0.95
"""What is left of the counts after a step: they reach back about 20 steps."""
GUESS = (0.5, 1.0)
"""Drafts accepted and judged before the first step."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trials:
    """`accepted`, `judged`: `[R]` float32, a request's drafts of late, fading."""

    accepted: jax.Array
    judged: jax.Array


def new_trials(rows: int) -> Trials:
    """Of requests that have drafted nothing yet."""
    return Trials(jnp.zeros(rows, jnp.float32), jnp.zeros(rows, jnp.float32))


def observe(trials: Trials, drafted: jax.Array, accepted: jax.Array) -> Trials:
    """The trials after a step. drafted, accepted: `[R]` int32, drafts that were verified and that were accepted."""
    judged = jnp.minimum(accepted + 1, drafted)
    return Trials(FADING * trials.accepted + accepted, FADING * trials.judged + judged)


def best_count(trials: Trials, most: jax.Array, limit: int) -> jax.Array:
    """`[R]` int32: the best number of drafts up to `most` `[R]`, which is at most `limit`; 0 is a plain step."""
    rate = (trials.accepted + GUESS[0]) / (trials.judged + GUESS[1])
    count = jnp.arange(limit + 1)
    tokens = jnp.cumsum(rate[:, None] ** count, axis=1)
    worth = jnp.where(count <= most[:, None], tokens / (1 + DRAFT_COST * count), 0.0)
    return jnp.argmax(worth, axis=1).astype(jnp.int32)

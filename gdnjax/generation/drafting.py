"""Where drafts come from: the draft (MTP) head, or the text itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from gdnjax.generation.adapt import Trials
from gdnjax.generation.lookup import continue_text
from gdnjax.generation.loop import Decoding
from gdnjax.model.draft import draft
from gdnjax.state.batch import Batch
from gdnjax.weights.declaration import Params

Source = Literal["mtp", "ngram"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculation(Decoding):
    """A decoding that drafts.

    * `most`: `[R]` int32, most drafts of a step.
    * `hidden`: `[R, H]`, the newest hidden after the final norm, for the draft head; or None.
    * `history`: `[R, max_length]` int32, the text as far as the state contains it, for lookups; or None.
    * `trials`: how drafts have fared, where their number follows that; or None.
    """

    most: jax.Array
    hidden: jax.Array | None
    history: jax.Array | None
    trials: Trials | None


Propose = Callable[[Params, Speculation, int], tuple[jax.Array, jax.Array, Speculation]]
"""(params, speculation, count >= 0) -> drafts `[R, count]` int32, how many of them there are `[R]` int32, and the
speculation, in which only what drafting keeps for itself is new."""


def by_head(params: Params, speculation: Speculation, count: int) -> tuple[jax.Array, jax.Array, Speculation]:
    """Drafts of the model's own draft head, each from the one before it."""
    s = speculation
    assert s.hidden is not None
    rows = jnp.arange(s.token.shape[0], dtype=jnp.int32)
    if count == 0:
        return jnp.zeros((*rows.shape, 0), jnp.int32), jnp.zeros_like(rows), s
    batch = Batch(s.token, jnp.where(s.live, rows, -1))
    drafts, _, state = draft(params, s.state, batch, s.hidden, count)
    return drafts, jnp.full_like(rows, count), dataclasses.replace(s, state=state)


def by_lookup(params: Any, speculation: Speculation, count: int) -> tuple[jax.Array, jax.Array, Speculation]:
    """What followed when the text was last where it is now."""
    s = speculation
    assert s.history is not None
    rows = jnp.arange(s.token.shape[0], dtype=jnp.int32)
    request = jnp.where(s.live, rows, -1)
    drafts, available, history = continue_text(s.history, request, s.state.position, s.token, count)
    return drafts, available, dataclasses.replace(s, history=history)


PROPOSE: dict[Source, Propose] = {"mtp": by_head, "ngram": by_lookup}

"""Drafts without a draft head: what followed when the text was last where it is now (prompt lookup)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

LONGEST = 3
"""Most tokens at the end of a text that are looked up."""


def continue_text(
    history: jax.Array, request: jax.Array, position: jax.Array, token: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Notes the newest token of some texts and drafts what follows.

    Args:
        history: `[requests, L]` int32, the texts, by request.
        request: `[R]` int32; -1 is padding.
        position: `[R]` int32, where `token` `[R]` int32 stands, the last of its text.
        count: drafts a row.

    Returns:
        Drafts and how many there are, as from `look_up`, and the texts.
    """
    place = jnp.where(request >= 0, request, history.shape[0])
    history = history.at[place, position].set(token, mode="drop")
    drafts, available = look_up(history[jnp.maximum(request, 0)], position + 1, count)
    # Those that are rejected lie behind the text's end, until others are written over them.
    behind = position[:, None] + 1 + jnp.arange(count, dtype=jnp.int32)
    return drafts, available, history.at[place[:, None], behind].set(drafts, mode="drop")


def look_up(history: jax.Array, length: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The tokens behind the most recent earlier occurrence of each text's last 3 tokens, or of its last 2, or 1.

    A text that ran on behind that occurrence into its own end is taken to run on so again: "a b a b" drafts "a b a".

    Args:
        history: `[R, L]` int32, the texts; what stands behind their ends is not read.
        length: `[R]` int32, their lengths.
        count: drafts a row.

    Returns:
        Drafts `[R, count]` int32, and how many of them there are, `[R]` int32: `count`, or 0 where the last token did
        not occur before.
    """
    place = jnp.arange(history.shape[1], dtype=jnp.int32)
    newest = length[:, None] - 1
    # How far back from each place the text reads as it does back from its end.
    run = jnp.zeros(history.shape, jnp.int32)
    same = place < newest
    for back in range(LONGEST):
        last = jnp.take_along_axis(history, jnp.maximum(newest - back, 0), axis=1)
        same &= (place >= back) & (jnp.roll(history, back, axis=1) == last)
        run += same
    # The longest, and of those the latest.
    found = jnp.argmax(run * history.shape[1] + place, axis=1).astype(jnp.int32)[:, None]
    period = jnp.maximum(newest - found, 1)
    source = found + 1 + jnp.arange(count, dtype=jnp.int32) % period
    drafts = jnp.take_along_axis(history, source, axis=1, mode="clip")
    available = jnp.take_along_axis(run, found, axis=1)[:, 0] > 0
    return drafts, jnp.where(available, count, 0).astype(jnp.int32)

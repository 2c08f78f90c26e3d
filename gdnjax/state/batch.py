"""A step's batch: which token of which request each row holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from pallas_kernels.segments import Segments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of one step.

    * `tokens`: `[R]` int32.
    * `request`: `[R]` int32, the request of each row; -1 is padding. Rows of one request stand together
      and in order.
    * `logits_rows`: `[K]` int32, rows whose logits are wanted; None is all of them.
    """

    tokens: jax.Array
    request: jax.Array
    logits_rows: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyBatch:
    """Candidate rows of one verify step, T for each of G requests.

    * `tokens`: `[G, T]` int32: the token emitted last, which no state contains yet, then the drafts behind it.
    * `request`: `[G]` int32, whose rows these are, no two the same; -1 is padding.
    * `count`: `[G]` int32, live rows of each group; 0 is padding too.
    """

    tokens: jax.Array
    request: jax.Array
    count: jax.Array


def row_bucket(rows: int, smallest: int = 16) -> int:
    """The next power of two from `smallest` up: few shapes, so few compilations."""
    return max(smallest, 1 << max(0, rows - 1).bit_length())


def prefill_batch(config: Config, pieces: Mapping[int, Sequence[int]], rows: int | None = None) -> Batch:
    """Packs the next prompt tokens of some requests into one batch.

    Args:
        config: the state's config.
        pieces: request number -> its next token ids, at least one.
        rows: total rows, padding included; None takes the next bucket.

    Returns:
        A batch whose `logits_rows` holds, for request r, the row of its last token (0 for requests that
        are not in the batch): the logits of a prefill are `[max_requests, V]`.

    Raises:
        ValueError: an unknown request, an empty piece, an id outside the vocabulary, too few rows.
    """
    total = sum(len(ids) for ids in pieces.values())
    rows = row_bucket(total) if rows is None else rows
    if total > rows:
        raise ValueError(f"{total} tokens in {rows} rows; raise rows or cut the pieces")
    tokens, request = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    last = np.zeros(config.max_requests, np.int32)
    start = 0
    for number, ids in pieces.items():
        _check_request(config, number)
        if len(ids) == 0:
            raise ValueError(f"request {number} has no tokens in this batch; leave it out")
        check_ids(ids, config.vocab_size)
        tokens[start : start + len(ids)] = ids
        request[start : start + len(ids)] = number
        start += len(ids)
        last[number] = start - 1
    return Batch(jnp.asarray(tokens), jnp.asarray(request), jnp.asarray(last))


def verify_batch(
    config: Config, pieces: Mapping[int, Sequence[int]], groups: int | None = None, rows: int | None = None
) -> VerifyBatch:
    """The candidate rows of some requests as one batch.

    Args:
        config: the state's config.
        pieces: request number -> the token emitted last and its drafts.
        groups: padding included; None is as many as pieces.
        rows: T; None is the most that the config takes.

    Raises:
        ValueError: an unknown request, an id outside the vocabulary, too few groups, or no rows or too many.
    """
    groups, rows = len(pieces) if groups is None else groups, config.verify_rows if rows is None else rows
    if len(pieces) > groups:
        raise ValueError(f"{len(pieces)} requests in {groups} groups; raise groups or leave some out")
    tokens, request, count = (
        np.zeros((groups, rows), np.int32),
        np.full(groups, -1, np.int32),
        np.zeros(groups, np.int32),
    )
    for group, (number, ids) in enumerate(pieces.items()):
        _check_request(config, number)
        if not 1 <= len(ids) <= rows:
            raise ValueError(f"request {number} has {len(ids)} candidate rows; it takes 1 to {rows}")
        check_ids(ids, config.vocab_size)
        tokens[group, : len(ids)] = ids
        request[group], count[group] = number, len(ids)
    return VerifyBatch(jnp.asarray(tokens), jnp.asarray(request), jnp.asarray(count))


def _check_request(config: Config, number: int) -> None:
    if not 0 <= number < config.max_requests:
        raise ValueError(f"request {number}; it takes 0 to max_requests - 1 = {config.max_requests - 1}")


def check_ids(ids: Sequence[int] | np.ndarray, vocab_size: int) -> None:
    """Raises ValueError, naming the first token id outside `[0, vocab_size)`."""
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids are {array.dtype}; they are integers from 0 to {vocab_size - 1}")
    wrong = array[(array < 0) | (array >= vocab_size)]
    if wrong.size:
        raise ValueError(f"token id {int(wrong[0])}; it takes 0 to vocab_size - 1 = {vocab_size - 1}")


def segments_of(batch: Batch, position: jax.Array, slot: jax.Array) -> Segments:
    """The batch's segments, one entry a request: `position` and `slot` are `[max_requests]`."""
    numbers = jnp.arange(position.shape[0], dtype=jnp.int32)
    owns = batch.request[None, :] == numbers[:, None]
    return Segments(
        start=jnp.argmax(owns, axis=1).astype(jnp.int32),
        length=jnp.sum(owns, axis=1, dtype=jnp.int32),
        position=position,
        slot=slot,
    )

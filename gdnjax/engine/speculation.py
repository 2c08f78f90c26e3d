"""What an engine that speculates runs on the device, in place of a decode step.

One step is three programs, without the host in between: drafts and the model over all candidate rows (`verify`), the
sampler of each request over its rows (`judge`, one for each sampler in use, as in `gdnjax.engine.programs`), and what
follows from what was accepted (`keep`). All requests run in one shape, whether each has all its drafts, fewer or none;
how many rows that has a request, its *width* T, is known when it is compiled.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.engine.programs import Mode, Slate, sampler_of, unmask
from gdnjax.generation.accept import NOTHING, accept
from gdnjax.generation.drafting import Source
from gdnjax.generation.lookup import continue_text
from gdnjax.generation.sampling import logprob_of
from gdnjax.model.draft import draft, draft_prefill, fill_accepted, fill_draft_kv
from gdnjax.model.layers import head
from gdnjax.model.step import prefill_hidden
from gdnjax.model.verify import verify_step
from gdnjax.state.batch import Batch, VerifyBatch
from gdnjax.state.pytree import State
from gdnjax.state.speculation import commit_verified
from gdnjax.weights.declaration import Params

NO_LIMIT, NO_STOPS = 2**30, 0
"""To `accept`: the host plans no more rows than a request may emit, and drops what stands behind a stop."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafting:
    """What drafts are made from, by request number; one of the two.

    * `hidden`: `[requests, H]`, the newest hidden after the final norm, for the draft head.
    * `history`: `[requests, max_length]` int32, each request's text, for lookups.
    """

    hidden: jax.Array | None
    history: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verification:
    """What the model says of G requests' rows.

    * `logits`: `[G, T, V]`. `hidden`: `[G, T, H]` after the final norm, or None where nobody reads it.
    * `drafts`: `[G, T - 1]`. `drafted`: `[G]`, how many of them were verified.
    """

    logits: jax.Array
    hidden: jax.Array | None
    drafts: jax.Array
    drafted: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verdict:
    """What they emit: `token` and `logprob` `[G, T]`, a row's tokens in order and then `NOTHING`."""

    token: jax.Array
    logprob: jax.Array


def new_drafting(config: Config, source: Source) -> Drafting:
    """Of nobody, zeros."""
    if source == "ngram":
        return Drafting(None, jnp.zeros((config.max_requests, config.max_length), jnp.int32))
    return Drafting(jnp.zeros((config.max_requests, config.hidden_size), jnp.dtype(config.dtype)), None)


def new_verdict(rows: int, width: int) -> Verdict:
    """Nobody emits anything. The same arrays serve every step: nothing is donated."""
    return Verdict(jnp.full((rows, width), NOTHING, jnp.int32), jnp.zeros((rows, width), jnp.float32))


def admit_history(drafting: Drafting, request: jax.Array, text: jax.Array) -> Drafting:
    """Notes what a request has to begin with: `text` `[max_length]` int32, padded with anything."""
    assert drafting.history is not None
    return dataclasses.replace(drafting, history=drafting.history.at[request].set(text))


def keep_hidden(drafting: Drafting, newest: jax.Array, request: jax.Array) -> Drafting:
    """Notes the hiddens `[K, H]` of prompts' last tokens; rows with request -1 are dropped."""
    assert drafting.hidden is not None
    place = jnp.where(request >= 0, request, drafting.hidden.shape[0])
    return dataclasses.replace(drafting, hidden=drafting.hidden.at[place].set(newest, mode="drop"))


def score_with_head(
    params: Params, state: State, batch: Batch, targets: jax.Array, following: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], State]:
    """`gdnjax.engine.programs.score` and `gdnjax.generation.prompts.prefill_with_head` in one.

    Returns:
        Logits `[K, V]` and hiddens `[K, H]` of `batch.logits_rows`, log-probabilities `[R]`, and the state.
    """
    assert batch.logits_rows is not None
    hidden, state = prefill_hidden(params, state, batch)
    state = draft_prefill(params, state, batch, hidden, following)
    logits = head(params, hidden)
    return (logits[batch.logits_rows], hidden[batch.logits_rows], logprob_of(logits, targets)), state


def verify(
    params: Params,
    state: State,
    drafting: Drafting,
    token: jax.Array,
    request: jax.Array,
    count: jax.Array,
    width: int,
) -> tuple[tuple[Verification, Drafting], State]:
    """Drafts for every row's request and runs the candidate rows; the step is pending then.

    Args:
        params: weights.
        state: the state (donate it), of a config with `speculate`.
        drafting: donate it.
        token: `[requests]` int32, the token emitted last of each request: `Slate.token`.
        request: `[G]` int32; -1 is padding.
        count: `[G]` int32, most rows that each may run, 1 to T.
        width: T, 1 to 1 + `speculate`; 1 is plain decoding.
    """
    live, number, most = request >= 0, jnp.maximum(request, 0), width - 1
    newest, position = token[number], state.position[number]
    if drafting.hidden is not None:
        hidden, available = drafting.hidden[number], jnp.full_like(number, most)
        if most:
            drafts, _, state = draft(params, state, Batch(newest, request), hidden, most)
        else:
            # What the head reads of a prompt's last token, drafts write; without them nobody else does.
            drafts = jnp.zeros((*number.shape, 0), jnp.int32)
            state = fill_draft_kv(params, state, newest, hidden, request, position - 1)
    else:
        assert drafting.history is not None
        drafts, available, history = continue_text(drafting.history, request, position, newest, most)
        drafting = dataclasses.replace(drafting, history=history)
    rows = jnp.where(live, jnp.minimum(count, 1 + available), 0)
    tokens = jnp.concatenate([newest[:, None], drafts], axis=1)
    logits, hidden, state = verify_step(params, state, VerifyBatch(tokens, request, rows))
    seen = None if drafting.hidden is None else hidden
    return (Verification(logits, seen, drafts, jnp.maximum(rows - 1, 0)), drafting), state


def judge(
    slate: Slate,
    verification: Verification,
    verdict: Verdict,
    request: jax.Array,
    mode: Mode,
    allowed: jax.Array | None = None,
) -> tuple[Slate, Verdict]:
    """Samples behind every row and accepts drafts, for the rows of one sampler; see `gdnjax.generation.accept`.

    Args:
        slate: donate it.
        verification: of all rows of the step.
        verdict: what the other samplers' rows emit.
        request: `[G]` int32, -1 where a row has another sampler.
        mode: `mode_of` the rows' requests.
        allowed: as in `gdnjax.engine.programs.draw`; a request that may not take all tokens has no drafts.

    Returns:
        The slate, and the verdict with these rows.
    """
    live, number = request >= 0, jnp.maximum(request, 0)
    groups, drawn = request.shape[0], slate.drawn[number]
    sampler = sampler_of(slate, number, mode)
    seen = (slate.in_prompt[number], slate.in_output[number]) if sampler.penalized else (None, None)
    free = None if allowed is None else unmask(allowed, verification.logits.shape[-1])
    a = accept(
        verification.logits, verification.drafts, 1 + verification.drafted, sampler, live, drawn,
        jnp.full(groups, NO_LIMIT, jnp.int32), jnp.zeros((groups, NO_STOPS), jnp.int32), *seen, free,
    )  # fmt: skip
    target = jnp.where(live, request, slate.token.shape[0])
    in_output = slate.in_output
    if sampler.penalized:
        emitted = (a.token >= 0).astype(jnp.int32)
        in_output = in_output.at[target[:, None], jnp.maximum(a.token, 0)].add(emitted, mode="drop")
    slate = dataclasses.replace(
        slate,
        token=slate.token.at[target].set(a.last, mode="drop"),
        drawn=slate.drawn.at[target].add(a.accepted, mode="drop"),
        in_output=in_output,
    )
    mine = live[:, None]
    return slate, Verdict(jnp.where(mine, a.token, verdict.token), jnp.where(mine, a.logprob, verdict.logprob))


def keep(
    params: Params, state: State, drafting: Drafting, verification: Verification, verdict: Verdict, request: jax.Array
) -> tuple[Drafting, State]:
    """Commits the rows whose tokens were emitted, and tells the draft head of them.

    Args:
        params: weights.
        state: the state with the step pending (donate it). drafting: donate it.
        verification, verdict: of all rows. request: `[G]` int32; -1 is padding.
    """
    accepted = jnp.sum(verdict.token != NOTHING, axis=1, dtype=jnp.int32)
    place = jnp.where(request >= 0, request, state.position.shape[0])
    if drafting.hidden is not None:
        assert verification.hidden is not None
        newest, state = fill_accepted(params, state, verdict.token, verification.hidden, request, accepted)
        drafting = dataclasses.replace(drafting, hidden=drafting.hidden.at[place].set(newest, mode="drop"))
    counts = jnp.zeros_like(state.position).at[place].set(accepted, mode="drop")
    # The commit comes last: merged with reads of the same vectors, it could not run in place.
    counts, pending = jax.lax.optimization_barrier((counts, state.pending))
    return drafting, commit_verified(dataclasses.replace(state, pending=pending), counts)


run_admit_history = jax.jit(admit_history, donate_argnames="drafting")
run_keep_hidden = jax.jit(keep_hidden, donate_argnames="drafting")
run_score_with_head = jax.jit(score_with_head, donate_argnames="state")
run_verify = jax.jit(verify, static_argnames="width", donate_argnames=("state", "drafting"), keep_unused=True)
run_judge = jax.jit(judge, static_argnames="mode", donate_argnames="slate")
run_keep = jax.jit(keep, donate_argnames=("state", "drafting"), keep_unused=True)

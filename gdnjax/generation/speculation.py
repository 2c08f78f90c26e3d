"""The speculative step as a pure function, driven from Python or inside one `while_loop`.

A step drafts (`gdnjax.generation.drafting`), verifies the drafts in one pass of the model, emits what `accept` says and
commits the accepted rows. Its tokens are those of plain decoding, whatever the drafts are.

How many rows a step runs, its *width*, is known when it is compiled. Where requests adapt their drafts, there is a
program a width, and each step takes the narrowest that has room for what its requests want.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.generation.accept import NOTHING, accept
from gdnjax.generation.adapt import best_count, new_trials, observe
from gdnjax.generation.drafting import Propose, Source, Speculation
from gdnjax.generation.loop import Decoding, Emission, advanced
from gdnjax.model.draft import fill_accepted
from gdnjax.model.verify import verify_step
from gdnjax.state.batch import VerifyBatch
from gdnjax.state.speculation import commit_verified
from gdnjax.weights.declaration import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified(Emission):
    """What a speculative step emits: `token` and `logprob` are `[R, T]`, a row's tokens in order and then `NOTHING`;
    `drafted` `[R]`, its drafts that were verified."""

    drafted: jax.Array


def make_speculation(
    decoding: Decoding,
    counts: list[int],
    source: Source,
    prompts: list[list[int]],
    hidden: jax.Array | None,
    adaptive: bool = False,
) -> Speculation:
    """A speculation over a decoding that has emitted every prompt's first token.

    Args:
        decoding: of a state with `speculate` at least the largest count, and `draft_kv` for `mtp`.
        counts: each request's most drafts a step; at most `speculate`.
        source: where drafts come from.
        prompts: the prompts, for `ngram`.
        hidden: `[R, H]`, the hiddens of the prompts' last tokens after the final norm, for `mtp`.
        adaptive: whether requests draft less where little is accepted.
    """
    config = decoding.state.config
    most = np.zeros(config.max_requests, np.int32)
    most[: len(counts)] = counts
    history: Any = None
    if source == "ngram":
        texts = np.zeros((config.max_requests, config.max_length), np.int32)
        for row, prompt in enumerate(prompts):
            texts[row, : len(prompt)] = prompt
        history = jnp.asarray(texts)
    return Speculation(
        **{field.name: getattr(decoding, field.name) for field in dataclasses.fields(Decoding)},
        most=jnp.asarray(most),
        hidden=hidden if source == "mtp" else None,
        history=history,
        trials=new_trials(config.max_requests) if adaptive else None,
    )


def wanted(speculation: Speculation) -> jax.Array:
    """`[R]` int32: the drafts that each request's next step takes. None that its limit would leave unused, so none
    that would lie behind its pages."""
    s = speculation
    count = s.most if s.trials is None else best_count(s.trials, s.most, s.state.config.speculate)
    return jnp.where(s.live, jnp.clip(s.limit - s.emitted - 1, 0, count), 0)


def speculative_step(
    params: Params, speculation: Speculation, propose: Propose, width: int
) -> tuple[Speculation, Verified]:
    """Drafts for every live row, verifies, emits, and commits what was accepted.

    Args:
        params: weights.
        speculation: donate it.
        propose: where drafts come from.
        width: most drafts of this step, 0 to `speculate`; 0 is a plain step.
    """
    s, rows = speculation, jnp.arange(speculation.token.shape[0], dtype=jnp.int32)
    request = jnp.where(s.live, rows, -1)
    drafts, available, s = propose(params, s, width)
    drafted = jnp.minimum(jnp.minimum(wanted(s), available), width)
    tokens = jnp.concatenate([s.token[:, None], drafts], axis=1)
    logits, hidden, state = verify_step(params, s.state, VerifyBatch(tokens, request, 1 + drafted))
    a = accept(logits, drafts, 1 + drafted, s.sampler, s.live, s.emitted, s.limit, s.stop_ids, s.in_prompt, s.counts)
    newest = s.hidden
    if newest is not None:
        newest, state = fill_accepted(params, state, a.token, hidden, request, a.accepted)
    # The commit comes last: merged with the step's reads of the same vectors, it could not run in place.
    accepted, pending = jax.lax.optimization_barrier((a.accepted, state.pending))
    state = commit_verified(dataclasses.replace(state, pending=pending), accepted)
    trials = s.trials if s.trials is None else observe(s.trials, drafted, jnp.maximum(a.accepted - 1, 0))
    s = dataclasses.replace(advanced(s, a), state=state, hidden=newest, trials=trials)
    return s, Verified(a.token, a.logprob, jnp.where(request >= 0, drafted, 0))


Carry = tuple[jax.Array, Speculation, Verified]
"""Of the device loop: the step's number, what it goes on with, and all emissions."""

# Unread inputs are kept, as in `gdnjax.generation.loop`.
jitted_speculative_step = jax.jit(
    speculative_step, static_argnames=("propose", "width"), donate_argnames="speculation", keep_unused=True
)
_jitted_widest = jax.jit(lambda speculation: jnp.max(wanted(speculation)))


def python_step(params: Params, speculation: Speculation, propose: Propose) -> tuple[Speculation, Verified]:
    """The step of the Python loop. Where requests adapt, the host waits for the width that they want."""
    adapts = speculation.trials is not None
    width = int(_jitted_widest(speculation)) if adapts else speculation.state.config.speculate
    return jitted_speculative_step(params, speculation, propose=propose, width=width)


@functools.partial(jax.jit, static_argnames=("steps", "propose"), donate_argnames="speculation", keep_unused=True)
def speculative_device_loop(
    params: Params, speculation: Speculation, steps: int, propose: Propose
) -> tuple[Speculation, Verified]:
    """Up to `steps` steps on the device, fewer if every row has stopped.

    Returns:
        The speculation, and emissions `[steps, R, T]` and `[steps, R]`; steps that did not run emit `NOTHING`.
    """
    rows, most = speculation.token.shape[0], speculation.state.config.speculate
    shape = steps, rows, 1 + most
    emissions = Verified(
        jnp.full(shape, NOTHING, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros((steps, rows), jnp.int32)
    )

    def more(carry: Carry) -> jax.Array:
        index, s, _ = carry
        return (index < steps) & jnp.any(s.live)

    def run(carry: Carry, width: int) -> Carry:
        index, s, emissions = carry
        s, one = speculative_step(params, s, propose, width)
        emissions = Verified(
            emissions.token.at[index, :, : 1 + width].set(one.token),
            emissions.logprob.at[index, :, : 1 + width].set(one.logprob),
            emissions.drafted.at[index].set(one.drafted),
        )
        return index + 1, s, emissions

    def run_while_widest(carry: Carry, width: int) -> Carry:
        def is_widest(carry: Carry) -> jax.Array:
            return more(carry) & (jnp.max(wanted(carry[1])) == width)

        return jax.lax.while_loop(is_widest, lambda carry: run(carry, width), carry)

    def every_width(carry: Carry) -> Carry:
        # A loop a width, which runs for as long as it is the one: branches would copy the state.
        for width in range(1 + most):
            carry = run_while_widest(carry, width)
        return carry

    body = every_width if speculation.trials is not None else lambda carry: run(carry, most)
    _, speculation, emissions = jax.lax.while_loop(more, body, (jnp.int32(0), speculation, emissions))
    return speculation, emissions

"""What the engine runs on the device: a decode step, a prefill window, and sampling by request.

The model's programs and the samplers are compiled apart, one shape for each number of rows, so that a
sampler that one request needs neither compiles nor changes a model step. Only the greedy one is part of a decode
step: where all are greedy, a step is one call. What a request samples with is kept on the device under its number:
the host sends rows, and fetches tokens a step later.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.generation.accept import NOT_FINITE, NOTHING
from gdnjax.generation.loop import Emission
from gdnjax.generation.sampling import Sampler, SamplingParams, logprob_of, penalize, sample
from gdnjax.model.step import decode_and_commit, prefill
from gdnjax.state.batch import Batch
from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params

Mode = Literal["greedy", "top", "full", "penalized"]
MODES: tuple[Mode, ...] = ("greedy", "top", "full", "penalized")
PENALTIES = slice(3, 6)
"""Of a request's numbers."""
TOP = 128
"""`top` samples among so many best tokens: what a request with 1 <= top_k <= TOP needs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slate:
    """What sampling needs, by request number.

    * `token`: `[requests]`, the token sampled last, which the next decode step feeds.
    * `drawn`: `[requests]`, tokens sampled so far.
    * `numbers`: `[requests, 6]` float32, `counts`: `[requests, 2]` uint32: `SamplingParams`, see `settings`.
    * `in_prompt`, `in_output`: `[requests, V]`, for the penalties: whether a token is in the prompt, and how
      often it was sampled. Written for requests with penalties only.
    """

    token: jax.Array
    drawn: jax.Array
    numbers: jax.Array
    counts: jax.Array
    in_prompt: jax.Array
    in_output: jax.Array


def new_slate(config: Config) -> Slate:
    """A slate of `max_requests` requests, zeros."""
    rows, vocab = config.max_requests, config.vocab_size
    return Slate(
        token=jnp.zeros(rows, jnp.int32),
        drawn=jnp.zeros(rows, jnp.int32),
        numbers=jnp.zeros((rows, 6), jnp.float32),
        counts=jnp.zeros((rows, 2), jnp.uint32),
        in_prompt=jnp.zeros((rows, vocab), jnp.bool_),
        in_output=jnp.zeros((rows, vocab), jnp.int32),
    )


def settings(params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """A request's rows of `numbers` and `counts`."""
    p = params
    numbers = (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    return np.array(numbers, np.float32), np.array((p.top_k, p.seed), np.uint32)


def mode_of(params: SamplingParams) -> Mode:
    """The sampler that a request takes. It is its own, whatever the others take: so are its bits."""
    if params.penalized:
        return "penalized"
    if params.temperature == 0:
        return "greedy"
    return "top" if 0 < params.top_k <= TOP else "full"


def admit(slate: Slate, request: jax.Array, drawn: jax.Array, numbers: jax.Array, counts: jax.Array) -> Slate:
    """Writes what a request samples with; `drawn` is more than 0 where it goes on after a preemption."""
    return dataclasses.replace(
        slate,
        drawn=slate.drawn.at[request].set(drawn),
        numbers=slate.numbers.at[request].set(numbers),
        counts=slate.counts.at[request].set(counts),
    )


def admit_penalties(slate: Slate, request: jax.Array, in_prompt: jax.Array, in_output: jax.Array) -> Slate:
    """Writes which tokens a request has seen: `[V]` bool and `[V]` int32."""
    return dataclasses.replace(
        slate,
        in_prompt=slate.in_prompt.at[request].set(in_prompt),
        in_output=slate.in_output.at[request].set(in_output),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a decode step gives beside the state: `logits` `[R, V]`; `token` and `drawn`, the slate's with the tokens of
    the greedy rows; and what those rows emit, see `pack`."""

    logits: jax.Array
    token: jax.Array
    drawn: jax.Array
    emission: jax.Array


def decode(
    params: Params, state: State, token: jax.Array, drawn: jax.Array, numbers: jax.Array, request: jax.Array
) -> tuple[Decoded, State]:
    """One token of each row's request, fed from `Slate.token` and committed; and sampled, where the request is greedy.

    Args:
        params: weights.
        state: donate it.
        token, drawn, numbers: the slate's.
        request: `[R]` int32; -1 is padding.
    """
    number = jnp.maximum(request, 0)
    logits, state = decode_and_commit(params, state, Batch(token[number], request))
    greedy = jnp.where(is_greedy(numbers)[number], request, -1)
    token, drawn, emission = _emit(token, drawn, logits, jnp.argmax(logits, axis=-1).astype(jnp.int32), greedy)
    return Decoded(logits, token, drawn, emission), state


def is_greedy(numbers: jax.Array) -> jax.Array:
    """Whether `mode_of` a request is `greedy`, from `[N, 6]` numbers of `settings`: `[N]` bool."""
    nothing = settings(SamplingParams())[0]
    return (numbers[:, 0] == 0) & jnp.all(numbers[:, PENALTIES] == nothing[PENALTIES], axis=1)


def pack(emission: Emission) -> jax.Array:
    """An emission as one array, `[2, R]` int32, so that fetching it is one transfer: tokens, and the bits of the
    log-probabilities."""
    return jnp.stack([emission.token, jax.lax.bitcast_convert_type(emission.logprob, jnp.int32)])


def unpack(packed: np.ndarray) -> Emission:
    """The emission on the host, in numpy arrays."""
    arrays: Any = (packed[0], packed[1].view(np.float32))
    return Emission(*arrays)


def _emit(
    token: jax.Array, drawn: jax.Array, logits: jax.Array, chosen: jax.Array, request: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Notes the tokens chosen for rows with a request in `Slate.token` and `Slate.drawn`, and packs what they emit.

    logits: `[R, V]`, the model's own. request: `[R]`; rows with -1 emit `NOTHING`.
    """
    logprob, live = logprob_of(logits, chosen), request >= 0
    out = jnp.where(live, jnp.where(jnp.isfinite(logprob), chosen, NOT_FINITE), NOTHING)
    place = jnp.where(live, request, token.shape[0])
    token, drawn = token.at[place].set(chosen, mode="drop"), drawn.at[place].add(1, mode="drop")
    return token, drawn, pack(Emission(out, logprob))


def score(params: Params, state: State, batch: Batch, targets: jax.Array) -> tuple[tuple[jax.Array, jax.Array], State]:
    """A prefill that also gives the log-probability of a target behind every row.

    Args:
        params, state, batch: as `prefill` takes them.
        targets: `[R]` int32, the token that follows each row's.

    Returns:
        Logits `[K, V]` of `batch.logits_rows` and log-probabilities `[R]`, and the state.
    """
    assert batch.logits_rows is not None
    logits, state = prefill(params, state, Batch(batch.tokens, batch.request))
    return (logits[batch.logits_rows], logprob_of(logits, targets)), state


def sampler_of(slate: Slate, number: jax.Array, mode: Mode) -> Sampler:
    """The sampler of requests `[R]`; `mode` is theirs."""
    numbers, counts = slate.numbers[number], slate.counts[number]
    return Sampler(
        temperature=numbers[:, 0],
        top_p=numbers[:, 1],
        min_p=numbers[:, 2],
        repetition_penalty=numbers[:, 3],
        presence_penalty=numbers[:, 4],
        frequency_penalty=numbers[:, 5],
        top_k=counts[:, 0].astype(jnp.int32),
        seed=counts[:, 1],
        greedy=mode == "greedy",
        penalized=mode == "penalized",
        candidates=TOP if mode == "top" else 0,
    )


def draw(slate: Slate, logits: jax.Array, request: jax.Array, mode: Mode) -> tuple[Slate, jax.Array]:
    """Samples the next token of each row's request, and notes it in the slate.

    Args:
        slate: donate it.
        logits: `[R, V]` float32.
        request: `[R]` int32; rows with -1 emit `NOTHING`.
        mode: `mode_of` the rows' requests.

    Returns:
        The slate, and what the rows emit, see `pack`.
    """
    number = jnp.maximum(request, 0)
    sampler, raw = sampler_of(slate, number, mode), logits
    if sampler.penalized:
        logits = penalize(logits, sampler, slate.in_prompt[number], slate.in_output[number])
    chosen = sample(logits, sampler, slate.drawn[number])
    token, drawn, emission = _emit(slate.token, slate.drawn, raw, chosen, request)
    in_output = slate.in_output
    if sampler.penalized:
        place = jnp.where(request >= 0, request, slate.token.shape[0])
        in_output = in_output.at[place, chosen].add(1, mode="drop")
    return dataclasses.replace(slate, token=token, drawn=drawn, in_output=in_output), emission


run_admit = jax.jit(admit, donate_argnames="slate")
run_admit_penalties = jax.jit(admit_penalties, donate_argnames="slate")
run_decode = jax.jit(decode, donate_argnames="state", keep_unused=True)
run_prefill = jax.jit(prefill, donate_argnames="state")
run_score = jax.jit(score, donate_argnames="state")
run_draw = jax.jit(draw, static_argnames="mode", donate_argnames="slate")

"""What the engine runs on the device: a decode step, a prefill window, and sampling by request.

The model's programs and the samplers are compiled apart, one shape for each number of rows, so that a
sampler that one request needs neither compiles nor changes a model step. What a request samples with is
kept on the device under its number: the host sends rows, and fetches tokens a step later.
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

Mode = Literal["greedy", "top", "full", "penalized", "constrained"]
MODES: tuple[Mode, ...] = ("greedy", "top", "full", "penalized")
"""Those with a program of their own. `constrained` has that of `penalized`, which does all that a request may ask for:
both take a mask, of all tokens or of those that a request may take."""
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


def decode(
    params: Params, state: State, logits: jax.Array, token: jax.Array, request: jax.Array
) -> tuple[jax.Array, State]:
    """One token of each row's request, fed from `Slate.token` and committed.

    Args:
        params: weights.
        state: donate it.
        logits: those of an earlier step, `[R, V]` float32; donate them: their memory takes the new ones. A step that
            finds everything where the step before had it is launched as it is; else its graph of kernels is updated,
            which costs the host of a GPU a third more.
        token: the slate's. request: `[R]` int32; -1 is padding.
    """
    return decode_and_commit(params, state, Batch(token[jnp.maximum(request, 0)], request))


def pack(emission: Emission) -> jax.Array:
    """An emission as one array, `[2, R]` int32, so that fetching it is one transfer: tokens, and the bits of the
    log-probabilities."""
    return jnp.stack([emission.token, jax.lax.bitcast_convert_type(emission.logprob, jnp.int32)])


def unpack(packed: np.ndarray) -> Emission:
    """The emission on the host, in numpy arrays."""
    arrays: Any = (packed[0], packed[1].view(np.float32))
    return Emission(*arrays)


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


def unmask(allowed: jax.Array, vocab: int) -> jax.Array:
    """Bits as booleans: `[R, ceil(V / 32)]` uint32, of which bit i % 32 of word i // 32 is token i's -> `[R, V]`."""
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(allowed.shape[0], -1)[:, :vocab] > 0


def draw(
    slate: Slate, logits: jax.Array, request: jax.Array, spent: jax.Array, mode: Mode, allowed: jax.Array | None = None
) -> tuple[Slate, jax.Array]:
    """Samples the next token of each row's request, and notes it in the slate.

    Args:
        slate: donate it.
        logits: `[R, V]` float32.
        request: `[R]` int32; rows with -1 emit `NOTHING`.
        spent: `[2, R]` int32, what an earlier draw emitted and the host has fetched; donate it: its memory takes what
            this one emits. With an allocation here, a GPU's host took a quarter longer to launch the next decode step.
        mode: `mode_of` the rows' requests, one of `MODES`.
        allowed: `[R, ceil(V / 32)]` uint32, the tokens that each may take, see `unmask`; None is all. Log-probabilities
            stay the model's own.

    Returns:
        The slate, and what the rows emit, see `pack`.
    """
    live, number = request >= 0, jnp.maximum(request, 0)
    sampler, raw = sampler_of(slate, number, mode), logits
    if sampler.penalized:
        logits = penalize(logits, sampler, slate.in_prompt[number], slate.in_output[number])
    if allowed is not None:
        logits = jnp.where(unmask(allowed, logits.shape[-1]), logits, -jnp.inf)
    token = sample(logits, sampler, slate.drawn[number])
    logprob = logprob_of(raw, token)
    target = jnp.where(live, request, slate.token.shape[0])
    out = jnp.where(live, jnp.where(jnp.isfinite(logprob), token, NOT_FINITE), NOTHING)
    in_output = slate.in_output
    if sampler.penalized:
        in_output = in_output.at[target, token].add(1, mode="drop")
    slate = dataclasses.replace(
        slate,
        token=slate.token.at[target].set(token, mode="drop"),
        drawn=slate.drawn.at[target].add(1, mode="drop"),
        in_output=in_output,
    )
    return slate, pack(Emission(out, logprob))


run_admit = jax.jit(admit, donate_argnames="slate")
run_admit_penalties = jax.jit(admit_penalties, donate_argnames="slate")
run_decode = jax.jit(decode, donate_argnames=("state", "logits"), keep_unused=True)
run_prefill = jax.jit(prefill, donate_argnames="state")
run_score = jax.jit(score, donate_argnames="state")
run_draw = jax.jit(draw, static_argnames="mode", donate_argnames=("slate", "spent"), keep_unused=True)

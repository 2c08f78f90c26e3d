"""From logits to the next token: penalties, temperature, top-k, top-p, min-p, and a seeded draw.

The order is Hugging Face's: penalties, temperature, top-k, top-p, min-p. A request's draws depend on
its own seed and on how many tokens it has, never on its row or on what else is in the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import GenerationDefaults
from gdnjax.config.checks import check_types, require


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request samples.

    * `temperature`: 0 is greedy. `top_k`: 0 is off. `top_p`: 1 is off. `min_p`: 0 is off.
    * `repetition_penalty`: divides positive and multiplies negative logits of tokens in the prompt or
      the output; 1 is off.
    * `presence_penalty`, `frequency_penalty`: subtracted from logits of tokens in the output, once, and
      once for each time they occur.
    * `seed`: 0 to 2^32 - 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        GenerationDefaults(
            True, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty
        )  # the same limits hold for the fields they share
        # The arithmetic is float32: larger numbers would become infinite, and then NaN.
        for key in ("temperature", "presence_penalty", "frequency_penalty"):
            require(abs(getattr(self, key)) <= 1e30, key, getattr(self, key), "a number up to 1e30")
        require(
            1e-30 <= self.repetition_penalty <= 1e30,
            "repetition_penalty",
            self.repetition_penalty,
            "a number from 1e-30 to 1e30",
        )
        require(self.top_k < 2**31, "top_k", self.top_k, "an integer >= 0 and under 2^31 (0 switches it off)")
        require(0 <= self.seed < 2**32, "seed", self.seed, "an integer from 0 to 2^32 - 1")

    @property
    def penalized(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """`SamplingParams` of every row, as arrays `[R]`, and what is known when the step is compiled.

    * `greedy`: every row has temperature 0.
    * `candidates`: most tokens that any row can choose from; 0 is the whole vocabulary.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    seed: jax.Array
    greedy: bool = dataclasses.field(metadata={"static": True})
    penalized: bool = dataclasses.field(metadata={"static": True})
    candidates: int = dataclasses.field(metadata={"static": True})


def make_sampler(params: Sequence[SamplingParams], rows: int) -> Sampler:
    """The sampler of `rows` rows; rows beyond `params` are padding and greedy."""
    padded = [*params, *[SamplingParams()] * (rows - len(params))]

    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray(np.array([getattr(p, name) for p in padded], dtype))

    sampled = [p for p in params if p.temperature > 0]
    # A power of two: a request with another top_k must not compile another step.
    whole = any(p.top_k == 0 for p in sampled)
    candidates = 0 if whole or not sampled else 1 << (max(p.top_k for p in sampled) - 1).bit_length()
    return Sampler(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        presence_penalty=column("presence_penalty", np.float32),
        frequency_penalty=column("frequency_penalty", np.float32),
        seed=column("seed", np.uint32),
        greedy=not sampled,
        penalized=any(p.penalized for p in params),
        candidates=candidates,
    )


def penalize(logits: jax.Array, sampler: Sampler, in_prompt: jax.Array, counts: jax.Array) -> jax.Array:
    """Logits `[R, V]` after the penalties.

    in_prompt: `[R, V]` bool, tokens of the prompt. counts: `[R, V]` int32, times each is in the output.
    """
    factor = sampler.repetition_penalty[:, None]
    seen = in_prompt | (counts > 0)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / factor, logits * factor), logits)
    once = sampler.presence_penalty[:, None] * (counts > 0)
    return logits - once - sampler.frequency_penalty[:, None] * counts


def sample(logits: jax.Array, sampler: Sampler, draw: jax.Array) -> jax.Array:
    """The next token of every row.

    Args:
        logits: `[R, V]` float32, penalties applied.
        sampler: the rows' parameters.
        draw: `[R]` int32, how many tokens the row's request has drawn before: the same seed and number
            give the same random value.

    Returns:
        Token ids `[R]` int32.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampler.greedy:
        return best
    count = min(sampler.candidates, logits.shape[-1]) or logits.shape[-1]
    # [r, candidates], best first; equal logits keep the order of their ids
    values, ids = jax.lax.top_k(logits, count)
    scaled = values / jnp.maximum(sampler.temperature, 1e-6)[:, None]
    rank = jnp.arange(count)
    keep = (sampler.top_k[:, None] == 0) | (rank < sampler.top_k[:, None])
    weights = jnp.where(keep, jnp.exp(scaled - scaled[:, :1]), 0.0)
    # A token stays while those before it hold less than top_p of what top-k left.
    before = jnp.cumsum(weights, axis=-1) - weights
    keep = before < sampler.top_p[:, None] * jnp.sum(weights, axis=-1, keepdims=True)
    keep &= weights >= sampler.min_p[:, None] * weights[:, :1]
    weights = jnp.where(keep | (rank == 0), weights, 0.0)
    sums = jnp.cumsum(weights, axis=-1)
    uniform = jax.vmap(_uniform)(sampler.seed, draw)
    # The first candidate whose running sum passes the drawn share of the whole.
    chosen = jnp.sum(sums <= uniform[:, None] * sums[:, -1:], axis=-1)
    chosen = jnp.minimum(chosen, jnp.sum(weights > 0, axis=-1) - 1)
    drawn = jnp.take_along_axis(ids, jnp.maximum(chosen, 0)[:, None], axis=-1)[:, 0]
    return jnp.where(sampler.temperature > 0, drawn.astype(jnp.int32), best)


def logprob_of(logits: jax.Array, token: jax.Array) -> jax.Array:
    """The log-probability of a token each: logits `[..., V]`, token `[...]` int32."""
    chosen = jnp.take_along_axis(logits, token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)


def _uniform(seed: jax.Array, draw: jax.Array) -> jax.Array:
    return jax.random.uniform(jax.random.fold_in(jax.random.key(seed), draw))

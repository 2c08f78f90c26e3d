"""The parts of training that own no files: loss, schedule, the loop on the device, judging, generating.

Weights in training are a flat dict, Hugging Face name -> float32 array; the model sees them rounded to the dtypes
that its config declares.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdnjax.config import Config
from gdnjax.model.draft import mtp_logits
from gdnjax.model.forward import forward_hidden
from gdnjax.model.layers import head, linear
from gdnjax.tokenizer import Tokenizer
from gdnjax.weights.declaration import Params, abstract_params, from_tensor_names, init_params, tensor_names

Weights = dict[str, jax.Array]
MTP_WEIGHT = 0.3
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class State(NamedTuple):
    """What a step changes."""

    weights: Weights
    optimizer: Any
    step: jax.Array


class Rows(NamedTuple):
    """Held-out sequences in batches: tokens `[n, b, t + 1]`, and which targets `[n, b, t]` count."""

    tokens: Any
    counted: Any


class Data(NamedTuple):
    """Token ids: the stream to train on, and by name what to judge on."""

    train: np.ndarray
    heldout: dict[str, Rows]
    problems: list[Any]


class Task(NamedTuple):
    """What a run starts from: the model, its tokenizer (and the folder of its files), and the data."""

    config: Config
    weights: Weights
    tokenizer: Tokenizer
    tokenizer_files: Path | None
    data: Data


def initial_weights(config: Config, seed: int) -> Weights:
    """Fresh float32 weights."""
    return tensor_names(init_params(config.replace(dtype="float32"), jax.random.key(seed)))


def rounded(weights: Weights, config: Config) -> Weights:
    """The weights in the dtypes that the config declares: A_log, dt_bias and the gated norm stay float32."""
    declared = tensor_names(abstract_params(config))
    return {name: weights[name].astype(leaf.dtype) for name, leaf in declared.items()}


def model_params(weights: Weights, config: Config) -> Params:
    """The pytree that the model's functions take, rounded."""
    return from_tensor_names(config, rounded(weights, config))


def make_optimizer(weight_decay: float, clip: float = 1.0) -> optax.GradientTransformation:
    """AdamW without its learning rate, which the loop multiplies in. Only matrices decay."""

    def matrices(weights: Any) -> dict[str, bool]:
        return {name: array.ndim == 2 for name, array in weights.items()}

    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay, mask=matrices),
    )


def initial_state(weights: Weights, weight_decay: float) -> State:
    """The state before the first step."""
    return State(weights, make_optimizer(weight_decay).init(weights), jnp.zeros((), jnp.int32))


def learning_rate(peak: float, step: int, warmup: int, fraction: float) -> float:
    """Linear warm-up times half a cosine over `fraction`, the part of the run that is over."""
    return peak * min(1.0, (step + 1) / max(1, warmup)) * 0.5 * (1 + math.cos(math.pi * min(1.0, fraction)))


def token_losses(
    weights: Weights, config: Config, tokens: jax.Array
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """What every next token costs.

    Args:
        weights: float32.
        config: `dtype` is the dtype of the computation.
        tokens: `[b, t + 1]`.

    Returns:
        Cross entropy `[b, t]` of tokens 1 to t; the draft head's `[b, t - 1]` of tokens 2 to t, and whether its first
        choice is right (None without a draft head).
    """
    weights = rounded(weights, config)
    inputs = tokens[:, :-1]
    # Looked up here and by a product, since the gradient of a lookup in bfloat16 adds up a frequent token's thousand
    # terms in bfloat16, in an order that differs from run to run. The model then looks up row i for position i.
    one_hot = jax.nn.one_hot(inputs.reshape(-1), config.vocab_size, dtype=weights[TABLE].dtype)
    embedded = linear(one_hot, weights[TABLE].T)
    positions = jnp.arange(inputs.size, dtype=jnp.int32).reshape(inputs.shape)
    untied = config.replace(tie_word_embeddings=False)
    params = from_tensor_names(untied, {HEAD: weights[TABLE], **weights, TABLE: embedded})

    hidden, _ = forward_hidden(params, untied, positions)
    loss = optax.softmax_cross_entropy_with_integer_labels(head(params, hidden), tokens[:, 1:])
    if not config.mtp_num_hidden_layers:
        return loss, None, None
    drafts = mtp_logits(params, untied, hidden, positions)
    mtp_loss = optax.softmax_cross_entropy_with_integer_labels(drafts, tokens[:, 2:])
    return loss, mtp_loss, jnp.argmax(drafts, axis=-1) == tokens[:, 2:]


def total_loss(weights: Weights, config: Config, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """What training lowers, and its parts."""
    loss, mtp_loss, _ = token_losses(weights, config, tokens)
    loss = jnp.mean(loss)
    if mtp_loss is None:
        return loss, {"loss": loss}
    mtp_loss = jnp.mean(mtp_loss)
    return loss + MTP_WEIGHT * mtp_loss, {"loss": loss, "mtp_loss": mtp_loss}


@functools.partial(jax.jit, static_argnames=("config", "weight_decay", "batch", "length", "seed"), donate_argnums=0)
def train_block(
    state: State,
    stream: jax.Array,
    rates: jax.Array,
    *,
    config: Config,
    weight_decay: float,
    batch: int,
    length: int,
    seed: int,
) -> tuple[State, dict[str, jax.Array]]:
    """One step per learning rate in `rates`, all in one call. Donates the state.

    The sequences of a step, cut from `stream` `[N]`, depend on the seed and the step's number only.

    Returns:
        The state, and the metrics of every step, `[n]` each.
    """
    optimizer = make_optimizer(weight_decay)

    def step(state: State, rate: jax.Array) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        starts = jax.random.randint(key, (batch, 1), 0, stream.size - length)
        tokens = stream[starts + jnp.arange(length + 1)].astype(jnp.int32)
        gradients, metrics = jax.grad(total_loss, has_aux=True)(state.weights, config, tokens)
        metrics["gradient_norm"] = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        updates, moments = optimizer.update(gradients, state.optimizer, state.weights)
        weights = jax.tree.map(lambda w, u: w - rate * u, state.weights, updates)
        return State(weights, moments, state.step + 1), metrics

    return jax.lax.scan(step, state, rates)


def stream_rows(stream: np.ndarray, batch: int, length: int) -> Rows:
    """A stream cut into sequences of `length` targets; every token but the first is a target once."""
    count = max(1, -(-(stream.size - 1) // length))
    pieces = [stream[i * length : (i + 1) * length + 1] for i in range(count)]
    return _rows(pieces, [0] * count, batch, length)


def problem_rows(problems: Sequence[Any], batch: int, length: int) -> Rows:
    """One problem a sequence (its start, if it is longer); the answer's tokens count, the question's don't."""
    pieces = [np.asarray(p.token_ids[: length + 1]) for p in problems]
    return _rows(pieces, [len(p.prompt_ids) - 1 for p in problems], batch, length)


def _rows(pieces: Sequence[np.ndarray], first: Sequence[int], batch: int, length: int) -> Rows:
    count = -(-len(pieces) // batch)
    tokens = np.zeros((count * batch, length + 1), np.int32)
    counted = np.zeros((count * batch, length), bool)
    for row, (piece, start) in enumerate(zip(pieces, first, strict=True)):
        tokens[row, : len(piece)] = piece
        counted[row, start : len(piece) - 1] = True
    return Rows(tokens.reshape(count, batch, -1), counted.reshape(count, batch, -1))


@functools.partial(jax.jit, static_argnums=1)
def _evaluate(weights: Weights, config: Config, rows: Rows) -> dict[str, jax.Array]:
    def one(row: Rows) -> dict[str, jax.Array]:
        loss, mtp_loss, right = token_losses(weights, config, row.tokens)
        sums = {"loss": jnp.sum(loss * row.counted), "tokens": jnp.sum(row.counted)}
        if mtp_loss is not None:
            counted = row.counted[:, 1:]
            sums |= {"mtp_loss": jnp.sum(mtp_loss * counted), "mtp_accuracy": jnp.sum(right * counted)}
            sums["mtp_tokens"] = jnp.sum(counted)
        return sums

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one, rows))


def evaluate(weights: Weights, config: Config, rows: Rows) -> dict[str, float]:
    """Mean loss, perplexity, and the draft head's loss and accuracy over the counted targets."""
    sums = {name: float(value) for name, value in jax.device_get(_evaluate(weights, config, rows)).items()}
    loss = sums["loss"] / max(1.0, sums["tokens"])
    result = {"loss": loss, "perplexity": math.exp(min(loss, 80.0)), "tokens": int(sums["tokens"])}
    for name in ("mtp_loss", "mtp_accuracy"):
        if name in sums:
            result[name] = sums[name] / max(1.0, sums["mtp_tokens"])
    return result


def generate(
    weights: Weights,
    config: Config,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    stop_ids: Sequence[int],
    *,
    temperature: float = 0.0,
    top_k: int = 40,
    seed: int = 0,
) -> list[list[int]]:
    """Continues the prompts together, each until a stop id (which is left out); temperature 0 is greedy.

    Every token costs a forward over the whole padded batch, for it takes nothing but `forward_hidden`.
    """
    width = -(-(max(map(len, prompts)) + new_tokens) // 64) * 64
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ends = lengths + new_tokens
    key = jax.random.key(seed)
    tokens, reached = _generate(
        model_params(weights, config), config, tokens, lengths, ends, tuple(stop_ids), temperature, top_k, key
    )
    tokens, reached = jax.device_get((tokens, reached))
    outputs = [row[start:end].tolist() for row, start, end in zip(tokens, lengths, reached, strict=True)]
    return [ids[:-1] if ids and ids[-1] in stop_ids else ids for ids in outputs]


@functools.partial(jax.jit, static_argnums=(1, 5, 6, 7))
def _generate(
    params: Params,
    config: Config,
    tokens: jax.Array,
    lengths: jax.Array,
    ends: jax.Array,
    stop_ids: tuple[int, ...],
    temperature: float,
    top_k: int,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    rows = jnp.arange(tokens.shape[0])

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(~carry[2])

    def step(carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]):
        tokens, lengths, done, key = carry
        hidden, _ = forward_hidden(params, config, tokens)
        logits = head(params, hidden[rows, lengths - 1])
        if temperature > 0:
            key, drawn = jax.random.split(key)
            best, ids = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
            chosen = ids[rows, jax.random.categorical(drawn, best / temperature)]
        else:
            chosen = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        tokens = tokens.at[rows, jnp.where(done, tokens.shape[1], lengths)].set(chosen, mode="drop")
        lengths = jnp.where(done, lengths, lengths + 1)
        stopped = jnp.any(chosen[:, None] == jnp.array(stop_ids, jnp.int32), axis=-1)
        return tokens, lengths, done | stopped | (lengths >= ends), key

    done = jnp.zeros(tokens.shape[:1], bool)
    tokens, lengths, _, _ = jax.lax.while_loop(unfinished, step, (tokens, lengths, done, key))
    return tokens, lengths

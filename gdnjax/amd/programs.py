"""The whole programs that are compiled: a decode step, a prefill, a verify step, a decode loop; from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config, from_preset
from gdnjax.generation.loop import Decoding, device_loop, jitted_step
from gdnjax.generation.sampling import SamplingParams, make_sampler
from gdnjax.model import prefill, verify_step
from gdnjax.state import Batch, State, VerifyBatch, commit_verified, state_shapes
from gdnjax.weights.declaration import Params, abstract_params
from gdnjax.weights.packing import pack

LOOP_STEPS = 16
DRAFTS = 3
LOOP = "decode_loop"


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the shapes it is compiled for.

    * `rows`: rows of its batch.
    * `state`: the state among its arguments.
    * `loop`: its work is one `while_loop`, of which one iteration is a step.
    """

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    rows: int
    state: State
    loop: bool = False


def serving_config(name: str, rows: int) -> Config:
    """The config of a preset as it is served on ROCm to `rows` requests, with the kernels in use."""
    return from_preset(name).for_platform("rocm").replace(max_requests=rows, kernels="pallas")


def _vector(size: int, dtype: Any = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct((size,), dtype)


def _params(config: Config) -> Any:
    return jax.eval_shape(lambda params: pack(params, config), abstract_params(config))


def _decoding(config: Config) -> Decoding:
    """Greedy decoding of `max_requests` rows."""
    rows = config.max_requests
    return Decoding(
        state=state_shapes(config),
        token=_vector(rows),
        live=_vector(rows, jnp.bool_),
        emitted=_vector(rows),
        limit=_vector(rows),
        stop_ids=jax.ShapeDtypeStruct((rows, max(1, len(config.generation.stop_ids))), jnp.int32),  # pyright: ignore[reportArgumentType]
        sampler=jax.eval_shape(lambda: make_sampler([SamplingParams()] * rows, rows)),
        in_prompt=None,
        counts=None,
    )


def _decode_step(config: Config) -> Program:
    # What the Python loop calls once a token: the model's step, commit, and the choice of the next token.
    decoding = _decoding(config)
    return Program(jitted_step, (_params(config), decoding), {}, config.max_requests, decoding.state)


def _prefill(config: Config) -> Program:
    rows = config.prefill_tokens
    batch = Batch(_vector(rows), _vector(rows), _vector(config.max_requests))
    function, state = jax.jit(prefill, donate_argnums=1), state_shapes(config)
    return Program(function, (_params(config), state, batch), {}, rows, state)


def _verify_and_commit(params: Params, state: State, batch: VerifyBatch, accepted: jax.Array) -> tuple[Any, State]:
    logits, hidden, state = verify_step(params, state, batch)
    # The commit comes last: merged with the step's reads of the same vectors, it could not run in place.
    (logits, hidden), pending = jax.lax.optimization_barrier(((logits, hidden), state.pending))
    return (logits, hidden), commit_verified(dataclasses.replace(state, pending=pending), accepted)


def _verify_step(config: Config) -> Program:
    # The model's step over the rows of three drafts, and commit: without drafting and without acceptance.
    config, requests = config.replace(speculate=DRAFTS), _vector(config.max_requests)
    tokens: Any = jax.ShapeDtypeStruct((config.max_requests, config.verify_rows), jnp.dtype(jnp.int32))
    function = jax.jit(_verify_and_commit, donate_argnums=1, keep_unused=True)
    state = state_shapes(config)
    arguments = (_params(config), state, VerifyBatch(tokens, requests, requests), requests)
    return Program(function, arguments, {}, tokens.size, state)


def _decode_loop(config: Config) -> Program:
    decoding = _decoding(config)
    arguments, static = (_params(config), decoding), {"steps": LOOP_STEPS}
    return Program(device_loop, arguments, static, config.max_requests, decoding.state, loop=True)


PROGRAMS: dict[str, Callable[[Config], Program]] = {
    "decode_step": _decode_step,
    "prefill": _prefill,
    "verify_step": _verify_step,
    LOOP: _decode_loop,
}


def state_sizes(state: State) -> frozenset[int]:
    """Element counts of a layer's pool, ring and KV cache."""
    return frozenset(array.size for array in (*state.recurrent, *state.conv, *state.keys, *state.values))

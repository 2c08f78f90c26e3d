"""The whole programs that are compiled: a decode step, a prefill, a decode loop; from shapes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config, from_preset
from gdnjax.generation.loop import Decoding, device_loop, jitted_step
from gdnjax.generation.sampling import SamplingParams, make_sampler
from gdnjax.model import prefill
from gdnjax.state import Batch, state_shapes
from gdnjax.weights.declaration import abstract_params
from gdnjax.weights.packing import pack

LOOP_STEPS = 16
LOOP = "decode_loop"


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function with the shapes it is compiled for.

    * `rows`: rows of its batch.
    * `loop`: its work is one `while_loop`, of which one iteration is a step.
    """

    function: Any
    arguments: tuple[Any, ...]
    static: dict[str, Any]
    rows: int
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
    return Program(jitted_step, (_params(config), _decoding(config)), {}, config.max_requests)


def _prefill(config: Config) -> Program:
    rows = config.prefill_tokens
    batch = Batch(_vector(rows), _vector(rows), _vector(config.max_requests))
    function = jax.jit(prefill, donate_argnums=1)
    return Program(function, (_params(config), state_shapes(config), batch), {}, rows)


def _decode_loop(config: Config) -> Program:
    arguments = (_params(config), _decoding(config))
    return Program(device_loop, arguments, {"steps": LOOP_STEPS}, config.max_requests, loop=True)


PROGRAMS: dict[str, Callable[[Config], Program]] = {
    "decode_step": _decode_step,
    "prefill": _prefill,
    LOOP: _decode_loop,
}


def state_sizes(config: Config) -> frozenset[int]:
    """Element counts of a layer's pool, ring and KV cache."""
    shapes = state_shapes(config)
    arrays = (*shapes.recurrent, *shapes.conv, *shapes.keys, *shapes.values)
    return frozenset(array.size for array in arrays)

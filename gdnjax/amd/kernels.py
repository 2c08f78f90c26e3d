"""Every kernel of `pallas_kernels` with the real shapes that it is compiled for: one table, `KERNELS`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.amd.rules import Side
from pallas_kernels import attention_prologue as prologue
from pallas_kernels import causal_conv as conv
from pallas_kernels import gated_delta_decode as delta_decode
from pallas_kernels import gated_delta_prefill as delta_prefill
from pallas_kernels import gated_delta_verify as delta_verify
from pallas_kernels import gated_rms_norm as norm
from pallas_kernels import paged_attention as attention
from pallas_kernels.attention_prologue import shapes as prologue_shapes
from pallas_kernels.causal_conv import shapes as conv_shapes
from pallas_kernels.columns import Columns
from pallas_kernels.gated_delta_decode import shapes as decode_shapes
from pallas_kernels.gated_delta_prefill import shapes as prefill_shapes
from pallas_kernels.gated_delta_verify import shapes as verify_shapes
from pallas_kernels.gated_rms_norm import shapes as norm_shapes
from pallas_kernels.paged_attention import shapes as attention_shapes

EPS = 1e-6
PAGE_SIZE = 64
PREFILL_ROWS = 1024
"""Rows of a prefill, whatever the number of decode rows: the default `prefill_tokens`."""
PREFILL_LENGTHS = [PREFILL_ROWS // 4] * 4
QUICK_SHAPES = ("0.8B", "9B", "27B")
"""One shape for each number of value heads a key head that a supported model has: 1, 2 and 3."""
CANDIDATE_ROWS = 4
"""Rows that are verified for each request: the one emitted last and three drafts."""
STATES = ((jnp.float32, ""), (jnp.bfloat16, ", bf16 state"))
"""Dtypes of the recurrent pool, and what they add to a shape's name."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A function that launches kernels, and the shapes of its arguments."""

    shape: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation whose kernels are compiled.

    * `side`: what its rule is, see `gdnjax.amd.rules`.
    * `cases`: from the number of decode rows.
    """

    side: Side
    cases: Callable[[int], Iterator[Case]]


def shapes_of(function: Callable[[jax.Array], Any]) -> Any:
    """The shapes of the arguments that `function` would make from a random key."""
    return jax.eval_shape(function, jax.eval_shape(lambda: jax.random.key(0)))


def _gated_delta_decode(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        return delta_decode.gated_delta_decode(*arguments, implementation="pallas")

    for dtype, note in STATES:
        for shape in decode_shapes.SHAPES:
            arguments = shapes_of(
                lambda key, s=shape, t=dtype: decode_shapes.arguments(s, rows, key, pool_dtype=t, twin=True)
            )
            yield Case(shape.name + note, run, arguments)


def _gated_delta_verify(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        return delta_verify.gated_delta_verify(*arguments, implementation="pallas")

    for dtype, note in STATES:
        for shape in verify_shapes.SHAPES:
            arguments = shapes_of(
                lambda key, s=shape, t=dtype: verify_shapes.arguments(
                    s, rows, CANDIDATE_ROWS, key, pool_dtype=t, twin=True
                )
            )
            yield Case(shape.name + note, run, arguments)


def _gated_delta_replay(rows: int) -> Iterator[Case]:
    def run(a_log: jax.Array, dt_bias: jax.Array, *arguments: Any) -> Any:
        return delta_verify.gated_delta_replay(a_log, dt_bias, *arguments, implementation="pallas")

    for dtype, note in STATES:
        for shape in verify_shapes.SHAPES:
            arguments = shapes_of(
                lambda key, s=shape, t=dtype: verify_shapes.arguments(s, rows, CANDIDATE_ROWS, key, pool_dtype=t)
            )
            yield Case(shape.name + note, run, arguments[3:-1])


def _causal_conv_decode(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        return conv.causal_conv_decode(*arguments, implementation="pallas")

    for shape in conv_shapes.SHAPES:
        yield Case(shape.name, run, shapes_of(lambda key, s=shape: conv_shapes.arguments(s, rows, key)))


def _causal_conv_packed(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        return conv.causal_conv_packed(*arguments, implementation="pallas")

    for shape in conv_shapes.SHAPES:
        arguments = shapes_of(lambda key, s=shape: conv_shapes.packed_arguments(s, PREFILL_LENGTHS, key))
        yield Case(shape.name, run, arguments)


def _gated_rms_norm(rows: int) -> Iterator[Case]:
    def run(x: jax.Array, gate: Columns, weight: jax.Array) -> Any:
        return norm.gated_rms_norm(x, gate, weight, EPS, implementation="pallas")

    for shape in norm_shapes.SHAPES:
        yield Case(shape.name, run, shapes_of(lambda key, s=shape: norm_shapes.arguments(s, rows, key)))


def _attention_prologue(rows: int) -> Iterator[Case]:
    def run(projections: jax.Array, *arguments: jax.Array) -> Any:
        return prologue.attention_prologue([projections], *arguments, eps=EPS, implementation="pallas")

    for shape in prologue_shapes.SHAPES:
        yield Case(shape.name, run, shapes_of(lambda key, s=shape: prologue_shapes.arguments(s, rows, key)))


def _paged_attention(rows: int, sharing: int = 1) -> Iterator[Case]:
    def run(q: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, length: jax.Array, gate: jax.Array):
        return attention.paged_attention_decode(
            q, keys, values, pages, length, PAGE_SIZE, gate, implementation="pallas"
        )

    for shape in attention_shapes.SHAPES:
        arguments = shapes_of(
            lambda key, s=shape: attention_shapes.arguments(s, rows, key, page_size=PAGE_SIZE, sharing=sharing)
        )
        yield Case(shape.name, run, arguments)


def _paged_attention_packed(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        q, keys, values, table, segments, gate = arguments
        return attention.paged_attention_packed(
            q, keys, values, table, segments, PAGE_SIZE, gate, implementation="pallas"
        )

    for shape in attention_shapes.SHAPES:
        arguments = shapes_of(
            lambda key, s=shape: attention_shapes.packed_arguments(s, PREFILL_LENGTHS, key, page_size=PAGE_SIZE)
        )
        yield Case(shape.name, run, arguments)


def _gated_delta_prefill(rows: int) -> Iterator[Case]:
    def run(*arguments: Any) -> Any:
        return delta_prefill.gated_delta_prefill(*arguments, implementation="pallas")

    for dtype, note in STATES:
        for shape in prefill_shapes.SHAPES:
            arguments = shapes_of(
                lambda key, s=shape, t=dtype: prefill_shapes.packed_arguments(s, PREFILL_LENGTHS, key, pool_dtype=t)
            )
            yield Case(shape.name + note, run, arguments)


KERNELS: dict[str, Kernel] = {
    "gated_delta_decode": Kernel("decode", _gated_delta_decode),
    "gated_delta_verify": Kernel("decode", _gated_delta_verify),
    "gated_delta_replay": Kernel("decode", _gated_delta_replay),
    "causal_conv_decode": Kernel("decode", _causal_conv_decode),
    "gated_rms_norm": Kernel("decode", _gated_rms_norm),
    "attention_prologue": Kernel("decode", _attention_prologue),
    "paged_attention": Kernel("decode", _paged_attention),
    "paged_attention_verify": Kernel("decode", functools.partial(_paged_attention, sharing=CANDIDATE_ROWS)),
    "paged_attention_packed": Kernel("prefill", _paged_attention_packed),
    "causal_conv_packed": Kernel("prefill", _causal_conv_packed),
    "gated_delta_prefill": Kernel("prefill", _gated_delta_prefill),
}

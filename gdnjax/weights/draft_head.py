"""The fp8 copy of the vocabulary matrix, from which drafts may be chosen (`draft_head: fp8`).

A draft reads the whole matrix, which is most of its bytes; the copy has half of them. Nothing but drafts ever reads
it. It is made of the weights once, where they are loaded, and is no part of a checkpoint.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.weights.declaration import Params, abstract_params, vocabulary_matrix

DRAFT_HEAD = "draft_head"
"""The copy's place in params: `weight` `[V, H]` and `scale` `[V]`."""

FP8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FP8).max)
LEAST_EXPONENT = -100
"""Of a scale, which must be a normal float32 number whatever a row holds."""


def with_draft_head(params: Params, config: Config) -> Params:
    """Params with the copy that the config asks for, or as they are; packed ones too. Other leaves are shared."""
    if config.draft_head == "weights":
        return params
    return {**params, DRAFT_HEAD: fp8_rows(vocabulary_matrix(params))}


@jax.jit
def fp8_rows(matrix: jax.Array) -> dict[str, jax.Array]:
    """A matrix `[V, H]` as fp8 rows with one scale each.

    Scales are powers of two: fp8 is a floating-point format, whose steps are no finer for a scale in between, and so
    the one rounding is that to fp8. A row's largest element lies in the upper half of what fp8 holds.

    Returns:
        `weight` `[V, H]` float8_e4m3fn and `scale` `[V]` float32: weight * scale[:, None] is the matrix within 2^-4 of
        each element, or 2^-10 of a scale, whichever is larger.
    """
    rows = matrix.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(rows), axis=1) / LARGEST)
    scale = jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent, LEAST_EXPONENT))
    return {"weight": (rows / scale[:, None]).astype(FP8), "scale": scale}


def abstract_draft_head(config: Config) -> Any:
    """What `with_draft_head` adds, as a pytree of `jax.ShapeDtypeStruct`; empty where it adds nothing."""
    if config.draft_head == "weights":
        return {}
    return jax.eval_shape(fp8_rows, vocabulary_matrix(abstract_params(config)))

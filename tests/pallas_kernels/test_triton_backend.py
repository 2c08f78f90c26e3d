"""Arrays that 32-bit index arithmetic cannot hold are refused, by their shapes alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gated_delta_decode import gated_delta_decode, shapes
from pallas_kernels.paged_attention import paged_attention_decode
from pallas_kernels.paged_attention import shapes as attention_shapes

LARGEST = {"0.8B": 8191, "27B": 2730}
"""Slots of one layer's pool that stay under 2^31 elements."""


@pytest.mark.parametrize("name", LARGEST)
def test_a_pool_beyond_32_bits(name: str) -> None:
    (shape,) = (s for s in shapes.SHAPES if s.name == name)

    def decode(slots: int) -> None:
        def call(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            arguments = shapes.arguments(shape, 1, key, spare=slots - 2)
            return gated_delta_decode(*arguments, implementation="interpret")

        jax.eval_shape(call, jax.random.key(0))

    decode(LARGEST[name])
    with pytest.raises(ValueError, match=r"elements; kernels index with 32 bits .*: use fewer slots"):
        decode(LARGEST[name] + 1)


def test_a_cache_beyond_32_bits() -> None:
    shape, page = attention_shapes.Shape("", 4, 2, dim=64), 64

    def attend(pages: int) -> None:
        q, _, _, table, length, gate = attention_shapes.arguments(shape, 1, jax.random.key(0), page, page)
        cache = jax.ShapeDtypeStruct((pages * page, shape.groups, shape.dim), jnp.bfloat16)
        jax.eval_shape(
            lambda keys, values: paged_attention_decode(
                q, keys, values, table, length, page, gate, implementation="interpret"
            ),
            cache,
            cache,
        )

    most = 2**31 // (page * shape.groups * shape.dim)
    attend(most - 1)
    with pytest.raises(ValueError, match="elements; kernels index with 32 bits"):
        attend(most)

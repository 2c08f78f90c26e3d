"""What a row of the convolution's output holds. Every form of the delta rule reads such rows as they are."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.columns import Columns

Index = TypeVar("Index", int, jax.Array)


@dataclasses.dataclass(frozen=True)
class QkvLayout:
    """All q, all k, all v, head by head: Hk heads of dk, Hk heads of dk, Hv heads of dv.

    `q`, `k` and `v` are the first columns of what value head `head` reads; Hv / Hk value heads share a key head.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def q(self, head: Index) -> Index:
        return head // (self.value_heads // self.key_heads) * self.key_dim

    def k(self, head: Index) -> Index:
        return self.key_heads * self.key_dim + self.q(head)

    def v(self, head: Index) -> Index:
        return 2 * self.key_heads * self.key_dim + head * self.value_dim

    def split(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[..., C]` -> q, k `[..., Hk, dk]` and v `[..., Hv, dv]`."""
        keys = self.key_heads * self.key_dim
        parts = qkv[..., :keys], qkv[..., keys : 2 * keys], qkv[..., 2 * keys :]
        sizes = (self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)
        q, k, v = (part.reshape(*qkv.shape[:-1], *size) for part, size in zip(parts, sizes, strict=True))
        return q, k, v


def qkv_layout(qkv: jax.Array, pool: jax.Array) -> QkvLayout:
    """What rows `[R, C]` hold, with the sizes of a pool `[slots, Hv, dv, dk]`; Hk follows from the width.

    Raises:
        ValueError: no such rows.
    """
    if pool.ndim != 4 or pool.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"pool is {pool.dtype}{list(pool.shape)}; it takes float32 or bfloat16 [slots, Hv, dv, dk]")
    heads, dv, dk = pool.shape[1:]
    key_heads = (qkv.shape[-1] - heads * dv) // (2 * dk) if qkv.ndim == 2 else 0
    layout = QkvLayout(key_heads, heads, dk, dv)
    if key_heads < 1 or heads % key_heads or layout.width != qkv.shape[1]:
        raise ValueError(
            f"qkv has shape {qkv.shape}; with a pool of Hv = {heads}, dv = {dv} and dk = {dk} it takes "
            f"[R, 2 Hk {dk} + {heads * dv}], Hv a multiple of Hk"
        )
    return layout


def check_rule(
    qkv: jax.Array, a: Columns, b: Columns, a_log: jax.Array, dt_bias: jax.Array, pool: jax.Array
) -> QkvLayout:
    """What a row holds, once the inputs that all forms of the rule share fit together.

    Raises:
        ValueError: they do not.
    """
    layout = qkv_layout(qkv, pool)
    heads = (qkv.shape[0], layout.value_heads)
    check("a", a, heads, a.dtype)
    check("b", b, heads, a.dtype)
    check("a_log", a_log, heads[1:], jnp.float32)
    check("dt_bias", dt_bias, heads[1:], jnp.float32)
    return layout


def check(name: str, array: jax.Array | Columns, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> None:
    """Raises ValueError unless an argument has this shape and dtype."""
    if array.shape != shape or array.dtype != dtype:
        raise ValueError(f"{name} is {array.dtype}{list(array.shape)}; it takes {jnp.dtype(dtype)}{list(shape)}")

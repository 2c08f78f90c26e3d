"""The token-wise parts of a layer: everything but the mixing over time. Leading axes are free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.weights.declaration import Params, vocabulary_matrix
from pallas_kernels.columns import Columns, split, value
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode.qkv import QkvLayout
from pallas_kernels.gated_rms_norm import gated_rms_norm
from pallas_kernels.gated_rms_norm.reference import rms_norm

Mixer = Callable[[Any, jax.Array, int], jax.Array]
"""(the mixer's weights, x `[..., H]`, index among the layers of its kind) -> `[..., H]`."""


def linear(x: jax.Array, weight: jax.Array, out_dtype: Any = None) -> jax.Array:
    """x W^T for W `[outputs, inputs]`. float32 means float32: no TF32 in its products."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...e,fe->...f", x, weight, precision=precision, preferred_element_type=out_dtype or x.dtype)


def project(p: Any, x: jax.Array, packed: str, parts: dict[str, int]) -> Sequence[jax.Array | Columns]:
    """The projections `parts` (name -> output rows) of x: columns of one packed product, or an array each."""
    if packed not in p:
        return [linear(x, p[name]["weight"]) for name in parts]
    return split(linear(x, p[packed]["weight"]), parts.values())


def mlp(p: Any, x: jax.Array, c: Config) -> jax.Array:
    """down(silu(gate x) * up x)."""
    parts = {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size}
    gate, up = map(value, project(p, x, "gate_up_proj", parts))
    return linear(
        (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(x.dtype), p["down_proj"]["weight"]
    )


def gdn_project(p: Any, x: jax.Array, c: Config) -> Sequence[jax.Array | Columns]:
    """x `[..., H]` -> the convolution's input `[..., C]`, z `[..., Hv * dv]`, b and a `[..., Hv]`."""
    heads = c.linear_num_value_heads
    parts = {"in_proj_qkv": c.conv_channels, "in_proj_z": c.value_channels, "in_proj_b": heads, "in_proj_a": heads}
    return project(p, x, "in_proj", parts)


def gdn_heads(qkv: jax.Array, c: Config) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The convolution's output `[..., C]` -> q, k `[..., Hk, dk]`, v `[..., Hv, dv]`."""
    sizes = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
    return QkvLayout(*sizes).split(qkv)


def gdn_output(
    p: Any, out: jax.Array, z: jax.Array | Columns, c: Config, implementation: Implementation | None
) -> jax.Array:
    """The rule's output `[..., Hv, dv]` (activation dtype) through the gated norm and out_proj."""
    gated = gated_rms_norm(out, z, p["norm"]["weight"], c.rms_norm_eps, implementation)
    return linear(gated.reshape(*z.shape[:-1], -1), p["out_proj"]["weight"])


def attention_project(p: Any, x: jax.Array) -> list[jax.Array]:
    """x `[..., H]` -> what `attention_prologue` takes: one packed product, or q with gate, k, v."""
    names = ("qkv_proj",) if "qkv_proj" in p else ("q_proj", "k_proj", "v_proj")
    return [linear(x, p[name]["weight"]) for name in names]


def attention_output(p: Any, gated: jax.Array) -> jax.Array:
    """Attention's gated output `[..., A, D]` through o_proj."""
    return linear(gated.reshape(*gated.shape[:-2], -1), p["o_proj"]["weight"])


def decoder_layer(p: Any, x: jax.Array, c: Config, mix: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """x + mixer(norm x), then + MLP(norm x)."""
    x = x + mix(rms_norm(x, p["input_layernorm"]["weight"], c.rms_norm_eps))
    with jax.named_scope("mlp"):
        return x + mlp(p["mlp"], rms_norm(x, p["post_attention_layernorm"]["weight"], c.rms_norm_eps), c)


def embed(params: Params, tokens: jax.Array) -> jax.Array:
    """Token ids `[...]` -> `[..., H]`."""
    return params["model"]["embed_tokens"]["weight"][tokens]


def run_layers(
    params: Params, c: Config, x: jax.Array, mix_gdn: Mixer, mix_attention: Mixer
) -> tuple[jax.Array, list[jax.Array]]:
    """All decoder layers and the final norm.

    Returns:
        The final hidden `[..., H]`, and the hidden states as Hugging Face lists them: the embeddings,
        the output of every layer but the last, and the final hidden.
    """
    hidden = [x]
    gdn = attention = 0
    for index, layer_type in enumerate(c.layer_types):
        p = params["model"]["layers"][index]
        with jax.named_scope(f"layer_{index}"):
            if layer_type == "linear_attention":
                number = gdn
                x = decoder_layer(p, x, c, lambda y, p=p, number=number: mix_gdn(p["linear_attn"], y, number))
                gdn += 1
            else:
                number = attention
                x = decoder_layer(p, x, c, lambda y, p=p, number=number: mix_attention(p["self_attn"], y, number))
                attention += 1
        hidden.append(x)
    hidden[-1] = rms_norm(x, params["model"]["norm"]["weight"], c.rms_norm_eps)
    return hidden[-1], hidden


def head(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits `[..., V]` float32 of the final hidden `[..., H]`."""
    with jax.named_scope("head"):
        return linear(hidden, vocabulary_matrix(params), jnp.float32)

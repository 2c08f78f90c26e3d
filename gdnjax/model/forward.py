"""The full forward over whole sequences, without state: for training, scoring and research."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from gdnjax.config import Config
from gdnjax.model.layers import (
    attention_output,
    attention_project,
    embed,
    gdn_heads,
    gdn_output,
    gdn_project,
    head,
    run_layers,
)
from gdnjax.weights.declaration import Params
from pallas_kernels.attention_prologue.reference import norm_and_rope, rope_table, split_heads
from pallas_kernels.causal_conv.reference import causal_conv_sequence
from pallas_kernels.columns import value
from pallas_kernels.gated_delta_decode.reference import gates
from pallas_kernels.gated_delta_prefill.reference import gated_delta_sequence
from pallas_kernels.paged_attention.reference import apply_gate, causal_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Intermediates:
    """What the forward saw on its way.

    * `hidden_states`: layers + 1 arrays `[b, t, H]`: embeddings, every layer's output, and in the last
      place the final hidden (after the final norm), as Hugging Face lists them.
    * `log_decay`, `beta`: per GDN layer `[b, t, Hv]` float32.
    * `recurrent`: per GDN layer the state after the last token, `[b, Hv, dv, dk]` float32.
    * `keys`, `values`: per attention layer `[b, t, G, D]`, keys after norm and rope.
    """

    hidden_states: tuple[jax.Array, ...]
    log_decay: tuple[jax.Array, ...]
    beta: tuple[jax.Array, ...]
    recurrent: tuple[jax.Array, ...]
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


def forward(params: Params, config: Config, tokens: jax.Array) -> jax.Array:
    """Logits `[b, t, V]` float32 of token ids `[b, t]`; differentiable in params."""
    return head(params, forward_hidden(params, config, tokens)[0])


def forward_with_intermediates(params: Params, config: Config, tokens: jax.Array) -> tuple[jax.Array, Intermediates]:
    """`forward`, and everything in `Intermediates`."""
    hidden, intermediates = forward_hidden(params, config, tokens)
    return head(params, hidden), intermediates


def forward_hidden(params: Params, config: Config, tokens: jax.Array) -> tuple[jax.Array, Intermediates]:
    """The final hidden `[b, t, H]` (what the MTP head reads) and the intermediates.

    Under `jit`, intermediates that the caller drops are never computed.
    """
    c = config
    length = tokens.shape[1]
    cos, sin = rope_table(jnp.arange(length, dtype=jnp.int32), c.rope_theta, c.rotary_dim)
    log_decays, betas, states, all_keys, all_values = [], [], [], [], []

    def mix_gdn(p: Any, x: jax.Array, _: int) -> jax.Array:
        with jax.named_scope("gdn"):
            qkv, z, b, a = map(value, gdn_project(p, x, c))
            q, k, v = gdn_heads(causal_conv_sequence(qkv, p["conv1d"]["weight"]), c)
            g, beta = gates(a, b, p["A_log"], p["dt_bias"])
            out, state = gated_delta_sequence(q, k, v, g, beta)
            log_decays.append(g)
            betas.append(beta)
            states.append(state)
            return gdn_output(p, out.astype(x.dtype), z, c, "reference")

    def mix_attention(p: Any, x: jax.Array, _: int) -> jax.Array:
        out, k, v = sequence_attention(p, x, c, cos, sin)
        all_keys.append(k)
        all_values.append(v)
        return out

    hidden, hidden_states = run_layers(params, c, embed(params, tokens), mix_gdn, mix_attention)
    captured = (hidden_states, log_decays, betas, states, all_keys, all_values)
    return hidden, Intermediates(*map(tuple, captured))


def sequence_attention(
    p: Any, x: jax.Array, c: Config, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The attention mixer over whole sequences.

    Args:
        p: the mixer's weights.
        x: `[b, t, H]`, normed.
        c: the config.
        cos, sin: `[t, rotary_dim / 2]` float32.

    Returns:
        Its output `[b, t, H]`, keys after norm and rope `[b, t, G, D]`, values `[b, t, G, D]`.
    """
    with jax.named_scope("attention"):
        batch, length = x.shape[:2]
        rows = [y.reshape(batch * length, -1) for y in attention_project(p, x)]
        heads = split_heads(rows, c.num_key_value_heads, c.head_dim)
        q, gate, k, v = (y.reshape(batch, length, *y.shape[1:]) for y in heads)
        q, k = norm_and_rope(q, k, p["q_norm"]["weight"], p["k_norm"]["weight"], cos, sin, c.rms_norm_eps)
        return attention_output(p, apply_gate(causal_attention(q, k, v), gate)), k, v

"""The one declaration of every weight: shape, dtype, logical axes and initializer.

The modules compute nothing and hold no arrays, only `jax.ShapeDtypeStruct`s. `nnx.split` of the tree
gives the pytree that everything else works on; its paths, joined by dots, are Hugging Face's names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gdnjax import axes as ax
from gdnjax.config import Config

Params = Any
"""A pytree of arrays with the structure of `abstract_params`."""

FORMAT_VERSION = 1
"""Version of the layout of `params` and of checkpoints: one array per Hugging Face tensor."""

Initializer = Callable[[jax.Array, tuple[int, ...]], jax.Array]


# Kept, so that arrays of one initializer, shape and dtype are drawn by one compiled program.
@functools.cache
def _normal(scale: float) -> Initializer:
    return lambda key, shape: scale * jax.random.normal(key, shape, jnp.float32)


@functools.cache
def _constant(value: float) -> Initializer:
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


def _a_log(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # log of a decay rate drawn from (0, 16), as Gated DeltaNet and its relatives start.
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1e-3, 16.0))


def _dt_bias(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    # softplus^-1 of a step size, log-uniform in [0.001, 0.1]: most heads start with a long memory.
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, np.log(1e-3), np.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


def _weight(shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, init: Initializer) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes, init=init)


class Weight(nnx.Module):
    """One tensor whose name ends in `.weight`."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any, init: Initializer):
        self.weight = _weight(shape, axes, dtype, init)


class Mlp(nnx.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, c: Config, dtype: Any):
        inner, normal = c.intermediate_size, _normal(c.initializer_range)
        self.gate_proj = Weight((inner, c.hidden_size), (ax.MLP, ax.HIDDEN), dtype, normal)
        self.up_proj = Weight((inner, c.hidden_size), (ax.MLP, ax.HIDDEN), dtype, normal)
        self.down_proj = Weight((c.hidden_size, inner), (ax.HIDDEN, ax.MLP), dtype, normal)


class GatedDeltaNet(nnx.Module):
    """A GDN mixer. `A_log`, `dt_bias` and the gated norm stay float32 whatever the load dtype:
    rounding them moves logits visibly."""

    def __init__(self, c: Config, dtype: Any):
        h, heads, normal = c.hidden_size, c.linear_num_value_heads, _normal(c.initializer_range)
        self.in_proj_qkv = Weight((c.conv_channels, h), (ax.GDN_QKV, ax.HIDDEN), dtype, normal)
        self.in_proj_z = Weight((c.value_channels, h), (ax.GDN_VALUE, ax.HIDDEN), dtype, normal)
        self.in_proj_b = Weight((heads, h), (ax.GDN_HEADS, ax.HIDDEN), dtype, normal)
        self.in_proj_a = Weight((heads, h), (ax.GDN_HEADS, ax.HIDDEN), dtype, normal)
        taps = c.linear_conv_kernel_dim
        self.conv1d = Weight(
            (c.conv_channels, 1, taps), (ax.GDN_QKV, ax.CONV_TAP, ax.CONV_TAP), dtype, _normal(taps**-0.5)
        )
        self.A_log = _weight((heads,), (ax.GDN_HEADS,), jnp.float32, _a_log)
        self.dt_bias = _weight((heads,), (ax.GDN_HEADS,), jnp.float32, _dt_bias)
        self.norm = Weight((c.linear_value_head_dim,), (ax.GDN_VALUE_DIM,), jnp.float32, _constant(1.0))
        self.out_proj = Weight((h, c.value_channels), (ax.HIDDEN, ax.GDN_VALUE), dtype, normal)


class Attention(nnx.Module):
    """A gated full-attention mixer; rows of `q_proj` alternate per head: D of q, then D of the gate."""

    def __init__(self, c: Config, dtype: Any):
        h, d, normal = c.hidden_size, c.head_dim, _normal(c.initializer_range)
        queries, keys = c.num_attention_heads * d, c.num_key_value_heads * d
        self.q_proj = Weight((2 * queries, h), (ax.QUERY_GATE, ax.HIDDEN), dtype, normal)
        self.k_proj = Weight((keys, h), (ax.KEY_VALUE, ax.HIDDEN), dtype, normal)
        self.v_proj = Weight((keys, h), (ax.KEY_VALUE, ax.HIDDEN), dtype, normal)
        self.o_proj = Weight((h, queries), (ax.HIDDEN, ax.QUERY), dtype, normal)
        self.q_norm = Weight((d,), (ax.HEAD_DIM,), dtype, _constant(0.0))
        self.k_norm = Weight((d,), (ax.HEAD_DIM,), dtype, _constant(0.0))


def _hidden_norm(c: Config, dtype: Any) -> Weight:
    return Weight((c.hidden_size,), (ax.HIDDEN,), dtype, _constant(0.0))


class Layer(nnx.Module):
    """A decoder layer: a mixer and an MLP, each behind a zero-centred norm."""

    def __init__(self, c: Config, dtype: Any, layer_type: str):
        self.input_layernorm = _hidden_norm(c, dtype)
        if layer_type == "linear_attention":
            self.linear_attn = GatedDeltaNet(c, dtype)
        else:
            self.self_attn = Attention(c, dtype)
        self.post_attention_layernorm = _hidden_norm(c, dtype)
        self.mlp = Mlp(c, dtype)


class TextModel(nnx.Module):
    """Embedding, decoder layers, final norm."""

    def __init__(self, c: Config, dtype: Any):
        shape, names = (c.vocab_size, c.hidden_size), (ax.VOCAB, ax.HIDDEN)
        self.embed_tokens = Weight(shape, names, dtype, _normal(c.initializer_range))
        self.layers = nnx.List([Layer(c, dtype, layer_type) for layer_type in c.layer_types])
        self.norm = _hidden_norm(c, dtype)


class Mtp(nnx.Module):
    """The draft head: one full-attention layer over [embedding of the next token, final hidden]."""

    def __init__(self, c: Config, dtype: Any):
        self.pre_fc_norm_embedding = _hidden_norm(c, dtype)
        self.pre_fc_norm_hidden = _hidden_norm(c, dtype)
        names = (ax.HIDDEN, ax.MTP_PAIR)
        self.fc = Weight((c.hidden_size, 2 * c.hidden_size), names, dtype, _normal(c.initializer_range))
        self.layers = nnx.List([Layer(c, dtype, "full_attention")])
        self.norm = _hidden_norm(c, dtype)


class Qwen35(nnx.Module):
    """The root: a tied model has no `lm_head`, a model without draft head no `mtp`."""

    def __init__(self, c: Config):
        dtype = jnp.dtype(c.dtype)
        self.model = TextModel(c, dtype)
        if not c.tie_word_embeddings:
            shape, names = (c.vocab_size, c.hidden_size), (ax.VOCAB, ax.HIDDEN)
            self.lm_head = Weight(shape, names, dtype, _normal(c.initializer_range))
        if c.mtp_num_hidden_layers:
            self.mtp = Mtp(c, dtype)


def declare(config: Config) -> nnx.State:
    """The declaration as `nnx.split` gives it: a state whose leaves are `nnx.Param` variables."""
    return nnx.split(Qwen35(config))[1]


def _map(function: Callable[[nnx.Param], Any], declaration: nnx.State) -> nnx.State:
    return jax.tree.map(function, declaration, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def abstract_params(config: Config) -> Params:
    """The params pytree with a `jax.ShapeDtypeStruct` for every array."""
    return _map(lambda variable: variable.get_value(), declare(config))


def logical_axes(config: Config) -> Params:
    """The params pytree with a tuple of logical axis names (`gdnjax.axes`) for every array."""
    return _map(lambda variable: variable.get_metadata("axes"), declare(config))


def init_params(config: Config, key: jax.Array) -> Params:
    """Random weights, each drawn from its declared initializer under a key of its own name."""
    declaration = declare(config)
    names = tensor_names(abstract_params(config))
    order = {name: i for i, name in enumerate(sorted(names))}

    def draw(path: Any, variable: nnx.Param) -> jax.Array:
        shape = variable.get_value()
        return _draw(key, order[tensor_name(path)], variable.get_metadata("init"), shape.shape, shape.dtype)

    return jax.tree_util.tree_map_with_path(draw, declaration, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


@functools.partial(jax.jit, static_argnames=("initializer", "shape", "dtype"))
def _draw(key: jax.Array, number: int, initializer: Initializer, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return initializer(jax.random.fold_in(key, number), shape).astype(dtype)


def vocabulary_matrix(params: Params) -> jax.Array:
    """The head's matrix `[V, H]`; a tied model's head is its embedding."""
    table = params["lm_head"] if "lm_head" in params else params["model"]["embed_tokens"]
    return table["weight"]


def tensor_name(path: tuple[Any, ...]) -> str:
    """The Hugging Face name (flat `model.` prefix) of a leaf's pytree path."""
    return ".".join(str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path)


def tensor_names(params: Params) -> dict[str, Any]:
    """Leaves by Hugging Face name, in the order of the pytree."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return {tensor_name(path): leaf for path, leaf in flat}


def from_tensor_names(config: Config, tensors: dict[str, Any]) -> Params:
    """The params pytree whose leaves are `tensors`, by Hugging Face name. Every name must be there."""
    return jax.tree_util.tree_map_with_path(lambda path, _: tensors[tensor_name(path)], abstract_params(config))

"""The compiled programs: no copies of the state, memory that does not grow with requests, no retracing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gdnjax.config import Config
from gdnjax.model import decode_step, draft, fill_draft_kv, forward, forward_with_intermediates, prefill, verify_step
from gdnjax.model.forward import sequence_attention
from gdnjax.model.layers import embed, gdn_heads, gdn_output, gdn_project, head, run_layers
from gdnjax.state import Batch, State, VerifyBatch, commit, init_state, prefill_batch, state_shapes
from gdnjax.weights.declaration import abstract_params
from gdnjax.weights.packing import pack
from pallas_kernels.attention_prologue.reference import rope_table
from pallas_kernels.causal_conv.reference import causal_conv_sequence
from pallas_kernels.columns import value
from pallas_kernels.gated_delta_decode.reference import gates
from pallas_kernels.gated_delta_prefill.reference import gated_delta_sequence
from tests.helpers import LAYOUTS, decode_batch

DECODE_ROWS, PREFILL_ROWS = 4, 16
COPY = re.compile(r"= \(?\w+\[([\d,]*)\]\S* copy(?:-start)?\(")


def config_of(layout: str, requests: int = 512, **changes: Any) -> Config:
    """Small, but with every state array far larger than what a step of a few rows needs besides."""
    values = dict(
        vocab_size=48, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=24,
        layer_types=("linear_attention", "linear_attention", "full_attention"),
        dtype="float32", max_length=64, page_size=16, max_requests=requests, state_layout=layout,
    )  # fmt: skip
    return Config(**(values | changes))


def batch_shapes(rows: int, requests: int | None = None) -> Batch:
    vector = jax.ShapeDtypeStruct((rows,), jnp.int32)
    return Batch(vector, vector, None if requests is None else jax.ShapeDtypeStruct((requests,), jnp.int32))


def decode_loop(params: Any, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """Eight greedy tokens in one program."""

    def body(carry: tuple) -> tuple:
        number, tokens, state = carry
        logits, state = decode_step(params, state, Batch(tokens, batch.request))
        return number + 1, jnp.argmax(logits, axis=-1).astype(jnp.int32), commit(state)

    carry = (jnp.asarray(0), batch.tokens, state)
    _, tokens, state = jax.lax.while_loop(lambda carry: carry[0] < 8, body, carry)
    return tokens, state


PROGRAMS: dict[str, tuple[Callable, int]] = {
    "decode_step": (decode_step, DECODE_ROWS),
    "prefill": (prefill, PREFILL_ROWS),
    "loop": (decode_loop, DECODE_ROWS),
}


def compiled(program: str, config: Config, packed: bool = False, donate: bool = True) -> Any:
    function, rows = PROGRAMS[program]
    params: Any = abstract_params(config)
    if packed:
        params = jax.eval_shape(lambda p: pack(p, config), params)
    jitted = jax.jit(function, donate_argnames="state" if donate else None)
    return jitted.lower(params, state_shapes(config), batch_shapes(rows)).compile()


def smallest_array(config: Config) -> int:
    """Elements of the smallest pool, ring or KV cache of a layer."""
    shapes = state_shapes(config)
    return min(math.prod(s.shape) for s in (*shapes.recurrent, *shapes.conv, *shapes.keys, *shapes.values))


def copied_sizes(program: Any) -> list[int]:
    """Element counts of all `copy` results in the compiled program."""
    sizes = [math.prod(int(n) for n in dims.split(",") if n) for dims in COPY.findall(program.as_text())]
    # nothing slipped through the expression
    assert len(sizes) == len(re.findall(r" copy(?:-start)?\(", program.as_text()))
    return sizes


def state_bytes(config: Config) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(state_shapes(config)))


def assert_in_place(program: Any, config: Config) -> None:
    """No copy of a state array, no array of that size among the temporaries, all of the state aliased."""
    memory, smallest = program.memory_analysis(), smallest_array(config)
    # A single decode step never reads `pending`, so jit drops that vector from its arguments.
    unread = 4 * config.max_requests
    assert max(copied_sizes(program), default=0) < smallest
    assert memory.temp_size_in_bytes < smallest * jnp.dtype(config.dtype).itemsize
    assert memory.alias_size_in_bytes >= state_bytes(config) - unread


@pytest.mark.newest
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_state_is_updated_in_place(program: str, layout: str) -> None:
    temporary = {}
    for requests in (8, 64, 512):
        config = config_of(layout, requests)
        found = compiled(program, config)
        temporary[requests] = found.memory_analysis().temp_size_in_bytes
    assert_in_place(found, config)

    # A few int32 numbers a request are all that may grow.
    print(f"{program}, {layout}: temporary bytes by requests {temporary}")
    for few, many in ((8, 64), (64, 512)):
        assert temporary[many] - temporary[few] <= 32 * (many - few)


@pytest.mark.parametrize("program", PROGRAMS)
def test_packed_weights_change_nothing_of_that(program: str) -> None:
    config = config_of("twin")
    assert_in_place(compiled(program, config, packed=True), config)


DESIGNS = [(layout, state) for layout in LAYOUTS for state in ("record", "slots")]


@pytest.mark.newest
@pytest.mark.parametrize(("layout", "state"), DESIGNS)
def test_verified_rows_update_the_state_in_place(layout: str, state: str) -> None:
    def verified(requests: int) -> Any:
        config = config_of(layout, requests, speculate=3, speculative_state=state)
        tokens, vector = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((DECODE_ROWS, 4), (DECODE_ROWS,)))
        jitted = jax.jit(verify_step, donate_argnames="state")
        arguments = abstract_params(config), state_shapes(config), VerifyBatch(tokens, vector, vector)
        return config, jitted.lower(*arguments).compile()

    config, many = verified(500)  # no power of two, so that no size of a record is one of something else
    assert_in_place(many, config)
    records = jax.tree.leaves(state_shapes(config).record)
    assert not {leaf.size for leaf in records if leaf.ndim > 1} & set(copied_sizes(many))
    if (layout, state) == ("twin", "record"):
        # A few int32 numbers a request are all that may grow.
        few = verified(60)[1].memory_analysis().temp_size_in_bytes
        assert many.memory_analysis().temp_size_in_bytes - few <= 32 * (500 - 60)


@pytest.mark.newest
def test_the_search_finds_copies_when_nothing_is_donated() -> None:
    config = config_of("twin")
    found = compiled("decode_step", config, donate=False)
    assert max(copied_sizes(found)) >= smallest_array(config)
    assert found.memory_analysis().alias_size_in_bytes == 0


def test_drafts_update_their_cache_in_place() -> None:
    config = config_of("twin", mtp_num_hidden_layers=1, draft_kv=True)
    params, state, batch = abstract_params(config), state_shapes(config), batch_shapes(DECODE_ROWS)
    hidden = jax.ShapeDtypeStruct((DECODE_ROWS, config.hidden_size), jnp.float32)
    drafts = jax.jit(draft, donate_argnames="state", static_argnames="count")
    assert_in_place(drafts.lower(params, state, batch, hidden, count=3).compile(), config)

    fill = jax.jit(fill_draft_kv, donate_argnames="state")
    filled = fill.lower(params, state, batch.tokens, hidden, batch.request, batch.request).compile()
    assert_in_place(filled, config)
    # fc, k and v of each row: neither its query, nor attention, nor the MLP, nor the head
    products = 2 * config.hidden_size**2 + 2 * config.hidden_size * config.head_dim
    flops = filled.cost_analysis()["flops"]
    assert 2 * DECODE_ROWS * products < flops < 2.5 * DECODE_ROWS * products


def test_bfloat16_state_and_activations_are_not_copied() -> None:
    config = config_of("twin", dtype="bfloat16", state_dtype="bfloat16")
    found = compiled("decode_step", config)
    if jax.__version_info__ >= (0, 12, 0):
        assert_in_place(found, config)
        return
    # Older CPU backends scatter bfloat16 by way of float32, in temporaries as large as the state.
    assert max(copied_sizes(found), default=0) < smallest_array(config)
    assert found.memory_analysis().alias_size_in_bytes >= state_bytes(config) - 4 * config.max_requests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_contents_do_not_retrace(layout: str) -> None:
    config = config_of(layout, requests=4)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(config))
    state = init_state(config)
    traced = {"prefill": 0, "decode_step": 0, "commit": 0}

    def counted(function: Callable) -> Any:
        def wrapper(*args: Any) -> Any:
            traced[function.__name__] += 1
            return function(*args)

        return jax.jit(wrapper, donate_argnums=0 if function is commit else 1)

    run_prefill, run_decode, run_commit = map(counted, (prefill, decode_step, commit))
    for pieces in ({0: [1, 2, 3]}, {3: [7], 1: [1] * 9}, {2: [5] * 16}, {0: [4]}):
        _, state = run_prefill(params, state, prefill_batch(config, pieces, PREFILL_ROWS))
    for tokens in ({0: 3}, {}, {3: 1, 1: 2, 0: 9}, {2: 40, 3: 0, 0: 1, 1: 1}):
        _, state = run_decode(params, state, decode_batch(tokens, DECODE_ROWS))
        state = run_commit(state)
    assert traced == {"prefill": 1, "decode_step": 1, "commit": 1}
    assert run_prefill._cache_size() == run_decode._cache_size() == run_commit._cache_size() == 1
    # The config is part of the key by value: an equal one compiles nothing new.
    run_decode(params, init_state(config_of(layout, requests=4)), decode_batch({}, DECODE_ROWS))
    assert traced["decode_step"] == 1


# Intermediates


def forward_without_intermediates(params: Any, config: Config, tokens: jax.Array) -> jax.Array:
    """`forward` written so that it could not return any."""
    c = config
    cos, sin = rope_table(jnp.arange(tokens.shape[1], dtype=jnp.int32), c.rope_theta, c.rotary_dim)

    def mix_gdn(p: Any, x: jax.Array, _: int) -> jax.Array:
        qkv, z, b, a = map(value, gdn_project(p, x, c))
        q, k, v = gdn_heads(causal_conv_sequence(qkv, p["conv1d"]["weight"]), c)
        out, _ = gated_delta_sequence(q, k, v, *gates(a, b, p["A_log"], p["dt_bias"]))
        return gdn_output(p, out.astype(x.dtype), z, c, "reference")

    def mix_attention(p: Any, x: jax.Array, _: int) -> jax.Array:
        return sequence_attention(p, x, c, cos, sin)[0]

    return head(params, run_layers(params, c, embed(params, tokens), mix_gdn, mix_attention)[0])


def test_intermediates_cost_nothing_when_not_asked_for() -> None:
    config = config_of("in_place")
    params, tokens = abstract_params(config), jax.ShapeDtypeStruct((2, 150), jnp.int32)

    def cost(function: Callable) -> tuple[float, int, int]:
        program = jax.jit(function, static_argnums=1).lower(params, config, tokens).compile()
        memory = program.memory_analysis()
        return program.cost_analysis()["flops"], memory.temp_size_in_bytes, memory.output_size_in_bytes

    assert cost(forward) == cost(forward_without_intermediates)
    # and asking for them is seen
    assert cost(forward_with_intermediates)[2] > 2 * cost(forward)[2]

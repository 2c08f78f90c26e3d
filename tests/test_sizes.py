"""Bytes against hand computation, and what fits against what is really allocated."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.config import Config, from_preset
from gdnjax.engine.programs import new_slate
from gdnjax.sizes import CPU_MEMORY, MOST_REQUESTS, derive_limits, fit, sizes
from gdnjax.state import init_state
from gdnjax.weights.declaration import init_params
from tests.generation.small import SMALL
from tests.helpers import LAYOUTS

MIB, KIB = 2**20, 2**10


@pytest.mark.newest
@pytest.mark.parametrize(
    # Recurrent MiB; KiB of one column of all rings; KiB of a KV token. Three columns are the window.
    ("name", "state", "column", "window", "kv"),
    [
        ("0.8b", 18, 18 * 6144 * 2 / KIB, 18.6, 12),
        ("2b", 18, 18 * 6144 * 2 / KIB, 18.6, 12),
        ("4b", 48, 24 * 8192 * 2 / KIB, 49.1, 32),
        ("9b", 48, 24 * 8192 * 2 / KIB, 49.1, 32),
        ("27b", 144, 48 * 10240 * 2 / KIB, 146.8, 64),
    ],
)
def test_published_shapes(name: str, state: int, column: float, window: float, kv: int) -> None:
    costs = sizes(from_preset(name))
    in_place = costs.bytes_per_request["in_place"]
    assert in_place == state * MIB + 4 * column * KIB
    assert round(state + 3 * column / KIB, 1) == window
    assert costs.bytes_per_request["twin"] == in_place + state * MIB
    assert costs.bytes_per_kv_token == kv * KIB


def count_parameters(c: Config) -> int:
    """Written out from the model's description."""
    h, d = c.hidden_size, c.head_dim
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    mlp = 3 * h * c.intermediate_size + 2 * h  # with the layer's two norms
    gdn = (2 * keys + 2 * values + 2 * c.linear_num_value_heads) * h + values * h
    gdn += 4 * (2 * keys + values) + 2 * c.linear_num_value_heads + c.linear_value_head_dim
    attention = (3 * c.num_attention_heads + 2 * c.num_key_value_heads) * d * h + 2 * d
    full = sum(t == "full_attention" for t in c.layer_types)
    mtp = c.mtp_num_hidden_layers * (2 * h * h + 3 * h + attention + mlp)
    heads = 1 if c.tie_word_embeddings else 2
    layers = (c.num_hidden_layers - full) * gdn + full * attention + c.num_hidden_layers * mlp
    return heads * c.vocab_size * h + layers + h + mtp


@pytest.mark.parametrize("name", ["0.8b", "2b", "4b", "9b", "27b", "tiny"])
def test_parameters_and_weight_bytes(name: str) -> None:
    config = from_preset(name)
    costs = sizes(config)
    assert costs.parameters == count_parameters(config)
    float32 = (config.num_hidden_layers * 3 // 4) * (2 * config.linear_num_value_heads + config.linear_value_head_dim)
    assert costs.weight_bytes == 2 * costs.parameters + 2 * float32
    assert sizes(config.replace(dtype="float32")).weight_bytes == 4 * costs.parameters


def test_the_fp8_head_is_counted_beside_the_weights() -> None:
    config = from_preset("0.8b")
    fp8, copy = config.replace(draft_head="fp8"), 248320 * 1024 + 4 * 248320
    costs = sizes(fp8)
    assert costs == dataclasses.replace(sizes(config), draft_head_bytes=copy)
    # What fits is what fits into a memory that is smaller by the copy.
    memory = 8 * 2**30
    assert fit(fp8, memory) == fit(config, memory - copy)
    with pytest.raises(ValueError, match=f"the weights take {costs.weight_bytes + copy:,}, and"):
        fit(fp8, costs.weight_bytes)


def penalties(config: Config) -> int:
    """Bytes of what sampling keeps for every token that there is."""
    slate = jax.eval_shape(lambda: new_slate(config))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in (slate.in_prompt, slate.in_output))


def allocated(config: Config) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(init_state(config, []))) + penalties(config)


SPECULATION = [{}, {"speculate": 3}, {"speculate": 3, "speculative_state": "slots"}]


@pytest.mark.parametrize("speculation", SPECULATION, ids=["plain", "record", "slots"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_and_a_token_cost_what_is_said(layout: str, speculation: dict) -> None:
    config = SMALL.replace(state_layout=layout, **speculation)
    costs = sizes(config)
    one, two = (allocated(config.replace(max_requests=n, kv_tokens=64)) for n in (1, 2))
    # and four int32 (seven with a record), a row of the page table, and the arrays of the penalties
    numbers = 4 + 3 * config.records + config.pages_per_request
    assert two - one == costs.bytes_per_request[layout] + 4 * numbers + 5 * config.vocab_size
    more = allocated(config.replace(max_requests=1, kv_tokens=128))
    assert more - one == 64 * costs.bytes_per_kv_token
    weights = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert costs.weight_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))


def test_a_record_is_a_fraction_of_the_slots_that_it_replaces() -> None:
    config = from_preset("27b", speculate=3)
    record, plain = sizes(config).bytes_per_request, sizes(config.replace(speculate=0)).bytes_per_request
    slots = sizes(config.replace(speculative_state="slots")).bytes_per_request
    columns = 48 * 3 * 10240 * 2
    for layout, state in (("in_place", 144 * MIB), ("twin", 2 * 144 * MIB)):
        # two halves of four rows: k, v, and a and b of every head, in bfloat16
        assert record[layout] - plain[layout] - columns == 48 * 2 * 4 * (16 * 128 + 48 * 128 + 2 * 48) * 2
        assert slots[layout] - plain[layout] - columns == 3 * state
        assert 20 * (record[layout] - plain[layout]) <= slots[layout] - plain[layout]
        # and of the three pages alone, without the ring's columns that both designs have
        assert 20 * (record[layout] - plain[layout] - columns) <= 3 * 144 * MIB


@pytest.mark.parametrize("drafts", [1, 3, 7])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_record_frees_a_page_for_every_draft(layout: str, drafts: int) -> None:
    """requests x layers x (k pages - record), of what is really allocated."""
    config = SMALL.replace(num_hidden_layers=3, layer_types=("linear_attention", "full_attention", "linear_attention"))
    config = config.replace(state_layout=layout, speculate=drafts, kv_tokens=128, max_requests=5)
    slots, record = (allocated(config.replace(speculative_state=form)) for form in ("slots", "record"))
    page = 4 * 16 * 16 * 4
    # two halves of 1 + k rows: k of two heads, v, a and b of four, in the activations' dtype
    record_bytes = 2 * (1 + drafts) * (2 * 16 + 4 * 16 + 2 * 4) * 4
    pages = drafts * (2 if layout == "twin" else 1)
    counts = 5 * 3 * 4  # live rows, half and accepted rows of each request
    assert slots - record == 5 * 2 * (pages * page - record_bytes) - counts


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("max_length", [1, 64, 100])
@given(extra=st.integers(0, 2_000_000), speculation=st.sampled_from(SPECULATION))
def test_what_fits_fits_and_no_more_would(layout: str, max_length: int, extra: int, speculation: dict) -> None:
    config = SMALL.replace(state_layout=layout, max_length=max_length, **speculation)
    costs = sizes(config)
    with pytest.raises(ValueError) as error:
        fit(config, 0)
    needed = int(str(error.value).split("one request needs ")[1].split(" in all")[0].replace(",", ""))
    memory = needed + extra
    requests, tokens = fit(config, memory)
    assert requests >= 1 and tokens >= requests * max_length and tokens % config.page_size == 0

    def total(requests: int, tokens: int) -> int:
        from gdnjax.state import state_shapes

        served = config.replace(max_requests=requests, kv_tokens=tokens)
        shapes = jax.tree.leaves(state_shapes(served))
        return costs.weight_bytes + penalties(served) + sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)

    assert total(requests, tokens) <= memory
    assert total(requests, tokens + config.page_size) > memory
    assert total(requests + 1, (requests + 1) * config.pages_per_request * config.page_size) > memory


def test_the_least_memory_really_is() -> None:
    config = SMALL.replace(max_requests=1)
    needed = sizes(config).weight_bytes + allocated(config)
    assert fit(config, needed) == (1, 64)
    with pytest.raises(ValueError, match=f"holds no request of max_length = 64: .* needs {needed:,} in all; lower"):
        fit(config, needed - 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["0.8b", "27b"])
@pytest.mark.parametrize("gib", [80, 192, 1000, 10**6])
@pytest.mark.parametrize("max_length", [64, 4096])
def test_what_fits_is_what_a_config_takes(name: str, layout: str, gib: int, max_length: int) -> None:
    for speculation in SPECULATION:
        config = from_preset(name).replace(state_layout=layout, max_length=max_length, **speculation)
        requests, tokens = fit(config, gib * 2**30)
        config.replace(max_requests=requests, kv_tokens=tokens)  # raises where an array would pass 2^31 elements


def test_without_attention_no_cache_grows() -> None:
    config = SMALL.replace(layer_types=("linear_attention",) * 2)
    assert sizes(config).bytes_per_kv_token == 0
    requests, tokens = fit(config, 100 * MIB)
    assert requests > 1 and tokens >= requests * config.max_length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_derived_limits_fill_the_memory(layout: str) -> None:
    config = SMALL.replace(state_layout=layout, memory_fraction=0.5, max_requests=1000)
    costs, tokens = sizes(config), config.pages_per_request * config.page_size

    def spent(c: Config) -> int:
        return costs.weight_bytes + allocated(c) + c.prefix_cache_bytes

    one = costs.weight_bytes + allocated(config.replace(max_requests=1, kv_tokens=tokens))
    found = derive_limits(config, memory=2 * one)
    assert (found.max_requests, found.kv_tokens, found.state_layout) == (1, tokens, layout)
    ten = costs.weight_bytes + allocated(config.replace(max_requests=10, kv_tokens=10 * tokens))
    found = derive_limits(config, memory=2 * ten)
    assert (found.max_requests, found.kv_tokens) == (10, 10 * tokens)
    # what is given stays
    assert derive_limits(config, max_requests=4, memory=2 * ten).kv_tokens == 4 * tokens
    found = derive_limits(config, kv_tokens=tokens, memory=2 * ten)
    assert found.max_requests > 10 and found.kv_tokens == tokens and spent(found) <= ten
    assert spent(found.replace(max_requests=found.max_requests + 1)) > ten
    given = derive_limits(config, max_requests=3, kv_tokens=16, memory=1)
    assert (given.max_requests, given.kv_tokens) == (3, 16)
    # never more requests than a step is good for, and tokens that only prefixes can fill
    assert derive_limits(config, memory=2**40).max_requests == MOST_REQUESTS
    assert derive_limits(config, memory=2**40).kv_tokens == MOST_REQUESTS * tokens
    caching = config.replace(prefix_cache_bytes=100_000)
    found = derive_limits(caching, max_requests=4, memory=2 * ten)
    assert found.kv_tokens is not None and found.kv_tokens > 4 * tokens and spent(found) <= ten
    assert spent(found.replace(kv_tokens=found.kv_tokens + found.page_size)) > ten


def test_derived_limits_that_do_not_fit() -> None:
    tokens = SMALL.pages_per_request * SMALL.page_size
    one = sizes(SMALL).weight_bytes + allocated(SMALL.replace(max_requests=1, kv_tokens=tokens))
    for asked in ({"max_requests": 2}, {"kv_tokens": tokens + 16}):
        with pytest.raises(
            ValueError, match=r"memory_fraction = 1.0 of .* bytes: .*; a request takes .*: lower max_req"
        ):
            derive_limits(SMALL.replace(memory_fraction=1.0), memory=one, **asked)
    with pytest.raises(ValueError, match="holds no request of max_length = 64"):
        derive_limits(SMALL.replace(memory_fraction=1.0), memory=one - 1)


def test_a_device_that_does_not_say_counts_with_the_default() -> None:
    assert derive_limits(SMALL) == derive_limits(SMALL, memory=CPU_MEMORY)

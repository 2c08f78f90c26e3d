"""The compiled step and loop: no copies of the state, no second compilation, no growing memory."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config
from gdnjax.generation import SamplingParams
from gdnjax.generation.drafting import by_head
from gdnjax.generation.loop import Decoding, PythonLoop, device_loop, jitted_emit, jitted_step, make_decoding, step
from gdnjax.generation.sampling import make_sampler
from gdnjax.generation.speculation import jitted_speculative_step, make_speculation, speculative_device_loop
from gdnjax.state import State, init_state
from gdnjax.weights.declaration import abstract_params
from tests.generation.small import PROMPTS, SMALL, run, small_model
from tests.helpers import LAYOUTS

ROWS = 8
# Sizes at which no array but the pools has a pool's number of elements.
POOLS = SMALL.replace(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    max_requests=ROWS,
    max_length=128,
)
# What may have a pool's size: handing it on, and writing into it. (A fusion's inside is listed too.)
HARMLESS = {"parameter", "get-tuple-element", "tuple", "bitcast", "scatter", "dynamic-update-slice", "fusion", "while"}

SPECULATING = POOLS.replace(speculate=2, mtp_num_hidden_layers=1, draft_kv=True)

Compile = Callable[[Any], Any]
PLAIN: dict[str, Compile] = {
    "step": lambda d: jitted_step.lower(abstract_params(d.state.config), d),
    "device_loop": lambda d: device_loop.lower(abstract_params(d.state.config), d, 16),
}
PROGRAMS: dict[str, Compile] = PLAIN | {
    "speculative_step": lambda s: jitted_speculative_step.lower(
        abstract_params(s.state.config), s, propose=by_head, width=2
    ),
    "speculative_loop": lambda s: speculative_device_loop.lower(
        abstract_params(s.state.config), s, steps=16, propose=by_head
    ),
}
# A loop for each width in a loop.
ADAPTIVE = "adaptive_loop"
PROGRAMS[ADAPTIVE] = PROGRAMS["speculative_loop"]
# Of the speculating programs each is tested in one layout where time matters.
LATER = [(ADAPTIVE, "in_place"), (ADAPTIVE, "twin"), ("speculative_step", "twin"), ("speculative_loop", "in_place")]
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] if case in LATER else [])
    for case in itertools.product(PROGRAMS, LAYOUTS)
]


def make(config: Config, adaptive: bool = False) -> Decoding:
    rows = config.max_requests
    decoding = make_decoding(
        init_state(config), make_sampler([SamplingParams()] * rows, rows), [16] * rows, (), [[1]] * rows
    )
    if not config.speculate:
        return decoding
    hidden = jnp.zeros((rows, config.hidden_size))
    return make_speculation(decoding, [config.speculate] * rows, "mtp", [], hidden, adaptive)


def pools(state: State) -> dict[str, int]:
    """Elements of one layer's arrays."""
    return {name: getattr(state, name)[0].size for name in ("recurrent", "conv", "keys")}


def whole_pool_operations(compiled: Any, elements: int) -> Counter[str]:
    """Operations of a compiled program, by name, whose result has so many elements."""
    found: Counter[str] = Counter()
    for dims, operation in re.findall(r" = \w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text()):
        if math.prod(map(int, dims.split(","))) == elements:
            found[operation] += 1
    return found


@functools.cache
def compiled_program(program: str, layout: str) -> tuple[Any, Decoding]:
    config = POOLS if program in PLAIN else SPECULATING
    decoding = make(config.replace(state_layout=layout), program == ADAPTIVE)
    return PROGRAMS[program](decoding).compile(), decoding


@pytest.mark.newest
@pytest.mark.parametrize(("program", "layout"), CASES)
def test_no_copy_of_a_pool(program: str, layout: str) -> None:
    compiled, decoding = compiled_program(program, layout)
    for name, elements in pools(decoding.state).items():
        found = whole_pool_operations(compiled, elements)
        assert found["scatter"] >= 1, f"{name}: no update of {elements} elements is found, so nothing is tested"
        assert found.keys() <= HARMLESS, f"{name}: {dict(found)}"


@pytest.mark.parametrize(("program", "layout"), CASES)
def test_the_whole_state_is_donated(program: str, layout: str) -> None:
    compiled, decoding = compiled_program(program, layout)
    donated = compiled.memory_analysis().alias_size_in_bytes
    assert donated >= sum(x.nbytes for x in jax.tree.leaves(decoding.state))


@pytest.mark.parametrize("program", [name for name in PROGRAMS if name != ADAPTIVE])
def test_every_array_is_donated_to_its_own_successor(program: str) -> None:
    # Inputs are paired with outputs of their shape in order: one that is dropped would shift all behind it.
    config = POOLS if program in PLAIN else SPECULATING
    params, decoding = abstract_params(config), make(config)
    signature = PROGRAMS[program](decoding).as_text().partition("@main(")[2].partition(") -> (")[0]
    outputs = re.findall(r"%arg\d+: tensor<\S+ \{[^}]*tf\.aliasing_output = (\d+)", signature)
    assert outputs == [str(i) for i in range(len(jax.tree.leaves(decoding)))]
    assert signature.count("%arg") == len(jax.tree.leaves((params, decoding)))


def test_a_copy_would_be_found() -> None:
    decoding = make(POOLS)
    kept = jax.jit(step).lower(abstract_params(POOLS), decoding).compile()
    for elements in pools(decoding.state).values():
        assert whole_pool_operations(kept, elements)["copy"] >= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_temporaries_do_not_grow_with_the_pools(layout: str) -> None:
    # the same rows over a cache of twice the size
    small, _ = compiled_program("step", layout)
    config = POOLS.replace(state_layout=layout, kv_tokens=2 * ROWS * POOLS.max_length)
    large = PROGRAMS["step"](make(config)).compile()
    assert large.memory_analysis().temp_size_in_bytes == small.memory_analysis().temp_size_in_bytes
    assert large.memory_analysis().alias_size_in_bytes > small.memory_analysis().alias_size_in_bytes


def compilations() -> dict[str, int]:
    from gdnjax.generation.prompts import jitted_prefill

    functions = {"step": jitted_step, "loop": device_loop, "emit": jitted_emit, "prefill": jitted_prefill}
    return {name: function._cache_size() for name, function in functions.items()}


@pytest.mark.parametrize("loop", ["device", "python"])
def test_nothing_is_compiled_twice(loop: str) -> None:
    model = small_model()

    def generate(shift: int, count: int, temperature: float, top_k: int, stop_ids: tuple[int, ...]) -> None:
        params = [SamplingParams(temperature=temperature, top_k=top_k, seed=shift + i) for i in range(4)]
        prompts = [[(t + shift) % 250 for t in p] for p in PROMPTS]
        run(model, prompts, count, params, stop_ids=stop_ids, loop=loop)

    generate(0, 12, 1.0, 32, (1,))
    before = compilations()
    generate(1, 12, 0.5, 17, (2,))
    generate(2, 5, 0.5, 20, (3,))
    generate(3, 17, 2.0, 32, (4,))
    assert compilations() == before
    # rows that the host retires, in the middle
    run(model, PROMPTS, 12, tokenizer=model.tokenizer, stop=("e", "a", "�"), loop=loop)
    before = compilations()
    run(model, PROMPTS, 12, tokenizer=model.tokenizer, stop=("e", "b", "\u00e9"), loop=loop)
    assert compilations() == before


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_flat_over_a_thousand_steps(layout: str) -> None:
    config = POOLS.replace(max_requests=2, max_length=1024, state_layout=layout)
    params = small_params(config)
    sampler = make_sampler([SamplingParams(temperature=1.0, top_k=16, repetition_penalty=1.1)] * 2, 2)
    decoding = make_decoding(init_state(config), sampler, [1020, 1020], (), [[1], [2]])
    driver = PythonLoop(params, decoding)
    del decoding
    held, programs = {}, {}
    for number, emission in enumerate(driver, start=1):
        assert (emission.token >= 0).all() and np.isfinite(emission.logprob).all()
        if number in (20, 1000):
            held[number], programs[number] = live_bytes(), jitted_step._cache_size()
    assert held[1000] == held[20]
    assert programs[1000] == programs[20]
    # a state, its bookkeeping, and one emission behind: no second state
    state = sum(x.nbytes for x in jax.tree.leaves(driver.decoding.state))
    assert driver.decoding.state.position.tolist() == [1020, 1020]
    del driver, params
    assert state <= held[20] - live_bytes() < 2 * state


def small_params(config: Config) -> Any:
    from gdnjax.loading import random_model

    return random_model(config, seed=2).params


@pytest.mark.parametrize("loop", ["device", "python"])
def test_memory_is_flat_over_twenty_requests(loop: str) -> None:
    model = small_model()
    rng = np.random.default_rng(0)
    held = []
    for number in range(20):
        prompts = [rng.integers(0, 250, rng.integers(1, 5)).tolist() for _ in range(4)]
        results = run(model, prompts, 5, loop=loop)
        assert len(results) == 4
        if number >= 1:
            held.append(live_bytes())
    assert len(set(held)) == 1, held
